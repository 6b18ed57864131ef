"""Escaping of untrusted text for display: control and invisible characters become visible escapes.

Episodes, tool output, task texts, file names and servers' answers are untrusted. Files keep the exact text; only what
is displayed goes through here. Standard library only.
"""

import re
import unicodedata
from functools import lru_cache

from spear_rl.errors import UserError

_UNUSUAL = re.compile(r"[^\n -~]")
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Blank or zero-width, though Unicode counts them as letters and marks."""
_MARKDOWN = re.compile(r"[\\`*_\[\]<>|&~$]")


def visible(text: str) -> str:
    r"""Escape control, format (bidirectional), separator, surrogate, private and unassigned characters.

    "\x1b[31mred\u202e" -> r"\x1b[31mred\u202e". Newlines stay, a tab is four spaces. Idempotent.
    """
    return _UNUSUAL.sub(lambda found: _shown(found[0]), text.replace("\r\n", "\n"))


def indented(text: str) -> str:
    """The same with every line but the first indented, so that none passes for a line of ours."""
    return visible(text).replace("\n", "\n    ")


def one_line(text: str) -> str:
    r"""The same on one line: a newline becomes \n."""
    return visible(text).replace("\n", r"\n")


def clipped(text: str, most: int) -> str:
    """The same on one line with single spaces, cut to about `most` characters."""
    line = " ".join(visible(text[: 4 * most]).split())
    return line if len(line) <= most else f"{line[:most]}..."


def in_words(error: BaseException) -> str:
    """An exception on one line, even if its own `str` raises."""
    try:
        text = clipped(str(error), 500)
    except BaseException:
        text = "(its message cannot be read)"
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def markdown(text: str) -> str:
    """One line of text that Markdown renders literally: no table cell, link, image or HTML."""
    return _MARKDOWN.sub(r"\\\g<0>", one_line(text))


@lru_cache(maxsize=4096)
def _shown(character: str) -> str:
    if character == "\t":
        return "    "
    is_plain = character.isprintable() or unicodedata.category(character) == "Zs"
    if is_plain and not _INVISIBLE.match(character):
        return character
    return character.encode("unicode_escape").decode("ascii")
