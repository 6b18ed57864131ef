"""An episode as lines for a terminal: escaped, wrapped and shortened. What a run does not say is called unknown."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spear_rl.io.escaping import one_line, visible

_HEAD, _TAIL = 5, 2
"""Lines of a long text that are shown: its beginning and its end."""
_INDENT = "    "
"""Before every line of a text but its first."""


@dataclass(frozen=True, slots=True)
class Words:
    """How texts are laid out."""

    width: int = 100
    full: bool = False
    """Whole texts instead of their beginning and end."""

    def block(self, text: str, first: str = "  ") -> list[str]:
        """A text that is not ours: no line of it but the first can look like one of ours."""
        room = max(self.width - max(len(first), len(_INDENT)), 20)
        lines = [part for line in visible(text).split("\n") for part in textwrap.wrap(line, room, **_WRAP) or [""]]
        if not self.full and len(lines) > _HEAD + _TAIL + 1:
            left_out = f"... {len(lines) - _HEAD - _TAIL} more lines, --full shows them ..."
            lines = [*lines[:_HEAD], left_out, *lines[-_TAIL:]]
        return [f"{_INDENT if number else first}{line}".rstrip() for number, line in enumerate(lines)]


_WRAP: dict[str, Any] = {"break_on_hyphens": False, "drop_whitespace": False, "replace_whitespace": False}


def episode_lines(episode: Mapping[str, Any], words: Words) -> list[str]:
    """Head, turn by turn what was seen and answered, and the environment's last answer."""
    lines, turns = _head(episode), episode.get("turns")
    if turns is None:
        return [*lines, "  its text was not kept: run.trajectories_every is 0, or its file is gone"]
    for turn in turns:
        lines += words.block(_text(turn, "observation"))
        answer = words.block(_text(turn, "text"), first="  > ")
        if marks := _marks(turn):
            answer[-1] += f"    [{marks}]"
        lines += answer
    last = episode.get("last_observation")
    if isinstance(last, str):
        lines += words.block(last or "(nothing)", first="  last answer: ")
    else:
        lines.append("  last answer: unknown")
    return lines


def _head(episode: Mapping[str, Any]) -> list[str]:
    is_replayed, turns = bool(episode.get("replayed")), episode.get("turns")
    success = episode.get("success")
    outcome = "unknown outcome" if success is None else "solved" if success else "failed"
    when = f"{'replayed ' if is_replayed else ''}at step {_known(episode, 'step')}"
    where = f", evaluated on {_known(episode, 'split')}" if "split" in episode else ""
    stop = f" ({_known(episode, 'stop')})" if "stop" in episode or not is_replayed else ""
    first = f"{_known(episode, 'task')} {when}{where}: {outcome}, reward {_number(episode.get('reward'))}{stop}"
    num_turns = episode.get("num_turns") if turns is None else len(turns)
    counts = [f"family {_known(episode, 'family')}", f"turns {_number(num_turns)}"]
    counts.append(f"tool turns {_number(episode.get('tool_turns'))}")
    if episode.get("bonus"):
        counts.append(f"bonus {_number(episode['bonus'])}")
    measures = episode.get("metrics")
    if isinstance(measures, dict):
        counts += [f"{one_line(name)} {_number(value)}" for name, value in measures.items()]
    lines = [first, f"  {', '.join(counts)}"]
    if is_replayed:
        old, today = _number(episode.get("advantage")), _number(episode.get("advantage_today"))
        age = f"played at step {_known(episode, 'played')}, age {_known(episode, 'age')}"
        parts = f"{_known(episode, 'turns_replayed')} of {_number(num_turns)} turns replayed"
        lines.append(f"  {age}, A {old} (then), A' {today} (now), {parts}")
    return lines


def _marks(turn: Mapping[str, Any]) -> str:
    marks: Sequence[tuple[str, str]] = (
        ("advantage", "advantage {}"), ("reward", "reward {}"), ("tool", "tool"), ("invalid", "invalid: {}"),
        ("truncated", "cut off at its token limit"), ("dropped", "did not train: {}"),
    )  # fmt: skip
    shown = [(name, form) for name, form in marks if turn.get(name) or (name == "advantage" and name in turn)]
    return "; ".join(form.format(_number(turn[name])) for name, form in shown)


def _text(turn: Mapping[str, Any], name: str) -> str:
    value = turn.get(name)
    return value if isinstance(value, str) else "(unknown)"


def _known(episode: Mapping[str, Any], name: str) -> str:
    value = episode.get(name)
    return "unknown" if value is None else one_line(str(value)) or "none"


def _number(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:.3g}" if isinstance(value, float) else one_line(str(value))
