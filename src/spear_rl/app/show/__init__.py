"""`spear show`: settings, algorithms, metrics and their meaning, and what a run did, as readable text."""

import os
from collections.abc import Sequence
from pathlib import Path

from spear_rl.app.config import Config, load, to_toml
from spear_rl.app.show.episodes import Selection, episodes_text
from spear_rl.app.show.metrics import metrics_text
from spear_rl.app.show.overview import algorithm_overview, run_overview
from spear_rl.app.show.text import Words
from spear_rl.errors import ConfigError

__all__ = ["Selection", "Words", "algorithm_overview", "episodes_text", "metrics_text", "run_overview", "shown"]


def shown(
    what: str, name: str | None, overrides: Sequence[str], selection: Selection, words: Words, *, as_json: bool = False
) -> str:
    """What `spear show` prints.

    Args:
        what: config, algorithm, metrics, a preset, a TOML file, a run folder or a file of episodes.
        name: of an algorithm, or a part of metrics' names.
        overrides: settings as section.key=value.
        selection: of a run's episodes.
    """
    has_options, is_run = selection.is_given or as_json, os.path.isdir(what)
    if what == "algorithm":
        return algorithm_overview(name, overrides)
    if what == "metrics" and not overrides:
        return metrics_text(name or "")
    if name:
        raise ConfigError(f"{name!r} is no setting: write section.key=value, or `spear show algorithm NAME`")
    if what.endswith(".jsonl") or (is_run and has_options):
        return episodes_text(Path(what), selection, words, as_json=as_json)
    if is_run:
        num_episodes = 1 if selection.limit is None else selection.limit
        return run_overview(Path(what), num_episodes=num_episodes, words=words)
    if has_options:
        raise ConfigError(f"{what} is no run folder, so it has no episodes to choose from")
    source = None if what == "config" else what
    return to_toml(load(source, overrides) if source or overrides else Config(), comments=True)
