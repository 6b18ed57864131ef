"""The rules of ALFWorld's game: PDDL problems, commands, observations, goals."""
