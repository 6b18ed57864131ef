"""The console, the log and stderr of the command line, all of which escape untrusted text."""

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
    """A console without markup, emoji codes and control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        # For texts that are no strings. Control segments come from rich alone; links are removed.
        for text, style, control in super().render(renderable, options):
            linkless = style.update_link(None) if style and style.link else style
            yield Segment(text if control else visible(text), linkless, control)


class PlainStream(io.TextIOBase):
    """A text stream that escapes what is written to it; carriage returns become new lines."""

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
    """Escapes a record and indents its later lines, so that no message passes for two."""

    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))


def protect_stderr() -> None:
    """Escape tracebacks, warnings and libraries' messages too."""
    if sys.stderr is not None and not isinstance(sys.stderr, PlainStream):
        sys.stderr = PlainStream(sys.stderr)


def log_to_stderr() -> None:
    """Add a handler to the root logger unless it has one."""
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(PlainFormatter(_FORMAT))


def error_console() -> PlainConsole:
    """Errors in colour where stderr is a terminal."""
    return PlainConsole(file=sys.stderr.stream if isinstance(sys.stderr, PlainStream) else sys.stderr)
