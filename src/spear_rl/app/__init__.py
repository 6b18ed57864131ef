"""From a configuration to a run: what `spear train`, `eval`, `show`, `compare` and `doctor` do."""
