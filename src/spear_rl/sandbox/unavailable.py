"""The one error the sandbox raises by itself."""

from spear_rl.errors import UserError


class SandboxUnavailable(UserError):  # noqa: N818 (reads as what it is)
    """Untrusted code cannot be run here and now: no isolation, no process, no service. Never the code's own fault."""
