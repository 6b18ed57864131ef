"""Games from a seed: rooms, objects, goals."""
