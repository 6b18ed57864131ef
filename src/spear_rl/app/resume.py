"""The settings of a run, stored in its folder and in every checkpoint, and which of them a resume may change."""

import contextlib
import json
import os
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from spear_rl.app.config import Config, flat, merged, override, require_env, resolved, to_toml, update, with_changes
from spear_rl.errors import CheckpointError, ConfigError, FinishedError
from spear_rl.io.files import is_leftover
from spear_rl.io.lock import LOCK, locked
from spear_rl.settings.names import split_name

Verb = Literal["train", "sft"]

CONFIG = "config.toml"
_END = "# end of settings, written by spear "
"""Followed by the verb; a file without this line was cut off."""

FIXED = (
    "run.seed", "task.env", "task.agent", "task.options", "engine.name", "engine.model", "engine.revision",
    "engine.lora_rank", "engine.lora_targets", "rollout.layout", "rollout.detail", "rollout.history",
    "rollout.thinking", "algorithm.name",
    "algorithm.imitation.enabled", "algorithm.imitation.profile", "algorithm.imitation.per_family",
    "algorithm.imitation.keep_step_part", "algorithm.covariance.on_policy",
)  # fmt: skip
"""Settings that cannot change: they identify the run or shape its state."""

_PLACE = ("run.dir", "run.resume")
"""Settings that may differ between a run and its resume without a note."""

_ONLY_FOR = {
    "algorithm.bonus.": "spear", "algorithm.imitation.": "spear", "algorithm.covariance.replay": "spear",
    "algorithm.covariance.joint_means": "spear",
    "algorithm.keep_groups": "dr-bot", "algorithm.max_length": "dr-bot", "algorithm.filters.": "dr-bot",
}  # fmt: skip
"""Prefix of a setting -> the wrapper it belongs to. Settings of a base are checked when the algorithm is built."""


_TOKEN_MEANS = [([], "grpo"), (["spear"], "grpo")]
"""Algorithms of runs begun before there was algorithm.reduction, whose loss was a token mean: it stays one."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts, and notes to print about it."""

    checkpoint: Path | None = None
    step: int = 0
    notes: list[str] = field(default_factory=list)
    cold_start: Path | None = None
    """The checkpoint of the cold start, if there is none of RL."""
    eval_step: int = 0
    """The first step whose evaluation is still to be made."""


@contextlib.contextmanager
def opened(source: str | None, overrides: Sequence[str], *, verb: Verb) -> Iterator[tuple[Config, list[str]]]:
    """The configuration of a command and notes about it; the folder of a resumed run is locked.

    A resumed run continues with its stored settings. Overrides change them, a preset does not. With run.resume=auto, a
    run that is complete is a FinishedError.
    """
    asked, notes = merged(source, overrides), []
    run_dir, is_auto = Path(asked.run.dir), asked.run.resume == "auto"
    asked.run.resume = resumes(asked)
    if not asked.run.resume:
        require_env(asked)
        yield resolved(asked), []
        return
    _check_there(run_dir)
    with locked(run_dir):
        own = stored(run_dir, verb)
        config = own.config
        override(config, overrides)
        config.run.dir, config.run.resume = asked.run.dir, True
        config = resolved(config)
        if is_auto and _is_finished(config, own, verb):
            from spear_rl.train.checkpoint import discard_cold_start

            discard_cold_start(run_dir)  # there if `spear sft` was killed right after its result was written
            raise FinishedError(f"the run in {run_dir} is finished: nothing is left to do")
        if source and (differing := ", ".join(key for key, _, _ in differences(config, resolved(asked)))):
            kept = f"the run's own settings are kept; {source} differs in {differing}"
            notes.append(f"{kept}: give what should change as section.key=value")
        yield config, notes


@dataclass(frozen=True, slots=True)
class Stored:
    """The settings of a run folder and where it continues."""

    config: Config
    """To continue with: the newest checkpoint's, with what was changed in config.toml since."""
    saved: Config
    """The newest checkpoint's."""
    start: Start


def resumes(config: Config) -> bool:
    """Whether to go on with a run: what run.resume says, and with auto whether run.dir holds one."""
    if config.run.resume != "auto":
        return config.run.resume
    run_dir = Path(config.run.dir)
    if _is_there(run_dir):
        return True
    if _is_used(run_dir):
        raise ConfigError(
            f"run.dir: {run_dir} holds files but no run, so run.resume=auto leaves it; choose another folder"
        )
    return False


def command_to_go_on(run_dir: str, verb: Verb) -> str:
    """The command that resumes a run, quoted for a shell."""
    value = json.dumps(run_dir, ensure_ascii=False) if run_dir[:1] in "'\"" or run_dir != run_dir.strip() else run_dir
    return f"spear {verb} {shlex.quote(f'run.dir={value}')} run.resume=true"


def stopped_sentence(place: str, run_dir: str, verb: Verb) -> str:
    """Where a run stopped (if it came so far as to know) and how to go on."""
    if not place and not is_run(Path(run_dir)):
        return "stopped before anything was written: give the same command again"
    return f"{place or 'stopped with nothing new to save'}; go on: {command_to_go_on(run_dir, verb)}"


def _is_finished(config: Config, own: Stored, verb: Verb) -> bool:
    """Whether the command would have nothing to do."""
    run_dir = Path(config.run.dir)
    if verb == "sft":
        return (run_dir / "model").exists()
    if own.start.checkpoint is None or own.start.step != config.run.steps or differences(own.saved, config):
        return False
    try:
        return bool(json.loads((run_dir / "summary.json").read_text("utf-8"))["steps"] == own.start.step)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False  # stopped before the end of its last evaluation


def stored(run_dir: Path, verb: Verb | None = None) -> Stored:
    """Read config.toml and the newest checkpoint; at least one of them must be readable."""
    from spear_rl.train.checkpoint import COLD_START, checked_manifest, checkpoints

    trained = checkpoints(run_dir / "checkpoints")
    found = trained or checkpoints(run_dir / COLD_START)
    manifest = checked_manifest(found[-1]) if found else {}
    path = run_dir / CONFIG
    table, fault, begun_by = _read(path)
    if verb and begun_by not in ("", verb):
        raise CheckpointError(f"run.resume: {run_dir} was begun by `spear {begun_by}`: go on with that command")
    notes = []
    if text := manifest.get("settings"):
        saved = _config_of(tomllib.loads(text), found[-1])
        config = deepcopy(saved)
        if fault:
            notes.append(f"{path} {fault}: settings are taken from {found[-1].name}")
        else:
            update(config, table)
    elif fault:
        whose = f"{found[-1].name} is of an older format without settings" if found else "there is no checkpoint"
        advice = "restore config.toml or start anew in another run.dir"
        raise CheckpointError(f"{path} {fault}, and {whose}; {advice}")
    else:
        saved = _config_of(table, path)
        config = deepcopy(saved)
        if found:
            notes.append(f"{found[-1].name} is of an older format: settings are those of {CONFIG} alone")
    if not trained:
        return Stored(config, saved, Start(notes=notes, cold_start=found[-1] if found else None))
    step = int(manifest["step"])
    is_evaluated = manifest.get("evaluation", ...) is not None  # old manifests do not say
    return Stored(config, saved, Start(found[-1], step, notes, eval_step=step + is_evaluated))


def is_run(folder: Path) -> bool:
    """Whether `spear train` or `spear sft` wrote a folder."""
    return (folder / CONFIG).is_file() or (folder / "checkpoints").is_dir()


def stored_with(run_dir: Path, overrides: Sequence[str], *, folder: Path) -> Config:
    """The settings of a run's config.toml with overrides, for an evaluation.

    Args:
        folder: a checkpoint of the run, or the run itself; its settings are used if config.toml cannot be read.
    """
    table, fault, _ = _read(run_dir / CONFIG)
    if fault:
        from spear_rl.train.checkpoint import MANIFEST, checked_manifest

        known = checked_manifest(folder).get("settings") if (folder / MANIFEST).is_file() else None
        config = _config_of(tomllib.loads(known), folder) if known else stored(run_dir).config
    else:
        config = _config_of(table, run_dir / CONFIG)
    return resolved(with_changes(config, overrides))


def start_of(config: Config, *, verb: Verb) -> Start:
    """Where a run starts or continues, after all checks; writes nothing. The caller holds the lock."""
    run_dir = Path(config.run.dir)
    if not config.run.resume:
        if _is_used(run_dir):
            advice = "set run.resume=true to go on, or choose another folder"
            raise ConfigError(f"run.dir: {run_dir} is not empty; {advice}")
        return Start()
    _check_there(run_dir)
    own = stored(run_dir, verb)
    if verb == "sft" and (run_dir / "model").exists():
        raise ConfigError(f"run.resume: the cold start in {run_dir} is finished: engine.model={run_dir / 'model'}")
    metrics, checkpoint, step = run_dir / "metrics.jsonl", own.start.checkpoint, own.start.step
    if checkpoint is None and metrics.exists() and metrics.stat().st_size:
        fault = "has logged steps but its checkpoints/ is gone; start anew elsewhere"
        raise CheckpointError(f"run.resume: {run_dir} {fault}")
    changed = differences(own.saved, config)
    cold_start = own.start.cold_start
    _check_changes(changed, config, has_begun=checkpoint is not None, is_cold=cold_start is not None)
    if step > config.run.steps:
        raise ConfigError(f"run.steps={config.run.steps}: the run has already taken {step} steps")
    notes = own.start.notes + [f"changed: {key} {_shown(old)} -> {_shown(new)}" for key, old, new in changed]
    if cold_start is not None:
        notes.append(f"the cold start goes on after update {int(cold_start.name.removeprefix('step_'))}")
    elif checkpoint is None:
        notes.append("the run was stopped before its first checkpoint: it starts over")
    elif step == config.run.steps:
        notes.append(f"all {step} steps are taken: set run.steps higher to go on")
    return replace(own.start, notes=notes)


def differences(one: Config, other: Config) -> list[tuple[str, Any, Any]]:
    """(setting, its value in `one`, its value in `other`), where they differ."""
    values = flat(other)
    alike = (*_PLACE, "engine.model") if _is_one_model(one, other) else _PLACE
    return [(key, v, values[key]) for key, v in flat(one).items() if key not in alike and v != values[key]]


def _is_one_model(one: Config, other: Config) -> bool:
    """Whether two engine.model are paths of one folder, or of one that was moved or copied along with the run."""
    if not os.path.isdir(other.engine.model):
        return False
    places = [os.path.relpath(config.engine.model, config.run.dir) for config in (one, other)]
    return places[0] == places[1] or os.path.realpath(one.engine.model) == os.path.realpath(other.engine.model)


def settings_text(config: Config, verb: Verb) -> str:
    """The content of config.toml, checked to be read back unchanged."""
    text = to_toml(config) + f"{_END}{verb}\n"
    again = Config()
    try:
        text.encode()
        update(again, tomllib.loads(text))
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"the settings cannot be written to {CONFIG}: {error}") from error
    if to_toml(again) != to_toml(config):
        differing = ", ".join(key for key, _, _ in differences(config, again)) or "run.dir"
        raise ConfigError(f"{differing}: the value cannot be written to {CONFIG} and read back")
    return text


def _check_there(run_dir: Path) -> None:
    if not _is_there(run_dir):
        raise CheckpointError(f"run.resume: {run_dir} holds no run; leave out run.resume to start one")


def _is_there(run_dir: Path) -> bool:
    """Whether a folder holds a run, or what is left of one."""
    if os.path.lexists(run_dir) and not os.path.isdir(run_dir):
        raise ConfigError(f"run.dir: {run_dir} is not a folder")
    return any(os.path.lexists(run_dir / name) for name in (CONFIG, "checkpoints", "metrics.jsonl"))


def _is_used(run_dir: Path) -> bool:
    """Whether a folder holds anything but what a killed start leaves."""
    return os.path.isdir(run_dir) and any(name != LOCK and not is_leftover(name) for name in os.listdir(run_dir))


def _check_changes(changed: Sequence[tuple[str, Any, Any]], config: Config, *, has_begun: bool, is_cold: bool) -> None:
    """Refuse changes that cannot be made any more, and those without an effect."""
    for key, old, new in changed:
        if key in FIXED:
            raise ConfigError(f"{key}={_shown(new)}: the run began with {_shown(old)}, which cannot change")
        if key.startswith("sft.") and (has_begun or (is_cold and key != "sft.checkpoint_seconds")):
            when = "has begun" if is_cold else "is over"
            raise ConfigError(f"{key}={_shown(new)}: the cold start {when} (with {_shown(old)}), so it cannot change")
        wrapper = next((name for prefix, name in _ONLY_FOR.items() if key.startswith(prefix)), None)
        is_used = key == "algorithm.max_length" and config.algorithm.reduction == "fixed_length"
        if wrapper and not is_used and wrapper not in split_name(config.algorithm.name)[0]:
            raise ConfigError(f"{key}={_shown(new)}: {config.algorithm.name} has no such setting, so leave it out")
        has_reference = os.path.isdir(Path(config.run.dir) / "reference")
        if has_begun and key == "algorithm.kl" and new and not has_reference:
            raise ConfigError(f"{key}={_shown(new)}: the run began without a reference policy, so it stays 0")


def _read(path: Path) -> tuple[dict[str, Any], str, str]:
    """(settings, what is wrong with the file or "", the verb that wrote it or "")."""
    try:
        text = path.read_bytes().decode("utf-8")
        table = tomllib.loads(text)
    except FileNotFoundError:
        return {}, "is missing", ""
    except OSError as error:
        return {}, f"cannot be read: {error.strerror}", ""
    except (ValueError, RecursionError) as error:
        return {}, f"is damaged ({error})", ""
    last = text.rstrip("\n").rpartition("\n")[2]
    if last.startswith(_END) and last.removeprefix(_END) in ("train", "sft"):
        return table, "", last.removeprefix(_END)
    # Files of earlier versions have no such line; eval.temperature was their last setting.
    if text.endswith("\n") and "temperature" in table.get("eval", {}):
        return table, "", ""
    return {}, "was cut off", ""


def _config_of(table: dict[str, Any], place: Path) -> Config:
    config = Config()
    try:
        update(config, table)
        if "reduction" not in table.get("algorithm", {}) and split_name(config.algorithm.name) in _TOKEN_MEANS:
            config.algorithm.reduction = "token_mean"
        return resolved(config)
    except ConfigError as error:
        raise CheckpointError(f"the settings of {place} are not those of this version: {error}") from error


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
