"""Reads a game.tw-pddl file and compares its rules with those that ALFWorld publishes. Nothing in it is ever run."""

import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

from spear_rl.envs.household.rules.pddl import TASK, task_sentence

GAME_FILE = "game.tw-pddl"

# SHA-256 of the games that alfworld-download fetches, and of alfworld 0.4.2's own alfred.twl2 and alfred.pddl.
PUBLISHED_GRAMMARS = (
    "10da93e13b58e1a6039723f5d4a59ceae7c60772515bfab9fc603bafa7f8ee06",
    "c294eb280206a4428664cdb4e2037e267e86de5b7fa862212718a961513a7de4",
)
"""Hashes of the grammar without its task sentence."""
PUBLISHED_DOMAINS = (
    "0af55e7f92d12b09d28515aa730e4d03fddd17228ef1fd7b18a3ee8ba49b27b9",
    "f1473041ed01da514de1f87adfd7ef0804862361f83ccf63c75e43633b0eb280",
)

# A sentence holds no syntax of the grammar: the stock engine evaluates what is in braces.
_SENTENCE = re.compile(r"[\w ,.;:!?'()/-]*", re.ASCII)


class GameFile(NamedTuple):
    """The content of a game file."""

    domain: str
    grammar: str
    problem: str
    walkthrough: tuple[str, ...]
    is_solvable: bool
    sha256: str

    @property
    def task(self) -> str:
        """The task as a sentence; empty if the grammar has none."""
        return task_sentence(self.grammar)

    @property
    def is_published(self) -> bool:
        """Whether rules and wording are ALFWorld's own, so that the file can only define a room and a task."""
        skeleton = self.grammar.replace(f'{TASK}{self.task}"', f'{TASK}"', 1)
        return (
            _sha256(skeleton.encode()) in PUBLISHED_GRAMMARS
            and _sha256(self.domain.encode()) in PUBLISHED_DOMAINS
            and _SENTENCE.fullmatch(self.task) is not None
        )


def read_game_file(path: str | Path, *, sha256: str = "") -> GameFile:
    """The game in a file; with `sha256`, only if the file has that content."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"the game file {path} cannot be read: {error.strerror}") from error
    digest = _sha256(content)
    if sha256 and digest != sha256:
        raise ValueError(f"the game file {path} has changed since the panel was read: start again")
    try:
        fields = json.loads(content)
        domain, grammar, problem = fields["pddl_domain"], fields["grammar"], fields["pddl_problem"]
        walkthrough = tuple(fields.get("walkthrough") or ())
        if not all(isinstance(text, str) for text in (domain, grammar, problem, *walkthrough)):
            raise TypeError("a text is not a text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, error) from error
    return GameFile(domain, grammar, problem, walkthrough, fields.get("solvable") is True, digest)


def damaged(path: str | Path, error: Exception) -> ValueError:
    """The error for a file that is not a game."""
    reason = f"{type(error).__name__}: {error}"[:200]
    return ValueError(f"the game file {path} is damaged ({reason}): remove it and run `alfworld-download` again")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
