"""What untrusted code may use, what running it gives, and the error when it cannot be run."""

import math
from dataclasses import dataclass, fields

from spear_rl.errors import UserError

MIB = 1 << 20


class SandboxUnavailable(UserError):  # noqa: N818 (public name)
    """Untrusted code cannot run: no isolation, no process or no service. Never caused by the code itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per call (`seconds`, `output_chars`, `code_chars`) and per episode (the rest)."""

    seconds: float = 5.0
    """Wall-clock time per call, without the time spent queueing."""
    memory_mb: int = 512
    """Address space beyond that of the interpreter with its packages loaded."""
    output_chars: int = 10_000
    """Characters kept of stdout, of stderr and of an error; `Result.truncated` says whether more were written."""
    disk_mb: int = 16
    """Total size of the scratch directory, and also the maximum size of each output stream per call."""
    max_files: int = 256
    """Files and directories in the scratch directory."""
    code_chars: int = 200_000
    """Longer code returns an error and does not run."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if field.name == "seconds":
                if not (is_whole or isinstance(value, float)) or not math.isfinite(value) or value <= 0:
                    raise ValueError(f"Limits.seconds is a positive number, not {value!r}")
            elif not is_whole or not 0 < value < 1 << 31:
                raise ValueError(f"Limits.{field.name} is a positive whole number, not {value!r}")

    @property
    def file_bytes(self) -> int:
        """Maximum size of any file, including a captured stream."""
        return max(self.disk_mb * MIB, 4 * self.output_chars + 4)

    @property
    def reply_bytes(self) -> int:
        """Maximum length of an error text in UTF-8."""
        return 4 * self.output_chars + 1024


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one call."""

    stdout: str
    """At most `Limits.output_chars`; the value of a trailing expression comes last, as in a notebook."""
    error: str | None = None
    """Why it failed, for the author of the code: a traceback of its own lines, or one sentence."""
    timed_out: bool = False
    out_of_memory: bool = False
    state_lost: bool = False
    """The variables of earlier calls are gone, because of this call or the previous one."""
    truncated: bool = False
    """Some of stdout or stderr was cut off."""
    stderr: str = ""
    seconds: float = 0.0
    """Wall-clock time of the call."""

    @property
    def ok(self) -> bool:
        return self.error is None
