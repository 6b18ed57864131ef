"""An experiment's plan, read from TOML and checked whole before anything runs: one sentence per fault."""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import combinations, product
from pathlib import Path
from typing import Any

from spear_rl.app.compare.experiment.cells import Cell, ColdStart, cell_of, with_shared_cold_starts
from spear_rl.app.compare.experiment.measures import MEASURES
from spear_rl.app.config import Config, flat, presets, update
from spear_rl.errors import ConfigError
from spear_rl.settings.ranges import nearest, shown

BUDGET = {
    "steps": "run.steps", "num_tasks": "rollout.num_tasks", "group_size": "rollout.group_size",
    "num_minibatches": "optim.num_minibatches", "minibatch_rows": "optim.minibatch_rows", "epochs": "optim.epochs",
}  # fmt: skip
"""Key of [budget] -> the setting: what decides how many episodes are played and optimizer steps taken."""
_KEYS = {
    "name": str, "preset": str, "config": str, "seeds": list, "reference": str, "primary": str, "secondary": list,
    "shared_cold_start": bool, "jobs": int, "budget": dict, "settings": dict, "blocks": dict, "arms": dict,
}  # fmt: skip
_KINDS = {str: "a text", list: "a list", bool: "true or false", int: "a whole number", dict: "a table"}
_OWN = ("run.dir", "run.seed", "run.resume")
"""Settings that the experiment gives to every cell."""
_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class Plan:
    """A checked plan."""

    path: Path
    text: str
    name: str
    out: Path
    seeds: list[int]
    arms: list[str]
    reference: str
    primary: str
    secondary: list[str]
    jobs: int
    """Processes at once; 0 is as many as the machine has room for."""
    cells: list[Cell]
    """In the order in which they run: every block and arm of a seed before the next seed."""
    cold_starts: list[ColdStart]
    notes: list[str]
    """What is not like for like, and what a reader should know before running it."""

    @property
    def question(self) -> str:
        """What is asked: the comment in the first line, if there is one."""
        first = self.text.split("\n", 1)[0].strip()
        return first.lstrip("# ").strip() if first.startswith("#") else ""

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def decided(table: Mapping[str, Any]) -> dict[str, Any]:
    """What must not be chosen after results were seen, of a plan's table, defaults filled in."""
    primary, arms = table.get("primary", "eval_mean"), list(table.get("arms", {}))
    return {
        "primary": primary,
        "secondary": table.get("secondary", ["eval_final"] if primary != "eval_final" else []),
        "reference": table.get("reference", arms[0] if arms else ""),
        "seeds": table.get("seeds", []),
        "arms": arms,
        "blocks": {axis: list(choices) for axis, choices in table.get("blocks", {}).items()},
    }


def read_plan(path: Path, out: Path | None = None) -> Plan:
    """The plan in a file, with every cell's configuration loaded; a ConfigError has one line per fault."""
    try:
        text = path.read_text("utf-8-sig")
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return _Reader(path, text, table, out).plan()


@dataclass
class _Reader:
    """Reads one plan; faults are collected, so that all of them are told at once."""

    path: Path
    text: str
    table: dict[str, Any]
    out: Path | None
    faults: list[str] = field(default_factory=list)

    def plan(self) -> Plan:
        self._check_keys()
        self._raise()
        get = self.table.get
        axes, arms = get("blocks", {}), get("arms", {})
        name = get("name", self.path.stem)
        reference, primary, secondary = (decided(self.table)[key] for key in ("reference", "primary", "secondary"))
        self._check_names(name, axes, arms, reference)
        self._check_measures(primary, secondary)
        self._check_seeds(self.table["seeds"])
        if not 0 <= get("jobs", 0) <= 1024:
            self.faults.append(f"jobs must be 0 or more and at most 1,024 (it is {shown(get('jobs'))})")
        for where, layer in self._layers():
            self._check_layer(where, layer)
        self._raise()
        out = self.out or Path("experiments_out") / name
        cells = self._cells(out, axes, arms)
        self._raise()
        self._check_cells(cells, reference, primary)
        notes = list(_notes(cells, reference, self.table.get("seeds", []), secondary))
        cold_starts: list[ColdStart] = []
        if get("shared_cold_start", False):
            touched = {axis: list(choices.values()) for axis, choices in axes.items()}
            try:
                cells, cold_starts = with_shared_cold_starts(cells, out, reference, list(touched.values()))
            except ConfigError as error:
                self.faults.append(f"shared_cold_start: {error}")
        self._raise()
        seeds = get("seeds", [])
        return Plan(
            self.path, self.text, name, out, seeds, list(arms), reference, primary, secondary, get("jobs", 0), cells,
            cold_starts, notes,
        )  # fmt: skip

    def _raise(self) -> None:
        if self.faults:
            raise ConfigError("\n".join(f"{self.path}: {fault}" for fault in dict.fromkeys(self.faults)))

    def _check_keys(self) -> None:
        for key, value in self.table.items():
            kind = _KEYS.get(key)
            if kind is None:
                advice = f"{nearest(key, list(_KEYS))}; a plan has: {', '.join(_KEYS)}"
                self.faults.append(f"unknown key {shown(key)[1:-1]}{advice}")
            elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                self.faults.append(f"{key} must be {_KINDS[kind]}; got {shown(value)}")
        for key in ("arms", "seeds"):
            if not self.table.get(key):
                self.faults.append(f"{key} is missing or empty: a plan needs at least one")
        self._check_source("the plan", self.table)
        for place, tables in (("blocks", self.table.get("blocks")), ("arms", self.table.get("arms"))):
            for name, entry in tables.items() if isinstance(tables, dict) else ():
                if not isinstance(entry, dict):
                    self.faults.append(f"[{place}.{shown(name)[1:-1]}] must be a table; got {shown(entry)}")
                elif place == "blocks" and (not entry or not all(isinstance(e, dict) for e in entry.values())):
                    what = "an axis: a table of named choices, each a table of settings"
                    self.faults.append(f"[blocks.{shown(name)[1:-1]}] must be {what}")

    def _check_source(self, where: str, table: Mapping[str, Any]) -> None:
        given = [key for key in ("preset", "config") if key in table]
        if len(given) > 1:
            self.faults.append(f"{where} has a preset and a config, which both say what to begin with: give one")
        for key in given:
            if not isinstance(table[key], str):
                self.faults.append(f"{where}: {key} must be a text; got {shown(table[key])}")

    def _check_names(self, name: str, axes: dict[str, Any], arms: dict[str, Any], reference: str) -> None:
        choices = [choice for axis in axes.values() for choice in axis]
        for given in dict.fromkeys([name, *axes, *choices, *arms]):
            if not _NAME.fullmatch(given):
                rule = "letters, digits and . _ + - (64 at most, no dot first), as it names a folder"
                is_file = given == name and "name" not in self.table
                advice = "; it is the file's, so give the plan another: name = ..." if is_file else ""
                self.faults.append(f"the name {shown(given)} must be of {rule}{advice}")
        for names in (arms, *axes.values()):
            for one, other in combinations(names, 2):
                if one.casefold() == other.casefold():
                    self.faults.append(f"{one} and {other} differ in case alone, so on some disks they share a folder")
        if reference not in arms:
            known = f"it is one of: {', '.join(arms)}"
            self.faults.append(f"reference is no arm: {shown(reference)}{nearest(reference, list(arms))}; {known}")

    def _check_measures(self, primary: str, secondary: list[Any]) -> None:
        for where, measure in [("primary", primary), *(("secondary", entry) for entry in secondary)]:
            if not isinstance(measure, str) or measure not in MEASURES:
                near = nearest(measure, list(MEASURES)) if isinstance(measure, str) else ""
                self.faults.append(f"{where} cannot be {shown(measure)}{near}; it is one of: {', '.join(MEASURES)}")
            elif [primary, *secondary].count(measure) > 1:
                self.faults.append(f"{measure} is named more than once among primary and secondary")

    def _check_seeds(self, seeds: list[Any]) -> None:
        for seed in seeds:
            if type(seed) is not int:
                self.faults.append(f"seeds must be whole numbers; got {shown(seed)}")
            elif seeds.count(seed) > 1:
                self.faults.append(f"seeds has {seed} more than once: a seed counts once")

    def _layers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every table of settings with its place in the plan, without the keys that are the plan's own."""
        yield "settings", self.table.get("settings", {})
        for axis, choices in self.table.get("blocks", {}).items():
            for choice, table in choices.items():
                self._check_source(f"[blocks.{axis}.{choice}]", table)
                yield f"blocks.{axis}.{choice}", _settings_in(table)
        for arm, table in self.table.get("arms", {}).items():
            yield f"arms.{arm}", table

    def _check_layer(self, where: str, table: dict[str, Any]) -> None:
        for key in ("preset", "config"):
            if key in table:
                self.faults.append(f"[{where}] names a {key}: only the plan itself or a block may")
        sections = [section.name for section in fields(Config)]
        for key in (key for key, value in table.items() if isinstance(value, Mapping) and key not in sections):
            known = f"{nearest(key, sections)}; there are: {', '.join(sections)}"
            self.faults.append(f"[{where}] has an unknown section {shown(key)[1:-1]}{known}")
            table = {name: value for name, value in table.items() if name != key}
        try:
            update(Config(), {k: v for k, v in table.items() if k not in ("preset", "config")})
        except ConfigError as error:
            self.faults.append(f"[{where}] {error}")
        for key in _OWN:
            section, _, name = key.partition(".")
            if isinstance(table.get(section), Mapping) and name in table[section]:
                self.faults.append(f"[{where}] sets {key}, which every cell gets from the experiment: leave it out")

    def _source(self, tables: list[dict[str, Any]]) -> str | None:
        """The preset or file that a cell begins with: the last choice that names one, else the plan's."""
        for table in reversed([self.table, *tables]):
            if "preset" in table:
                if table["preset"] not in presets():
                    near = nearest(str(table["preset"]), list(presets()))
                    raise ConfigError(f"there is no preset {shown(table['preset'])}{near}; `spear list` has them")
                return str(table["preset"])
            if "config" in table:
                source = str(self.path.parent / str(table["config"]))
                if "=" in source or source.startswith("-") or source in presets():
                    raise ConfigError(
                        f"config={shown(source)}: a command would not take this path for a file; rename it"
                    )
                return source
        return None

    def _budget(self) -> dict[str, Any]:
        budget: dict[str, Any] = {}
        for key, value in self.table.get("budget", {}).items():
            if key not in BUDGET:
                known = f"{nearest(key, list(BUDGET))}; it has: {', '.join(BUDGET)}"
                self.faults.append(f"[budget] has no key {shown(key)[1:-1]}{known}")
                continue
            section, _, name = BUDGET[key].partition(".")
            budget.setdefault(section, {})[name] = value
        try:
            update(Config(), budget)
        except ConfigError as error:
            self.faults.append(f"[budget] {error}")
        return budget

    def _cells(self, out: Path, axes: dict[str, Any], arms: dict[str, Any]) -> list[Cell]:
        budget, cells, faults = self._budget(), list[Cell](), dict[str, list[str]]()
        self._raise()
        for seed in self.table["seeds"]:
            for block in product(*axes.values()):
                choices = [axes[axis][choice] for axis, choice in zip(axes, block, strict=True)]
                for arm, table in arms.items():
                    layers = [self.table.get("settings", {}), budget, *map(_settings_in, choices), table]
                    name = "/".join([*block, arm, f"seed_{seed}"])
                    try:
                        cell = cell_of(self._source(choices), layers, out, tuple(block), arm, seed)
                        cells.append(cell)
                    except ConfigError as error:
                        faults.setdefault(str(error), []).append(name)
        for fault, names in faults.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.faults.append(f"cell {names[0]}{more}: {fault}")
        return cells

    def _check_cells(self, cells: list[Cell], reference: str, primary: str) -> None:
        budget = [BUDGET[key] for key in self.table.get("budget", {})]
        first = [cell for cell in cells if cell.seed == cells[0].seed]
        if silent := next((cell for cell in first if _lacking(cell, primary)), None):
            self.faults.append(f"primary={primary}: {_lacking(silent, primary)} in cell {silent.name}")
        settings = {(cell.block, cell.arm): _compared(cell) for cell in first}
        blocks, arms = list(dict.fromkeys(c.block for c in first)), list(dict.fromkeys(c.arm for c in first))
        for number, block in enumerate(blocks):
            for twin in blocks[:number]:
                if all(settings[block, arm] == settings[twin, arm] for arm in arms):
                    equal = f"the blocks {'/'.join(twin)} and {'/'.join(block)} are equal"
                    self.faults.append(f"{equal}: all settings are the same, so every run would count twice")
        for number, arm in enumerate(arms):
            for other in arms[:number]:
                if all(settings[block, arm] == settings[block, other] for block in blocks):
                    self.faults.append(f"the arms {other} and {arm} are equal: all settings are the same")
            for key in budget:
                for block in blocks:
                    mine, its = settings[block, arm][key], settings[block, reference][key]
                    if mine != its:
                        differ = f"{key} is {mine} in {arm} and {its} in {reference}"
                        self.faults.append(f"{differ}: [budget] is for all arms alike")


def _settings_in(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a block's choice, which may name a preset or a file beside them."""
    return {key: value for key, value in choice.items() if key not in ("preset", "config")}


def _compared(cell: Cell) -> dict[str, Any]:
    return {key: value for key, value in flat(cell.config).items() if key not in _OWN}


def _lacking(cell: Cell, measure: str) -> str:
    """Why a cell will have no such measure, if it will not."""
    evaluation = cell.config.eval
    if not cell.config.run.steps:
        return "run.steps is 0"
    if not evaluation.tasks and not measure.startswith("rollout_"):
        return "it needs evaluations, but eval.tasks is 0"
    is_further = measure.startswith("also_")
    return "it needs a split in eval.also, which is empty" if is_further and not evaluation.also else ""


def _notes(cells: list[Cell], reference: str, seeds: list[int], secondary: list[str]) -> Iterator[str]:
    """What differs between arms beside the method, and what will be missing from the report."""
    if len(seeds) == 1:
        yield "there is one seed: no interval over seeds can be given"
    found: dict[str, list[str]] = {}
    first = [cell for cell in cells if cell.seed == cells[0].seed]
    bases = {cell.block: cell for cell in first if cell.arm == reference}
    for cell in first:
        mine, its = _compared(cell), _compared(bases[cell.block])
        where = "/".join(cell.block)
        for key in mine:
            is_budget, is_task = key in BUDGET.values(), key.startswith("task.")
            if (is_budget or is_task or key.startswith("eval.")) and mine[key] != its[key]:
                what = "the same budget" if is_budget else "the same task" if is_task else "evaluated alike"
                text = f"not {what}: {key} is {mine[key]} in {cell.arm} and {its[key]} in {reference}"
                found.setdefault(text, []).append(where)
        if _is_separate(cell.config) and not _is_separate(bases[cell.block].config):
            text = (
                f"{cell.arm} takes optimizer steps of its own for replayed rows (algorithm.imitation.update=separate), "
                f"so more of them than {reference}; the report counts those of every cell"
            )
            found.setdefault(text, []).append(where)
    for text, blocks in found.items():
        yield text if len(blocks) == len(bases) else f"{text} (in {', '.join(blocks)})"
    for measure in secondary:
        if silent := next((cell for cell in first if _lacking(cell, measure)), None):
            yield f"there will be no {measure} in cell {silent.name}: {_lacking(silent, measure)}"
    if all(cell.config.eval.tasks and not 0 < cell.config.eval.every < cell.config.run.steps for cell in first):
        every = f"eval.every is {first[0].config.eval.every} and run.steps {first[0].config.run.steps}"
        yield f"{every}: cells are evaluated before and after RL only, so eval_mean is eval_final"


def _is_separate(config: Config) -> bool:
    imitation = config.algorithm.imitation
    return config.algorithm.name.startswith("spear-") and imitation.enabled and imitation.update == "separate"
