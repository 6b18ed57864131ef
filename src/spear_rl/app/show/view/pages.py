"""Pages as HTML, the same for server and report. All text of a run is untrusted: escaped, and never markup."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, zip_longest
from typing import Any
from urllib.parse import urlencode

import jinja2
import numpy as np
from markupsafe import Markup

from spear_rl.app.show.view.curves import charts_of, curves_of
from spear_rl.app.show.view.runs import Run, Runs, kind_title
from spear_rl.envs import SCENES
from spear_rl.envs.shared.scenes import Scene, Seen
from spear_rl.errors import ConfigError
from spear_rl.io.episodes.columns import EPISODE
from spear_rl.io.episodes.index import Filter
from spear_rl.io.escaping import one_line
from spear_rl.io.http.look import templates

PAGE = 50
COLOURS = {"advantage": "advantage", "logprob": "log-probability", "entropy": "entropy", "none": "none"}
SORTS = tuple(name for name in EPISODE if name != "measures")
MAX_TEXT = 20_000
"""Characters of a text that a page shows unless it is asked for the whole."""
_PNG = b"\x89PNG\r\n\x1a\n"


@cache
def compiled() -> jinja2.Environment:
    """All templates, before the first request."""
    made = templates("spear_rl.app.show.view")
    made.filters["number"] = number
    made.globals |= {"link": link, "site": "view"}
    for name in made.list_templates():
        made.get_template(name)
    return made


def number(value: Any) -> str:
    """A value as a table shows it: a number, yes or no, a text; nothing of another kind."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value if abs(value) > 1e-9 else 0.0:.4g}" if math.isfinite(value) else str(value)  # a sum's rounding
    return one_line(str(value)) if isinstance(value, int | str) else ""


def link(path: str, *given: Mapping[str, Any], **more: Any) -> str:
    """An address with the state of a page; what is empty is left out."""
    merged: dict[str, Any] = {}
    for part in (*given, more):
        merged |= part
    kept = {name: value for name, value in merged.items() if value not in ("", None, [])}
    return f"{path}?{urlencode(kept, doseq=True)}" if kept else path


def page(name: str, **values: Any) -> str:
    """A page by the name of its template."""
    return compiled().get_template(f"{name}.html.jinja").render(**values)


def runs_page(runs: Runs) -> str:
    rows = []
    for name in runs.names():
        try:
            run = runs.get(name)
        except KeyError:
            continue
        newest = run.metrics.by_step.get(run.step, {})
        last = run.evaluations.by_step.get(max(run.evaluations.by_step, default=-1), {})
        rows.append({"run": run, "success": newest.get("rollout/success"), "eval": last.get("success")})
    return page("runs", title="Runs", rows=rows, root=str(runs.root))


def curves_page(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs]
    return page("curves", title=", ".join(names), runs=runs, names=names, data=curves_data(runs))


def curves_data(runs: Sequence[Run]) -> dict[str, Any]:
    found = [curves_of(run) for run in runs]
    return {"runs": found, "charts": charts_of(found)}


@dataclass(frozen=True)
class Query:
    """What the table of episodes is asked for, as it stands in the address."""

    step: str = ""
    task: str = ""
    family: str = ""
    success: str = ""
    stop: str = ""
    dropped: str = ""
    replayed: str = ""
    group: str = ""
    sort: str = "-step"
    page: str = "1"

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        return cls(**{name: given[name] for name in cls.__dataclass_fields__ if given.get(name)})

    @property
    def state(self) -> dict[str, str]:
        plain = Query()
        names = self.__dataclass_fields__
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(plain, name)}

    @property
    def wanted(self) -> Filter:
        """ConfigError if a value cannot be read."""
        first, dash, last = self.step.partition("-")
        if self.step and not (first.isdecimal() and (last if dash else first).isdecimal() and len(self.step) < 24):
            raise ConfigError(f"steps are written 40 or 30-50, not {self.step[:40]!r}")
        steps = (int(first), int(last if dash else first)) if self.step else None
        choice = {"yes": True, "no": False}
        return Filter(
            step=steps,
            task=self.task,
            family=self.family,
            success=choice.get(self.success),
            stop=self.stop,
            dropped=self.dropped,
            replayed=choice.get(self.replayed),
            group=int(self.group) if self.group.isdecimal() and len(self.group) < 9 else None,
        )

    def place(self, count: int, size: int) -> tuple[int, int]:
        """The page to show, and how many there are."""
        pages = max(-(-count // size), 1)
        here = int(self.page) if self.page.isdecimal() and len(self.page) < 9 else 1
        return min(max(here, 1), pages), pages

    @property
    def order(self) -> tuple[str, bool]:
        name = self.sort.removeprefix("-")
        return (name, self.sort.startswith("-")) if name in SORTS else ("step", True)


def found_episodes(run: Run, query: Query, *, size: int = PAGE) -> dict[str, Any]:
    """The rows of one page of the table, and how many there are."""
    replayed = run.is_replayed()
    rows = run.episodes.where(query.wanted, replayed)
    by, descending = query.order
    rows = run.episodes.ordered(rows, by, descending=descending)
    here, pages = query.place(len(rows), size)
    shown = rows[(here - 1) * size : here * size]
    episodes = run.episodes.rows(shown)
    for episode, row in zip(episodes, shown, strict=True):
        episode["replayed"] = bool(replayed[row])
    return {"episodes": episodes, "total": len(rows), "all": len(run.episodes.table), "page": here, "pages": pages}


def episodes_page(runs: Sequence[Run], query: Query) -> str:
    """The table of each run side by side, by the same query."""
    choices = {name: _values(runs, name) for name in ("family", "stop")}
    reasons = sorted({reason for text in _values(runs, "dropped") for reason in text.split(",")})
    choices |= {"dropped": ["any", "none", *reasons], "success": ["yes", "no"], "replayed": ["yes", "no"]}
    asked, problem = _understood(query)
    by, descending = query.order
    found = [(run, found_episodes(run, asked, size=PAGE // min(len(runs), 2))) for run in runs]
    return _table_page("episodes", runs, query, found, problem=problem, choices=choices, by=by, descending=descending)


def _values(runs: Sequence[Run], name: str) -> list[str]:
    return sorted({value for run in runs for value in run.episodes.values(name)})


def _understood(query: Query) -> tuple[Query, str]:
    """The query, or that for everything with what is wrong."""
    try:
        query.wanted  # noqa: B018 - raises
    except ConfigError as error:
        return Query(), str(error)
    return query, ""


def _table_page(name: str, runs: Sequence[Run], query: Query, found: Sequence[Any], **more: Any) -> str:
    kind, names = runs[0].kind, [run.name for run in runs]
    kinds = {one: kind_title(one) for one in dict.fromkeys(k for run in runs for k in run.kinds)}
    title = f"{kind_title(kind)} of {', '.join(names)}" + (" by group" if name == "groups" else "")
    return page(name, title=title, names=names, kind=kind, kinds=kinds, query=query, found=found, **more)


def groups_page(runs: Sequence[Run], query: Query) -> str:
    """The groups that the wanted episodes are of."""
    asked, problem = _understood(query)
    return _table_page("groups", runs, query, [(run, found_groups(run, asked)) for run in runs], problem=problem)


def found_groups(run: Run, query: Query) -> dict[str, Any]:
    """The groups of one page of the table, and how many there are."""
    rows = run.episodes.where(query.wanted, run.is_replayed())
    names = ("step", "group", "success", "reward", "advantage", "turns")
    numbers = {name: run.episodes.numbers(name)[rows].astype(float) for name in names}
    _, first, of = np.unique(numbers["step"] * 10**6 + numbers["group"], return_index=True, return_inverse=True)
    count = np.bincount(of, minlength=len(first))
    means = {name: np.bincount(of, numbers[name], len(first)) / np.maximum(count, 1) for name in names}
    by, descending = query.sort.removeprefix("-"), query.sort.startswith("-")
    keys = count if by == "episodes" else means[by if by in means else "step"]
    order = np.argsort(-keys if descending else keys, kind="stable")
    here, pages = query.place(len(order), PAGE)
    shown = order[(here - 1) * PAGE : here * PAGE]
    groups = [
        about | {name: float(means[name][place]) for name in names[2:]} | {"episodes": int(count[place])}
        for about, place in zip(run.episodes.rows(rows[first[shown]]), shown, strict=True)
    ]
    return {"groups": groups, "total": len(order), "page": here, "pages": pages}


def replays_page(runs: Sequence[Run], step: int | None) -> str:
    """What replay drew, newest first, each with a link to where it was played."""
    found = []
    for run in runs:
        draws = run.draws.newest_first() if step is None else iter(run.draws.of_step(step))
        found.append((run, {"draws": list(islice(draws, 4 * PAGE)), "total": run.draws.count(step)}))
    names = [run.name for run in runs]
    title = f"Replay in {', '.join(names)}" + ("" if step is None else f" at step {step}")
    return page("replays", title=title, names=names, found=found)


def episode_page(run: Run, step: int, number: int, *, colour: str = "advantage", full: bool = False) -> str | None:
    """One episode turn by turn; None if there is none."""
    shown = shown_episode(run, step, number, colour=colour, full=full)
    if shown is None:
        return None
    return page(
        "episode", title=f"Episode {step}/{number} of {run.name}", run=run, names=[run.name], kind=run.kind, e=shown
    )


def shown_episode(
    run: Run, step: int, number: int, *, colour: str = "advantage", full: bool = False
) -> dict[str, Any] | None:
    """An episode with all that a page says of it."""
    episode = run.episodes.episode(step, number)
    if episode is None:
        return None
    has_entropy = any(turn["entropies"] for turn in episode["turns"])
    colour = colour if colour in COLOURS and (has_entropy or colour != "entropy") else "advantage"
    pieces = run.episodes.pieces()
    *scenes, end = scenes_of(run, episode)
    scale = run.episodes.largest("advantage") or 1.0
    for turn, scene in zip(episode["turns"], scenes, strict=True):
        turn["tokens"] = tokens_of(turn, pieces, colour, scale)
        ids = turn["prompt_ids"]
        turn["prompt"] = "".join(pieces.get(token, f"<{token}>") for token in ids) if pieces and ids else ""
        turn["pictures"] = [Markup(picture) for image in turn["images"] if (picture := _picture(image))]
        turn["scene"] = None if turn["pictures"] else scene
    siblings = run.episodes.where(Filter(step=(step, step), group=episode["group"]))
    return episode | {
        "run": run.name,
        "scene": end,
        "siblings": run.episodes.rows(siblings),
        "stored": run.stored(step, number),
        "draws": run.drawn(step, number),
        "colour": colour,
        "colours": {name: title for name, title in COLOURS.items() if has_entropy or name != "entropy"},
        "scale": scale,
        "measures": _measures(episode["measures"]),
        "most": None if full else MAX_TEXT,
    }


def scenes_of(run: Run, episode: Mapping[str, Any]) -> list[Scene | None]:
    """The environment's own view of every turn and of the end, if it has one."""
    turns, made = episode["turns"], SCENES.get(run.environment)
    if made is None:
        return [None] * (len(turns) + 1)
    seen = [Seen(*(turn[name] or "" for name in Seen._fields)) for turn in turns]
    return made([*seen, Seen(episode["last_observation"] or "")])


def _measures(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def tokens_of(turn: Mapping[str, Any], pieces: Mapping[int, str], colour: str, scale: float) -> list[dict[str, Any]]:
    """The tokens of an answer with a class for their colour; none where their texts are unknown."""
    ids = turn["token_ids"] or []
    if not pieces or not ids:
        return []
    found = []
    # A file that another writer made may have fewer numbers than tokens.
    for token, logprob, entropy in islice(zip_longest(ids, turn["logprobs"] or [], turn["entropies"] or []), len(ids)):
        values = {"advantage": turn["turn_advantage"], "logprob": logprob, "entropy": entropy}
        says = ", ".join(f"{COLOURS[name]} {value:.3g}" for name, value in values.items() if value is not None)
        kind = _shade(colour, values.get(colour), scale)
        found.append({"text": pieces.get(token, f"<{token}>"), "kind": kind, "says": f"token {token}: {says}"})
    return found


def _shade(colour: str, value: float | None, scale: float) -> str:
    """The class of a colour: -5 to 5 for advantages up to `scale`, 0 to 9 for surprise and entropy of 0 to 4 nats.

    The latter by their square root: a trained policy is sure of most tokens, and differs below 1 nat.
    """
    if value is None or not math.isfinite(value):
        return ""
    if colour == "advantage":
        strength = min(math.ceil(5 * abs(value) / scale), 5)
        return f"{'up' if value > 0 else 'down'}{strength}" if strength else ""
    nats = -value if colour == "logprob" else value
    return f"heat{min(int(5 * math.sqrt(max(nats, 0.0))), 9)}"


def _picture(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}" if image.startswith(_PNG) else ""
