"""Typed settings: nested dataclasses, the range of every field, and objects found by name. Never imports torch."""
