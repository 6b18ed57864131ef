"""Shared by several environments: seeded draws, parsing of action tags, panels and their manifests."""
