"""SPEAR inside verl 0.9: a trainer mode, an agent loop for our environments and a launcher; docs/verl.md."""
