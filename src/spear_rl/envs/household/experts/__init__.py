"""Demonstrations: with full knowledge of the game, or searching."""
