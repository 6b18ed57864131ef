"""How fast and how frugal the engine is beside transformers, vLLM and TRL, all measured in one run on one machine."""
