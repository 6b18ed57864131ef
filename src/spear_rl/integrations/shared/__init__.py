"""Shared by the TRL and verl integrations."""
