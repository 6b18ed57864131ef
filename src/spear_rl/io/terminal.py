"""Where the command line prints: a rich console, the log and stderr, none of which a text can steer."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from spear_rl.io.escaping import indented, visible

_FORMAT = "%(levelname)s: %(message)s"


class PlainConsole(Console):
    """A console that shows texts as they are: no markup, no emoji codes, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        # Texts that did not come as strings. Only rich itself makes control segments, and nobody a link.
        for text, style, control in super().render(renderable, options):
            linkless = style.update_link(None) if style and style.link else style
            yield Segment(text if control else visible(text), linkless, control)


class PlainStream(io.TextIOBase):
    """A text stream that escapes what is written to it; a progress bar's returns become new lines."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def write(self, text: str) -> int:
        self.stream.write(visible(text.replace("\r\n", "\n").replace("\r", "\n")))
        return len(text)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()


class PlainFormatter(logging.Formatter):
    """Escapes a record; lines after its first are set in, so that no message passes for two."""

    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))


def protect_stderr() -> None:
    """From now on tracebacks, warnings and libraries' own messages are escaped too."""
    if sys.stderr is not None and not isinstance(sys.stderr, PlainStream):
        sys.stderr = PlainStream(sys.stderr)


def log_to_stderr() -> None:
    """The root logger's handler, unless there is one."""
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(PlainFormatter(_FORMAT))


def error_console() -> PlainConsole:
    """Errors in colour where stderr is a terminal."""
    return PlainConsole(file=sys.stderr.stream if isinstance(sys.stderr, PlainStream) else sys.stderr)
