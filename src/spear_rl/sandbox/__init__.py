"""A Python interpreter for code nobody has read: isolated, bounded, and gone without a trace. Never imports torch."""

from spear_rl.sandbox.client.interpreter import Interpreter, Session
from spear_rl.sandbox.limits import Limits
from spear_rl.sandbox.result import Result
from spear_rl.sandbox.unavailable import SandboxUnavailable

__all__ = ["Interpreter", "Limits", "Result", "SandboxUnavailable", "Session"]
