"""Policies without a local model: expert, random, a chat endpoint."""
