"""SPEAR inside verl on one GPU: what docs/results.md says of it."""
