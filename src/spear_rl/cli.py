"""The command line. An error that the user can fix is one sentence and exit code 2."""

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from spear_rl import __version__
from spear_rl.app.config import Config, flat, load, presets, to_toml
from spear_rl.errors import ConfigError, UserError
from spear_rl.io.escaping import indented
from spear_rl.io.files import check_writable
from spear_rl.rollout.env import TasksFn
from spear_rl.settings.fields import meant
from spear_rl.settings.names import ALGORITHM_NAMES
from spear_rl.settings.ranges import Range, checked
from spear_rl.train.trackers import TRACKERS

try:
    import typer
    from rich.table import Table
    from typer import Argument, Option

    from spear_rl.io.terminal import PlainConsole, error_console, log_to_stderr, protect_stderr
except ImportError:
    print("error: the command line needs its extra: pip install 'spear-rl[train]'", file=sys.stderr)
    sys.exit(2)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="SPEAR: self-imitation learning with progressive exploration for LLM agents.",
)
console = PlainConsole()


def _within(low: int, high: int) -> Callable[[typer.CallbackParam, int], Any]:
    """A range for an option, with the same error messages as for settings."""

    def check(param: typer.CallbackParam, value: int) -> Any:
        return checked(value, Annotated[int, Range(low, high)], param.opts[0])

    return check


Options = Annotated[
    list[str] | None, Argument(metavar="[OPTION=VALUE]...", help="Options of the environment, e.g. level=easy.")
]
_SETTINGS = "[PRESET|CONFIG.TOML] [SECTION.KEY=VALUE]..."


def _completions(incomplete: str) -> list[str]:
    """What a shell offers for a setting that is being typed."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={name}" for name in ALGORITHM_NAMES] if key == "algorithm.name" else []
    return [word for word in (*presets(), *(f"{name}=" for name in flat(Config()))) if word.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    Argument(metavar=_SETTINGS, help="Settings; `spear show config` lists all.", autocompletion=_completions),
]
_SETTINGS_ONLY = {"ignore_unknown_options": True}
"""Words like --seed reach `_split`, which says how a setting is written."""


@app.command(context_settings=_SETTINGS_ONLY)
def train(settings: Overrides = None) -> None:
    """Train: cold start if configured, then RL; resumes with run.resume=true.

    Example: spear train quickstart run.seed=1 algorithm.name=dr-bot-grpo
    """
    _run(settings, "train")


@app.command(context_settings=_SETTINGS_ONLY)
def sft(settings: Overrides = None) -> None:
    """Cold start only: supervised learning on expert episodes; writes run.dir/model, a plain transformers folder."""
    _run(settings, "sft")


def _run(settings: list[str] | None, verb: Literal["train", "sft"]) -> None:
    from spear_rl.app.console import LiveConsole
    from spear_rl.app.resume import opened

    with opened(*_split(settings), verb=verb) as (config, notes):
        from spear_rl.app.train import sft_from, train_from

        run_dir = config.run.dir
        if verb == "train":
            notes = [f"{config.algorithm.name} on {config.task.env}, seed {config.run.seed} -> {Path(run_dir)}", *notes]
        for text in notes:
            console.print(text, soft_wrap=True)
        with LiveConsole(console) as live:
            summary = (train_from if verb == "train" else sft_from)(config, [live])
    for name in ("success_before", "success_after"):
        if rate := summary[name]:
            label = name.replace("_", " ")
            console.print(f"{label}: {rate['success']:.1%} ({rate['low']:.1%} to {rate['high']:.1%})")
    console.print(f"everything is in {Path(run_dir)}", soft_wrap=True)


_POLICY = "expert, random, an OpenAI-compatible endpoint (http://host:port/v1), a run folder, or as engine.model."


@app.command(name="eval")
def evaluate(
    policy: Annotated[str, Argument(metavar="POLICY", help=_POLICY)],
    env: Annotated[str | None, Option(help="Environment; a run's own if left out.")] = None,
    split: Annotated[str, Option(help="Panel: train, validation, test, or another of the environment.")] = "validation",
    tasks: Annotated[int, Option(help="Tasks of the panel to play; 0 is all.")] = 0,
    episodes: Annotated[int, Option(help="Episodes per task.")] = 1,
    samples: Annotated[int, Option(help="k of mean@k and pass@k; plays at least k episodes per task.")] = 0,
    temperature: Annotated[float | None, Option(help="Of sampling; eval.temperature if left out.")] = None,
    seed: Annotated[int | None, Option(help="Of sampling, dice and demonstrations.")] = None,
    model: Annotated[str, Option(help="Endpoint: the model's name there; not needed if it has only one.")] = "",
    api_key_env: Annotated[str, Option(help="Endpoint: variable with the key; OPENAI_API_KEY if left out.")] = "",
    parallel: Annotated[int, Option(help="Endpoint: concurrent requests.")] = 16,
    timeout: Annotated[float, Option(help="Endpoint: seconds to wait for an answer.")] = 120.0,
    out: Annotated[Path | None, Option(help="Write the result, with task ids, to this JSON file.")] = None,
    config: Annotated[str, Option(help="A preset or config.toml with the other settings.")] = "",
    set_: Annotated[list[str] | None, Option("--set", help="Any other setting, section.key=value.")] = None,
) -> None:
    """Success on a panel, in all and per kind of task, with 95 % Wilson intervals.

    Example: spear eval expert --env alfworld --split valid_seen --set rollout.max_turns=50
    """
    from spear_rl.app.console import eval_progress, print_report
    from spear_rl.app.evaluate import EvalOptions, evaluate_from

    options = EvalOptions(split, tasks, episodes, samples, model, api_key_env, parallel, timeout)
    given = {"task.env": env or None, "eval.temperature": temperature, "run.seed": seed}
    overrides = [*(set_ or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    if out:
        check_writable(out, "--out")
    with eval_progress(console) as progress:
        report = evaluate_from(policy, overrides, options, source=config, notice=progress)
    print_report(report, console)
    if out:
        out.write_text(json.dumps(report.as_dict(), indent=1) + "\n", "utf-8")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def verl(
    context: typer.Context,
    check: Annotated[bool, Option("--check", help="Say whether verl is ready for us, and do nothing.")] = False,
) -> None:
    """Train inside verl: [PRESET|CONFIG.TOML] [SECTION.KEY=VALUE]... [-- VERL.KEY=VALUE...]

    Example: spear verl paper-alfworld engine.model=Qwen/Qwen2.5-1.5B-Instruct -- trainer.n_gpus_per_node=8
    """
    from spear_rl.integrations.verl.launch import checked, launch

    if check:
        console.print(checked(), soft_wrap=True)
        return
    cut = [*context.args, "--"].index("--")
    launch(*_split(context.args[:cut]), context.args[cut + 1 :])


@app.command()
def compare(
    runs: Annotated[list[Path], Argument(help="Run folders.")],
    out: Annotated[Path, Option(help="Folder of compare.png, .md and .json.")] = Path("runs/compare"),
) -> None:
    """Runs side by side, grouped by algorithm: mean and interval over seeds, paired differences, curves."""
    from spear_rl.app.compare import compare as comparison

    console.print(comparison(runs, out))


@app.command()
def show(
    what: Annotated[str, Argument(help="config, algorithm NAME, a preset, config.toml, or run folder.")] = "config",
    settings: Annotated[list[str] | None, Argument(metavar="[NAME] [SECTION.KEY=VALUE]...")] = None,
    episodes: Annotated[int, Option(help="Of a run: newest episodes to print.", callback=_within(0, 1_000_000))] = 1,
) -> None:
    """Every setting with its meaning; what an algorithm, a preset or a run is set to, and how a run's episodes went.

    Example: spear show algorithm spear-dr-bot-grpo algorithm.imitation.max_age=10
    """
    from spear_rl.app.show import algorithm_overview, run_overview

    name, overrides = _split(settings)
    if what == "algorithm":
        text = algorithm_overview(name, overrides)
    elif name:
        raise ConfigError(f"{name!r} is no setting: write section.key=value, or `spear show algorithm NAME`")
    elif os.path.isdir(what):
        text = run_overview(Path(what), num_episodes=episodes)
    else:
        source = None if what == "config" else what
        text = to_toml(load(source, overrides) if source or overrides else Config(), comments=True)
    console.print(text, soft_wrap=True)


@app.command(context_settings=_SETTINGS_ONLY)
def doctor(settings: Overrides = None) -> None:
    """What this machine has, what a configuration will use of it, and whether it fits into memory.

    Example: spear doctor paper-alfworld engine.model=models/qwen engine.checkpointing=true
    """
    config = load(*_split(settings))
    from spear_rl.app import doctor as diagnosis
    from spear_rl.engines.memory import GIB
    from spear_rl.engines.models.tiny import FROM_SCRATCH

    table = Table("what", "here")
    tasks, missing = diagnosis.tasks(config)
    for name, value in [*diagnosis.machine(), *diagnosis.sandbox(), *diagnosis.engine(config), ("tasks", tasks)]:
        table.add_row(name, value)
    console.print(table)
    if missing:
        console.print(f"no tasks to play: {missing}", soft_wrap=True)
    if config.engine.model in FROM_SCRATCH:
        console.print(f"{config.engine.model} takes a few megabytes: it fits")
        return
    taken, free, most = diagnosis.estimate(config)
    parts = Table("memory for", "GiB")
    for name, size in taken.as_dict().items():
        parts.add_row(name, f"{size / GIB:.2f}")
    console.print(parts)
    console.print(diagnosis.advice(config, taken, free, most))


@app.command(name="check-env")
def check_env(
    env: Annotated[str, Argument(metavar="PACKAGE.MODULE:FUNCTION", help="Its tasks; or one of ours by name.")],
    options: Options = None,
    tasks: Annotated[int, Option(help="Tasks of each split to play.", callback=_within(1, 1_000_000))] = 5,
    python: Annotated[str, Option(help="Interpreter of the environment's own virtual environment.")] = "",
) -> None:
    """Tell an author what is wrong with an environment, one sentence per fault; exit code 1 if anything is.

    Example: spear check-env my_game:tasks level=3
    """
    from spear_rl.envs import ENVIRONMENTS
    from spear_rl.rollout.workers.other_venv import tasks_from_other_venv
    from spear_rl.testing import Timing, check_tasks, loaded_tasks

    settings = _task_options(options)
    if python:
        tasks_fn: TasksFn = partial(tasks_from_other_venv, python=python, name=env)
    else:
        tasks_fn = ENVIRONMENTS[env] if env in ENVIRONMENTS else loaded_tasks(env)
    timing = Timing()
    faults = check_tasks(tasks_fn, options=settings, num_tasks=tasks, timing=timing)
    for fault in faults:
        console.print(f"- {indented(fault)}", soft_wrap=True)
    found = {0: "no fault found", 1: "1 fault"}.get(len(faults), f"{len(faults)} faults")
    times = f"a step takes {timing.step_ms:.3g} ms, making and resetting an environment {timing.reset_ms:.3g} ms"
    console.print(f"{env}: {found}; {times}")
    if faults:
        raise typer.Exit(1)


@app.command()
def shop(
    options: Options = None,
    split: Annotated[str, Option(help="Panel: train, validation or test.")] = "validation",
    host: Annotated[
        str, Option(help="Address to listen at; the default is reachable from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="0 takes a free one.", callback=_within(0, 65_535))] = 8484,
) -> None:
    """The tasks of `webshop` in a browser: shop yourself and see the score.

    Example: spear shop level=standard --split test
    """
    from spear_rl.envs.webshop import source_of
    from spear_rl.envs.webshop.browser import served, visits_of

    settings = _task_options(options)
    known = [*inspect.signature(source_of).parameters, "cache"]
    for option in settings:
        if option not in known:
            raise ConfigError(f"{option}: the shop has no such option; it has: {', '.join(known)}")
    try:
        cache = settings.pop("cache", "")
        visits = visits_of(split, source_of(**settings), cache=cache)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    with served(visits, host=host, port=port) as server:
        console.print(f"the shop is open at {server.address} (Ctrl+C closes it)", soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


@app.command(name="list")
def list_() -> None:
    """Presets, algorithms, environments, built-in models and trackers."""
    from spear_rl.engines.models.tiny import FROM_SCRATCH
    from spear_rl.envs import ENVIRONMENTS

    table = Table("what", "names", show_lines=True)
    table.add_row(
        "presets", "\n".join(f"{name}: {text.splitlines()[0].lstrip('# ')}" for name, text in presets().items())
    )
    table.add_row("algorithms", ", ".join([*ALGORITHM_NAMES, "or your own: package.module:function"]))
    table.add_row("environments", ", ".join(ENVIRONMENTS))
    table.add_row("models", ", ".join([*FROM_SCRATCH, "smollm2", "or any transformers folder"]))
    table.add_row("trackers", ", ".join([*TRACKERS, "or your own: package.module:function"]))
    console.print(table)


def _task_options(options: list[str] | None) -> dict[str, Any]:
    return load(None, [f"task.options.{option}" for option in options or []]).task.options


def _version(value: bool) -> None:
    if value:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    log_to_stderr()


def _split(settings: list[str] | None) -> tuple[str | None, list[str]]:
    """The preset or file, if one is named, and the overrides."""
    if flag := next((s for s in settings or [] if s.startswith("-")), None):
        name = flag.lstrip("-").partition("=")[0]
        hint = meant(name, list(flat(Config()))) or ", e.g. run.seed=1"
        raise ConfigError(f"there is no option {flag}: settings are written section.key=value{hint}")
    sources = [s for s in settings or [] if "=" not in s]
    if len(sources) > 1:
        raise ConfigError(f"name one preset or file, not {len(sources)}: {', '.join(sources)}")
    return (sources[0] if sources else None), [s for s in settings or [] if "=" in s]


def main() -> None:
    """Run the command line; user errors become one sentence and exit code 2."""
    protect_stderr()
    try:
        app()
    except UserError as error:
        _complain(str(error))
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("transformers", "tokenizers", "tensorboard", "matplotlib"):
            _complain(f"{error.name} is not installed: pip install 'spear-rl[train]'")
            sys.exit(2)
        raise


def _complain(sentence: str) -> None:
    error_console().print("error:", indented(sentence), style="bold red", soft_wrap=True)


if __name__ == "__main__":
    main()
