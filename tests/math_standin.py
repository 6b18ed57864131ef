"""A code interpreter without isolation, for tests whose code is their own: the face of `spear_rl.sandbox`."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    stdout: str
    error: str | None = None
    state_lost: bool = False


class Session:
    """Counts its runs and knows whether it was closed."""

    opened: list[Session] = []  # noqa: RUF012 - shared on purpose

    def __init__(self) -> None:
        self.variables: dict[str, object] = {}
        self.codes: list[str] = []
        self.is_closed = False
        Session.opened.append(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def run(self, code: str) -> Result:
        assert not self.is_closed
        self.codes.append(code)
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(code, self.variables)
        except Exception as error:
            return Result(out.getvalue(), f"{type(error).__name__}: {error}")
        return Result(out.getvalue())


class Echo:
    """Runs nothing, for code that nobody has read."""

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, code: str) -> Result:
        return Result(f"{len(code)} characters")
