"""SPEAR inside other frameworks: TRL and verl."""
