"""Policies without a model of this process: expert, random, a chat endpoint."""
