"""The commands that train: train, sft, verl."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from spear_rl.app.config import merged
from spear_rl.cli.shared import SETTINGS_ONLY, Overrides, app, console, source_and_settings
from spear_rl.errors import FinishedError
from spear_rl.io.signals import Stop, Stopped, stop_on_signals
from spear_rl.train.callbacks import Callback, Event


@app.command(no_args_is_help=True, context_settings=SETTINGS_ONLY)
def train(settings: Overrides = None) -> None:
    """Train: cold start if configured, then RL; resumes with run.resume=true, starts or resumes with run.resume=auto.

    Examples: spear train quickstart run.seed=1 algorithm.name=dr-bot-grpo

    spear train tiny task.env=my_game:tasks run.dir=runs/my_game
    """
    _run(settings, "train")


@app.command(no_args_is_help=True, context_settings=SETTINGS_ONLY)
def sft(settings: Overrides = None) -> None:
    """Cold start only: supervised learning on expert episodes; writes run.dir/model, a plain transformers folder."""
    _run(settings, "sft")


_STOPPING = "stopping after this step or update; a second Ctrl-C stops now, without it"


def _run(settings: list[str] | None, verb: Literal["train", "sft"]) -> None:
    """Run to the end or to a stop signal, whose exit code is 128 and its number."""
    from spear_rl.app.resume import stopped_sentence

    try:
        with stop_on_signals(partial(console.print, _STOPPING, soft_wrap=True)) as stop:
            _run_to_end(settings, verb, stop)
    except FinishedError as finished:
        console.print(str(finished), soft_wrap=True)
    except Stopped as stopped:
        run_dir = merged(*source_and_settings(settings)).run.dir
        console.print(stopped_sentence(stopped.place, run_dir, verb), soft_wrap=True)
        raise typer.Exit(stopped.exit_code) from None


def _run_to_end(settings: list[str] | None, verb: Literal["train", "sft"], stop: Stop) -> None:
    from spear_rl.app.console import LiveConsole, print_next_commands
    from spear_rl.app.resume import opened

    with opened(*source_and_settings(settings), verb=verb) as (config, notes):
        from spear_rl.app.train import sft_from, train_from

        run_dir = config.run.dir
        if verb == "train":
            notes = [f"{config.algorithm.name} on {config.task.env}, seed {config.run.seed} -> {Path(run_dir)}", *notes]
        for text in notes:
            console.print(text, soft_wrap=True)
        with LiveConsole(console) as live, frozen_start() as freeze:
            summary = (train_from if verb == "train" else sft_from)(config, [live, freeze], stop=stop)
    for name in ("success_before", "success_after"):
        if rate := summary[name]:
            label = name.replace("_", " ")
            console.print(f"{label}: {rate['success']:.1%} ({rate['low']:.1%} to {rate['high']:.1%})")
    console.print(f"everything is in {Path(run_dir)}", soft_wrap=True)
    print_next_commands(console, Path(run_dir), verb=verb, trackers=config.run.trackers)


@contextmanager
def frozen_start() -> Iterator[Callback]:
    """A callback that leaves all objects of the first step and before it out of later garbage collections.

    They are millions, of torch and transformers above all, and stay to the end; a full collection looks at each.
    """
    is_frozen = False

    def freeze(event: Event) -> None:
        nonlocal is_frozen
        if event.kind == "step" and not is_frozen:
            is_frozen = True
            gc.collect()
            gc.freeze()

    try:
        yield freeze
    finally:
        gc.unfreeze()


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
    launch(*source_and_settings(context.args[:cut]), context.args[cut + 1 :])
