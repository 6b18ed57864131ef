"""What a call of the interpreter came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one piece of code. All text is the untrusted code's own, or ours about it."""

    stdout: str
    """What it printed, at most `Limits.output_chars`; a trailing expression's value comes last, as in a notebook."""
    error: str | None = None
    """Why it failed, as the author of the code should see it: a traceback of its own lines, or one sentence."""
    timed_out: bool = False
    out_of_memory: bool = False
    state_lost: bool = False
    """The variables of earlier calls are gone: this call cost them, or the one before did."""
    truncated: bool = False
    """Some of stdout or stderr was cut off."""
    stderr: str = ""
    seconds: float = 0.0
    """Wall-clock time from handing the code over to the answer."""

    @property
    def ok(self) -> bool:
        return self.error is None
