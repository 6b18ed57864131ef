"""Which episodes of a run to show: those played, replayed or evaluated that a selection wants, newest first."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spear_rl.app.show.text import Words, episode_lines
from spear_rl.errors import ConfigError, MissingExtraError, UserError
from spear_rl.io.escaping import one_line
from spear_rl.io.jsonl import read_rows, spans
from spear_rl.train.episode_files import DRAWS, EVALUATIONS, TRAJECTORIES, draws_of, step_file

if TYPE_CHECKING:
    from spear_rl.io.episodes.index import Episodes

Episode = dict[str, Any]
_log = logging.getLogger(__name__)
DEFAULT_LIMIT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which episodes are wanted; what is None or empty decides nothing."""

    kind: Literal["played", "replayed", "evaluated"] = "played"
    solved: bool | None = None
    task: str = ""
    """A task id, or whole words of one; * stands for any text."""
    family: str = ""
    steps: tuple[int, int] | None = None
    """First and last: of the draw if replayed, of the policy if evaluated."""
    split: str = ""
    limit: int | None = None

    @classmethod
    def of(
        cls, *, failed: bool, solved: bool, replayed: bool, evaluated: bool, task: str, step: str, family: str,
        split: str, limit: int | None,
    ) -> Selection:  # fmt: skip
        """From the options of the command line."""
        if failed and solved:
            raise ConfigError("--failed and --solved exclude each other: give one of them, or none for all episodes")
        if replayed and (evaluated or split):
            raise ConfigError("--replayed is of training and --eval and --split of evaluations: give one of them")
        kind: Literal["played", "replayed", "evaluated"] = "replayed" if replayed else "played"
        return cls(
            kind="evaluated" if evaluated or split else kind,
            solved=True if solved else False if failed else None,
            task=task,
            family=family,
            steps=_steps(step) if step else None,
            split=split,
            limit=limit,
        )

    @property
    def is_given(self) -> bool:
        """Whether it wants anything but the newest episodes of training."""
        return self != Selection(limit=self.limit)

    def wants(self, episode: Mapping[str, Any]) -> bool:
        """Whether an episode is selected; one that does not say its family or split is of no given one."""
        step = episode.get("step")
        return (
            (self.solved is None or (episode.get("success") is not None and bool(episode["success"]) is self.solved))
            and (not self.task or _matches(self.task, str(episode.get("task", ""))))
            and (not self.family or str(episode.get("family", "")).casefold() == self.family.casefold())
            and (not self.split or episode.get("split") == self.split)
            and (self.steps is None or (isinstance(step, int) and self.steps[0] <= step <= self.steps[1]))
        )


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", text)
    if not found or int(found[1]) > int(found[2] or found[1]):
        raise ConfigError(f"--step must be a step or a range of steps, e.g. 40 or 30-50, not {text!r}")
    return int(found[1]), int(found[2] or found[1])


def _matches(wanted: str, task: str) -> bool:
    parts = ".*".join(re.escape(part) for part in wanted.split("*"))
    return re.search(rf"(?<![^\W_]){parts}(?![^\W_])", task, re.DOTALL) is not None


@dataclass
class _Seen:
    """What was read on the way, for the sentence that says why nothing was found."""

    steps: set[int] = field(default_factory=set)
    families: set[str] = field(default_factory=set)
    splits: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    num_read: int = 0
    num_left_out: int = 0

    def add(self, episode: Mapping[str, Any]) -> None:
        self.num_read += 1
        self.families |= {str(episode["family"])} if episode.get("family") else set()
        self.splits |= {str(episode["split"])} if episode.get("split") else set()
        if type(episode.get("step")) is int:
            self.steps.add(episode["step"])


def episodes_text(place: Path, selection: Selection, words: Words, *, as_json: bool = False) -> str:
    """The selected episodes of a run folder, or of a file that `spear eval --out` wrote, newest first."""
    if place.is_dir() and not (place / "config.toml").is_file():
        raise UserError(f"{place} is no run folder: it has no config.toml")
    if not place.exists():
        raise UserError(f"{place} does not exist")
    try:
        return "\n".join(_lines(place, selection, words, as_json))
    except OSError as error:
        raise UserError(f"{error.filename or place} cannot be read: {error.strerror}") from error


def newest_lines(run_dir: Path, count: int, words: Words) -> list[str]:
    """The newest episodes of training, if any were kept."""
    chosen, seen, _ = _chosen(run_dir, Selection(), count)
    return [*seen.faults, *(line for episode in chosen for line in ["", *episode_lines(episode, words)])]


def _chosen(place: Path, selection: Selection, limit: int) -> tuple[list[Episode], _Seen, bool]:
    """The newest `limit` episodes that are wanted, and whether there are more."""
    seen, chosen = _Seen(), list[Episode]()
    for episode in _episodes(place, selection, seen):
        seen.add(episode)
        if selection.wants(episode):
            if len(chosen) == limit:
                return chosen, seen, True
            chosen.append(episode)
    return chosen, seen, False


def _lines(place: Path, selection: Selection, words: Words, as_json: bool) -> list[str]:
    limit = DEFAULT_LIMIT if selection.limit is None else selection.limit
    chosen, seen, has_more = _chosen(place, selection, limit)
    if as_json:
        for fault in seen.faults:
            _log.warning(fault)
        # DEL is the one control character that JSON leaves as it is.
        return [json.dumps(episode).replace("\x7f", "\\u007f") for episode in chosen]
    lines = list(seen.faults)
    for episode in chosen:
        lines += ["", *episode_lines(episode, words)] if lines else episode_lines(episode, words)
    if has_more:
        lines += ["", f"there are more: raise --limit, which is {limit}"]
    elif not chosen:
        lines.append(_nothing(place, selection, seen))
    elif seen.num_left_out:
        lines += ["", f"{seen.num_left_out} more were not kept, as their evaluation has too many"]
    return lines


def _nothing(place: Path, selection: Selection, seen: _Seen) -> str:
    """Why there is nothing to show."""
    name = {"played": "episode", "replayed": "replayed episode", "evaluated": "episode of an evaluation"}
    if not seen.num_read and not seen.steps:
        why = {
            "played": "run.trajectories_every says how often they are kept",
            "replayed": "replay has not fired yet, the algorithm has none, or an older version wrote the run",
            "evaluated": "there was none yet, run.trajectories_every is 0, or an older version wrote the run",
        }
        return f"{one_line(str(place))} has no {name[selection.kind]}: {why[selection.kind]}"
    there = [f"steps {spans(sorted(seen.steps))}"] if seen.steps else []
    for what, names in (("families", seen.families), ("splits", seen.splits)):
        there += [f"{what} {', '.join(map(one_line, sorted(names)[:20]))}"] if names else []
    return f"no {name[selection.kind]} is as asked for; there are {'; '.join(there) or 'others'}"


def _episodes(place: Path, selection: Selection, seen: _Seen) -> Iterator[Episode]:
    if place.is_file():
        yield from _in_file(place, seen)
    elif selection.kind == "replayed":
        yield from _replayed(place, selection, seen)
    else:
        if selection.kind == "played" and (stored := _store(place, seen)) is not None:
            yield from _of_store(stored, selection, seen)
            return
        folder = place / (TRAJECTORIES if selection.kind == "played" else EVALUATIONS)
        files = list(folder.glob("step_*.jsonl" if selection.kind == "played" else "*.jsonl"))
        for step, path in sorted(((_step_of(path), path) for path in files), reverse=True):
            if selection.steps and not selection.steps[0] <= step <= selection.steps[1]:
                seen.steps.add(max(step, 0))
            else:
                yield from _in_file(path, seen)


def _store(run_dir: Path, seen: _Seen) -> Episodes | None:
    """The run's episodes as columns, if it keeps them so."""
    if not any((run_dir / TRAJECTORIES).glob("*.parquet")):
        return None
    try:
        from spear_rl.io.episodes.index import Episodes
    except ImportError as error:
        raise MissingExtraError("episodes are kept as parquet, which needs pyarrow: pip install pyarrow") from error
    stored = Episodes(run_dir / TRAJECTORIES)
    stored.refresh()
    seen.faults += stored.faults
    return stored


def _of_store(stored: Episodes, selection: Selection, seen: _Seen) -> Iterator[Episode]:
    """Episodes of columns as JSON lines have them, newest step first; turns are read of those that are wanted."""
    rows = stored.newest_first()
    for row in chain.from_iterable(stored.rows(rows[n : n + 1000]) for n in range(0, len(rows), 1000)):
        if not selection.wants(row):
            seen.add(row)
        else:
            yield _whole(stored, row["step"], row["episode"]) or row | {"turns": None, "num_turns": row["turns"]}


def _whole(stored: Episodes, step: int, number: int) -> Episode:
    found = stored.episode(step, number)
    if found is None or not found["has_texts"]:
        return {}
    renamed = {"turn_reward": "reward", "turn_advantage": "advantage", "turn_dropped": "dropped"}
    kept = ("tool", "invalid", "truncated", *renamed)
    found["turns"] = [
        {
            renamed.get(name, name): turn[name]
            for name in kept
            if turn[name] not in (None, "") and turn[name] is not False
        }
        | {"observation": turn["observation"] or "", "text": turn["text"] or ""}
        for turn in found["turns"]
    ]
    measures = json.loads(found["measures"] or "{}")
    names = ("task", "family", "step", "success", "reward", "bonus", "stop", "tool_turns", "turns", "last_observation")
    return {name: found[name] for name in names} | ({"metrics": measures} if measures else {})


def _step_of(path: Path) -> int:
    """By its name; the files of a cold start are older than those of all steps."""
    found = re.search(r"step_(\d{1,18})\.jsonl$", path.name)
    return int(found[1]) if found else -1


def _in_file(path: Path, seen: _Seen) -> Iterator[Episode]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            episode = json.loads(line)
            if isinstance(episode, dict) and type(episode.get("left_out")) is int:
                seen.num_left_out += episode["left_out"]
                continue
            yield _checked(episode)
        except (ValueError, TypeError, RecursionError):
            fault = f"{one_line(path.name)}, line {number} is damaged or was cut off"
            seen.faults += [fault] if fault not in seen.faults else []


def _checked(episode: Any) -> Episode:
    """An episode of this or an earlier version; ValueError if it is none."""
    turns = episode["turns"] if isinstance(episode, dict) and "turns" in episode else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("no episode")
    numbers = [episode.get("reward", 0), *(turn.get("advantage", 0) for turn in turns)]
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError("no number")
    return dict(episode)


def _replayed(run_dir: Path, selection: Selection, seen: _Seen) -> Iterator[Episode]:
    """Every draw as an episode with its text, where that was kept."""
    rows = read_rows(run_dir / DRAWS)
    seen.faults += [one_line(text) for text in rows.sentences(DRAWS)]

    @cache
    def texts(step: int) -> dict[str, Episode]:
        path = step_file(run_dir, TRAJECTORIES, step, prefix="replayed")
        return {str(e.get("episode")): e for e in _in_file(path, seen)} if path.is_file() else {}

    stored = _store(run_dir, seen)
    for step, row in reversed(rows.by_step.items()):
        for draw in draws_of(row):
            about = draw | {"step": step, "replayed": True}
            text: Episode = {}
            if selection.wants(about) and type(draw.get("text")) is int:
                text = texts(draw["text"]).get(str(draw["episode"]), {})
            elif stored and selection.wants(about) and re.fullmatch(r"\d{1,9}/\d{1,9}", str(draw["episode"])):
                text = _whole(stored, *map(int, str(draw["episode"]).split("/")))
            yield text | about | {"turns": text.get("turns"), "num_turns": draw.get("turns")}
