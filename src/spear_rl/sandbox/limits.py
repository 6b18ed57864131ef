"""What a piece of untrusted code may use at most. Knows no way of holding it to that."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one call (`seconds`, `output_chars`, `code_chars`) and of one episode (the rest)."""

    seconds: float = 5.0
    """Wall-clock time of a call; waiting for a free place to run does not count."""
    memory_mb: int = 512
    """Address space beyond that of the interpreter with its packages loaded."""
    output_chars: int = 10_000
    """Characters kept of stdout, of stderr and of an error; the rest is cut off and `Result.truncated` says so."""
    disk_mb: int = 16
    """All files of the scratch together, and also the most a call may write to one stream before writing fails."""
    max_files: int = 256
    """Files and folders in the scratch."""
    code_chars: int = 200_000
    """Longer code is answered with an error and does not run."""

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
        """The largest file of any kind, a captured stream included."""
        return max(self.disk_mb * MIB, 4 * self.output_chars + 4)

    @property
    def reply_bytes(self) -> int:
        """The longest error text in UTF-8."""
        return 4 * self.output_chars + 1024
