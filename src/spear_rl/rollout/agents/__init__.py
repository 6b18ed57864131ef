"""Agents of any framework as rollouts: an OpenAI-compatible endpoint serves the policy and captures every call."""
