"""Prompting baselines for any policy: worked examples before the task (ReAct), retries with reflections (Reflexion)."""
