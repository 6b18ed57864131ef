"""A Python interpreter for untrusted code: isolated, resource-limited, leaving nothing behind. Never imports torch."""

from spear_rl.sandbox.client.interpreter import Interpreter, Session
from spear_rl.sandbox.types import Limits, Result, SandboxUnavailable

__all__ = ["Interpreter", "Limits", "Result", "SandboxUnavailable", "Session"]
