"""SPEAR: self-imitation learning with progressive exploration for LLM agents."""

__version__ = "0.1.0"
