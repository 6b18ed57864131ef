"""Models: built in, from a folder, with LoRA adapters."""
