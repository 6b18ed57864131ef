"""The command line. Every mistake a user can mend ends in one sentence and exit code 2."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from spear_rl import __version__
from spear_rl.errors import ConfigError, UserError
from spear_rl.io.escaping import indented
from spear_rl.io.files import check_writable
from spear_rl.rollout.env import TasksFn
from spear_rl.settings.names import ALGORITHM_NAMES
from spear_rl.settings.ranges import Range, checked

try:
    import typer
    from rich.table import Table

    from spear_rl.io.terminal import PlainConsole, error_console, log_to_stderr, protect_stderr
except ImportError:
    print("error: the command line needs its extra: pip install 'spear-rl[train]'", file=sys.stderr)
    sys.exit(2)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="SPEAR: self-imitation learning with progressive exploration for LLM agents.",
)
console = PlainConsole()


def _within(low: int, high: int) -> Callable[[typer.CallbackParam, int], int]:
    """Holds an option to a range, in a sentence of ours."""

    def check(param: typer.CallbackParam, value: int) -> int:
        number: int = checked(value, Annotated[int, Range(low, high)], param.opts[0])
        return number

    return check


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PRESET|CONFIG.TOML] [SECTION.KEY=VALUE]...", help="Settings; `spear show config` lists all."
    ),
]


@app.command()
def train(settings: Overrides = None) -> None:
    """Train: cold start if configured, then RL; resumes with run.resume=true.

    Example: spear train quickstart run.seed=1 algorithm.name=dr-bot-grpo
    """
    from spear_rl.app.console import LiveConsole
    from spear_rl.app.resume import opened

    with opened(*_split(settings), verb="train") as (config, notes):
        from spear_rl.app.train import train_from
        from spear_rl.train.callbacks import JsonLines, TensorBoard

        run_dir = Path(config.run.dir)
        said = f"{config.algorithm.name} on {config.task.env}, seed {config.run.seed} -> {run_dir}"
        for text in (said, *notes):
            console.print(text, soft_wrap=True)
        files = [JsonLines(run_dir / "metrics.jsonl", "step"), JsonLines(run_dir / "eval.jsonl", "eval")]
        with LiveConsole(console) as live:
            summary = train_from(config, [*files, TensorBoard(run_dir / "tensorboard"), live])
    _print_summary(summary, run_dir)


@app.command()
def sft(settings: Overrides = None) -> None:
    """Cold start only: supervised learning on expert episodes; writes run.dir/model, a plain transformers folder."""
    from spear_rl.app.console import LiveConsole
    from spear_rl.app.resume import opened

    with opened(*_split(settings), verb="sft") as (config, notes):
        if not config.sft.episodes:
            raise ConfigError("sft.episodes is 0: say how many expert episodes to learn from, e.g. sft.episodes=256")
        from spear_rl.app.train import sft_from

        for text in notes:
            console.print(text, soft_wrap=True)
        with LiveConsole(console) as live:
            summary = sft_from(config, [live])
    _print_summary(summary, Path(config.run.dir))


@app.command(name="eval")
def evaluate(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY",
            help="expert, random, an OpenAI-compatible endpoint (http://host:port/v1), a run folder, or a model as in "
            "engine.model.",
        ),
    ],
    env: Annotated[str | None, typer.Option(help="Environment; a run's own if left out.")] = None,
    split: Annotated[
        str, typer.Option(help="Panel: train, validation, test, or as the environment calls it.")
    ] = "validation",
    tasks: Annotated[int, typer.Option(help="Tasks of the panel to play; 0 is all.")] = 0,
    episodes: Annotated[int, typer.Option(help="Episodes of every task.")] = 1,
    samples: Annotated[
        int, typer.Option(help="k: also print mean@k and pass@k; plays at least k episodes of every task.")
    ] = 0,
    temperature: Annotated[
        float | None, typer.Option(help="Of sampling; the run's eval.temperature if left out.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling, dice and demonstrations.")] = None,
    model: Annotated[str, typer.Option(help="Endpoint: the model's name there; not needed if it has only one.")] = "",
    api_key_env: Annotated[
        str, typer.Option(help="Endpoint: variable that holds the key; OPENAI_API_KEY if left out.")
    ] = "",
    parallel: Annotated[int, typer.Option(help="Endpoint: requests under way at once.")] = 16,
    timeout: Annotated[float, typer.Option(help="Endpoint: seconds to wait for an answer.")] = 120.0,
    out: Annotated[Path | None, typer.Option(help="Write the result, with task ids, to this JSON file.")] = None,
    config: Annotated[str, typer.Option(help="A preset or config.toml with the other settings.")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any other setting, section.key=value.")] = None,
) -> None:
    """Success on a panel, in all and per kind of task, with 95 % Wilson intervals.

    Example: spear eval expert --env alfworld --split valid_seen --set rollout.max_turns=50
    """
    from spear_rl.app.eval_console import EvalProgress, print_report
    from spear_rl.app.evaluate import Connection, Panel, evaluate_from

    overrides = list(set_ or [])
    overrides += [f"task.env={env}"] if env else []
    overrides += [] if temperature is None else [f"eval.temperature={temperature}"]
    overrides += [] if seed is None else [f"run.seed={seed}"]
    if out:
        check_writable(out, "--out")
    with EvalProgress(console) as progress:
        report = evaluate_from(
            policy,
            overrides,
            Panel(split, tasks, episodes, samples),
            Connection(model, api_key_env, parallel, timeout),
            source=config,
            notice=progress,
        )
    print_report(report, console)
    if out:
        out.write_text(json.dumps(report.as_dict(), indent=1) + "\n", "utf-8")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def verl(
    context: typer.Context,
    check: Annotated[bool, typer.Option("--check", help="Say whether verl is ready for us, and do nothing.")] = False,
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
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="Folder for compare.png, compare.md and compare.json.")] = Path(
        "runs/compare"
    ),
) -> None:
    """Runs side by side, grouped by algorithm: mean and interval over seeds, paired differences, curves."""
    from spear_rl.app.compare import compare as comparison

    console.print(comparison(runs, out))


@app.command()
def show(
    what: Annotated[
        str, typer.Argument(help="config, algorithm NAME, a preset, config.toml, or run folder.")
    ] = "config",
    settings: Annotated[list[str] | None, typer.Argument(metavar="[NAME] [SECTION.KEY=VALUE]...")] = None,
    episodes: Annotated[
        int, typer.Option(help="Of a run: how many of its newest episodes to print.", callback=_within(0, 1_000_000))
    ] = 1,
) -> None:
    """Every setting with its meaning; what an algorithm, a preset or a run is set to, and how a run's episodes went.

    Example: spear show algorithm spear-dr-bot-grpo algorithm.imitation.max_age=10
    """
    from spear_rl.app import config as configuration
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
        config = configuration.load(source, overrides) if source or overrides else configuration.Config()
        text = configuration.to_toml(config, comments=True)
    console.print(text, soft_wrap=True)


@app.command()
def doctor(settings: Overrides = None) -> None:
    """What this machine has, what a configuration will use of it, and whether it fits into memory.

    Example: spear doctor paper-alfworld engine.model=models/qwen engine.checkpointing=true
    """
    source, overrides = _split(settings)
    from spear_rl.app import config as configuration
    from spear_rl.app import doctor as diagnosis
    from spear_rl.engines.memory import GIB
    from spear_rl.engines.models.tiny import TINY_SIZES

    config = configuration.load(source, overrides)
    table = Table("what", "here")
    for name, value in [*diagnosis.machine(), *diagnosis.sandbox(), *diagnosis.engine(config)]:
        table.add_row(name, value)
    console.print(table)
    if config.engine.model in TINY_SIZES:
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
    env: Annotated[str, typer.Argument(metavar="PACKAGE.MODULE:FUNCTION", help="Its tasks; or one of ours by name.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTION=VALUE]...", help="The environment's own settings.")
    ] = None,
    tasks: Annotated[int, typer.Option(help="Tasks of each split to play.", callback=_within(1, 1_000_000))] = 5,
    python: Annotated[str, typer.Option(help="Interpreter of the environment's own virtual environment.")] = "",
) -> None:
    """Tell an author what is wrong with an environment, one sentence a fault; exit code 1 if anything is.

    Example: spear check-env my_game:tasks level=3
    """
    from spear_rl.app import config as configuration
    from spear_rl.envs import ENVIRONMENTS
    from spear_rl.rollout.workers.other_venv import tasks_from_other_venv
    from spear_rl.testing import Timing, check_tasks, loaded_tasks

    settings = configuration.load(None, [f"task.options.{option}" for option in options or []]).task.options
    if python:
        tasks_fn: TasksFn = partial(tasks_from_other_venv, python=python, name=env)
    else:
        tasks_fn = ENVIRONMENTS[env] if env in ENVIRONMENTS else loaded_tasks(env)
    timing = Timing()
    faults = check_tasks(tasks_fn, options=settings, num_tasks=tasks, timing=timing)
    for fault in faults:
        console.print(f"- {indented(fault)}", soft_wrap=True)
    found = f"{len(faults)} faults" if len(faults) != 1 else "1 fault"
    console.print(
        f"{env}: {found if faults else 'no fault found'}; a step takes {timing.step_ms:.3g} ms, "
        f"making and resetting an environment {timing.reset_ms:.3g} ms"
    )
    if faults:
        raise typer.Exit(1)


@app.command()
def shop(
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTION=VALUE]...", help="Of webshop, e.g. level=tiny or data=FOLDER."),
    ] = None,
    split: Annotated[str, typer.Option(help="Panel: train, validation or test.")] = "validation",
    host: Annotated[
        str, typer.Option(help="Address to listen at; others can only reach it if you say so.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", callback=_within(0, 65_535))] = 8484,
) -> None:
    """The tasks of `webshop` in a browser: shop yourself and see the score.

    Example: spear shop level=standard --split test
    """
    from spear_rl.app import config as configuration
    from spear_rl.envs.webshop import source_of
    from spear_rl.envs.webshop.browser import served, visits_of

    settings = configuration.load(None, [f"task.options.{option}" for option in options or []]).task.options
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
    """Presets, algorithms, environments and built-in models."""
    from spear_rl.app import config as configuration
    from spear_rl.engines.models.tiny import TINY_SIZES
    from spear_rl.envs import ENVIRONMENTS

    table = Table("what", "names", show_lines=True)
    table.add_row(
        "presets", "\n".join(f"{n}: {t.splitlines()[0].lstrip('# ')}" for n, t in configuration.presets().items())
    )
    table.add_row("algorithms", ", ".join([*ALGORITHM_NAMES, "or your own: package.module:function"]))
    table.add_row("environments", ", ".join(ENVIRONMENTS))
    table.add_row("models", ", ".join([*TINY_SIZES, "smollm2", "or any transformers folder"]))
    console.print(table)


def _version(value: bool) -> None:
    if value:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    log_to_stderr()


def _split(settings: list[str] | None) -> tuple[str | None, list[str]]:
    """The preset or file, if one is named, and the overrides."""
    sources = [s for s in settings or [] if "=" not in s]
    if len(sources) > 1:
        raise ConfigError(f"name one preset or file, not {len(sources)}: {', '.join(sources)}")
    return (sources[0] if sources else None), [s for s in settings or [] if "=" in s]


def _print_summary(summary: dict[str, object], run_dir: Path) -> None:
    for name in ("success_before", "success_after"):
        rate = summary.get(name)
        if isinstance(rate, dict):
            label = name.replace("_", " ")
            console.print(f"{label}: {rate['success']:.1%} ({rate['low']:.1%} to {rate['high']:.1%})")
    console.print(f"everything is in {run_dir}", soft_wrap=True)


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
