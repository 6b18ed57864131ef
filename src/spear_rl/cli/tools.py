"""The commands around training: doctor, check-env, init, shop, list."""

import inspect
from typing import Annotated

import typer
from rich.table import Column, Table
from typer import Argument, Option

from spear_rl.app.config import load, presets
from spear_rl.cli.shared import (
    SETTINGS_ONLY,
    Options,
    Overrides,
    app,
    console,
    require_packages,
    source_and_settings,
    task_options,
    within,
)
from spear_rl.errors import ConfigError
from spear_rl.io.escaping import indented
from spear_rl.settings.names import ALGORITHM_NAMES
from spear_rl.train.trackers import TRACKERS


@app.command(context_settings=SETTINGS_ONLY)
def doctor(settings: Overrides = None) -> None:
    """What this machine has, what a configuration will use of it, and whether it fits into memory.

    Example: spear doctor paper-alfworld engine.model=models/qwen engine.checkpointing=true
    """
    config = load(*source_and_settings(settings))
    from spear_rl.app import doctor as diagnosis
    from spear_rl.engines.memory import GIB
    from spear_rl.engines.models.tiny import FROM_SCRATCH

    table = Table("what", Column("here", overflow="fold"))
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
    tasks: Annotated[int, Option(help="Tasks of each split to play.", callback=within(1, 1_000_000))] = 5,
    python: Annotated[str, Option(help="Interpreter of the environment's own virtual environment.")] = "",
) -> None:
    """Tell an author what is wrong with an environment, one sentence per fault; exit code 1 if anything is.

    Example: spear check-env my_game:tasks level=3
    """
    from spear_rl.envs import tasks_fn
    from spear_rl.testing import Timing, check_tasks, notes_on

    settings, timing = task_options(options), Timing()
    faults = check_tasks(tasks_fn(env, python=python), options=settings, num_tasks=tasks, timing=timing)
    for fault in faults:
        console.print(f"- {indented(fault)}", soft_wrap=True)
    for note in notes_on(timing):
        console.print(f"note: {note}", soft_wrap=True)
    found = {0: "no fault found", 1: "1 fault"}.get(len(faults), f"{len(faults)} faults")
    times = f"a step takes {timing.step_ms:.3g} ms, making and resetting an environment {timing.reset_ms:.3g} ms"
    console.print(f"{env}: {found}; {times}")
    if faults:
        raise typer.Exit(1)


@app.command()
def init(
    kind: Annotated[str, Argument(metavar="environment|algorithm|plan", help="What to begin.")],
    name: Annotated[str, Argument(help="Its name: NAME.py or NAME.toml is written into this folder.")],
) -> None:
    """Write a commented starting file that trains as it is: an environment, an algorithm, or the settings of a run.

    Example: spear init environment my_game
    """
    from spear_rl.app.init import begin

    console.print(begin(kind, name), soft_wrap=True)


@app.command()
def shop(
    options: Options = None,
    split: Annotated[str, Option(help="Panel: train, validation or test.")] = "validation",
    host: Annotated[
        str, Option(help="Address to listen at; the default is reachable from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="0 takes a free one.", callback=within(0, 65_535))] = 8484,
) -> None:
    """The tasks of `webshop` in a browser: shop yourself and see the score.

    Example: spear shop level=standard --split test
    """
    require_packages("jinja2", "starlette", "uvicorn", extra="view,webshop")
    from spear_rl.envs.webshop import source_of
    from spear_rl.envs.webshop.browser import ShopServer, visits_of

    settings = task_options(options)
    known = [*inspect.signature(source_of).parameters, "cache"]
    for option in settings:
        if option not in known:
            raise ConfigError(f"{option}: the shop has no such option; it has: {', '.join(known)}")
    try:
        cache = settings.pop("cache", "")
        visits = visits_of(split, source_of(**settings), cache=cache)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    server = ShopServer(visits, host=host, port=port)
    console.print(f"the shop is open at {server.address} (Ctrl+C closes it)", soft_wrap=True)
    server.serve()


@app.command(name="list")
def list_() -> None:
    """Presets, algorithms, environments, built-in models and trackers."""
    from spear_rl.engines.models.tiny import FROM_SCRATCH
    from spear_rl.envs import ENVIRONMENTS
    from spear_rl.envs.adapters import ADAPTERS

    table = Table("what", Column("names", overflow="fold"), show_lines=True)
    table.add_row(
        "presets", "\n".join(f"{name}: {text.splitlines()[0].lstrip('# ')}" for name, text in presets().items())
    )
    table.add_row("algorithms", ", ".join([*ALGORITHM_NAMES, "or your own: package.module:function"]))
    table.add_row("environments", ", ".join([*ENVIRONMENTS, *(f"{prefix}:ID" for prefix in ADAPTERS)]))
    table.add_row(
        "models", ", ".join([*FROM_SCRATCH, "smollm2", "a folder, adapter or GGUF file, or a hub id: owner/name"])
    )
    table.add_row("trackers", ", ".join([*TRACKERS, "or your own: package.module:function"]))
    console.print(table)
