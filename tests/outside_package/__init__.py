"""What a user's own package may bring: it knows the public names of spear_rl and is known by none of its files."""
