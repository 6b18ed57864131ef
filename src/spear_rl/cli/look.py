"""The commands that look: eval, compare, show, view, report."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from spear_rl.cli.shared import app, console, require_packages, source_and_settings, within
from spear_rl.io.files import check_writable

_POLICY = "expert, random, an OpenAI-compatible endpoint (http://host:port/v1), a run folder, or as engine.model."


@app.command(name="eval")
def evaluate(
    policy: Annotated[str, Argument(metavar="POLICY", help=_POLICY)],
    env: Annotated[str | None, Option(help="Environment; a run's own if left out.")] = None,
    split: Annotated[str, Option(help="Panel: train, validation, test, or another of the environment.")] = "validation",
    tasks: Annotated[int, Option(help="Tasks of the panel to play; 0 is all.")] = 0,
    episodes: Annotated[int, Option(help="Episodes per task.")] = 1,
    samples: Annotated[int, Option(help="k of mean@k and pass@k; eval.samples if neither is given.")] = 0,
    temperature: Annotated[float | None, Option(help="Of sampling; eval.temperature if left out.")] = None,
    top_p: Annotated[float | None, Option(help="Of sampling; eval.top_p if left out.")] = None,
    seed: Annotated[int | None, Option(help="Of sampling, dice and demonstrations.")] = None,
    model: Annotated[str, Option(help="Endpoint: the model's name there; not needed if it has only one.")] = "",
    api_key_env: Annotated[str, Option(help="Endpoint: variable with the key; OPENAI_API_KEY if left out.")] = "",
    parallel: Annotated[int, Option(help="Endpoint: concurrent requests.")] = 16,
    timeout: Annotated[float, Option(help="Endpoint: seconds to wait for an answer.")] = 120.0,
    prompting: Annotated[str, Option(help="Prompting baseline around the policy: react, reflexion.")] = "none",
    shots: Annotated[int | None, Option(help="Prompting: worked examples before the task; 2 if left out.")] = None,
    trials: Annotated[int | None, Option(help="Reflexion: attempts per task at most; 3 if left out.")] = None,
    examples: Annotated[str, Option(help="Prompting: your own examples, JSON or TOML, instead of experts'.")] = "",
    out: Annotated[Path | None, Option(help="JSON file for the result; its episodes go beside it.")] = None,
    config: Annotated[str, Option(help="A preset or config.toml with the other settings.")] = "",
    set_: Annotated[list[str] | None, Option("--set", help="Any other setting, section.key=value.")] = None,
) -> None:
    """Success on a panel, in all and per kind of task, with 95 % Wilson intervals.

    Example: spear eval expert --env alfworld --split valid_seen --set rollout.max_turns=50
    """
    from spear_rl.app.build.prompting import PromptOptions
    from spear_rl.app.console import eval_progress, print_report
    from spear_rl.app.evaluate import EvalOptions, episodes_beside, evaluate_from

    prompts = PromptOptions(prompting, shots, trials, examples)  # type: ignore[arg-type]
    options = EvalOptions(split, tasks, episodes, samples, model, api_key_env, parallel, timeout, prompts)
    given = {"task.env": env or None, "eval.temperature": temperature, "eval.top_p": top_p, "run.seed": seed}
    overrides = [*(set_ or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    if out:
        check_writable(out, "--out")
    kept = episodes_beside(out) if out else None
    with eval_progress(console) as progress:
        report = evaluate_from(policy, overrides, options, source=config, notice=progress, episodes=kept)
    print_report(report, console)
    for note in report.notes:
        console.print(note, soft_wrap=True)
    if out:
        out.write_text(json.dumps(report.as_dict(), indent=1) + "\n", "utf-8")


@app.command()
def compare(
    runs: Annotated[list[Path], Argument(help="Run folders.")],
    out: Annotated[Path, Option(help="Folder of compare.png, .md and .json.")] = Path("runs/compare"),
) -> None:
    """Runs side by side, grouped by algorithm: mean and interval over seeds, paired differences, curves."""
    from spear_rl.app.compare import compare as comparison

    console.print(comparison(runs, out))


_SHOWN = "config, algorithm NAME, metrics [NAME], a preset, config.toml, run folder, or episodes that eval wrote."
_LIMIT = "Of a run: episodes to print, newest first; 1 below its metrics, 5 if some are chosen."


@app.command()
def show(
    what: Annotated[str, Argument(help=_SHOWN)] = "config",
    settings: Annotated[list[str] | None, Argument(metavar="[NAME] [SECTION.KEY=VALUE]...")] = None,
    failed: Annotated[bool, Option("--failed", help="Of a run: episodes that did not solve their task.")] = False,
    solved: Annotated[bool, Option("--solved", help="Of a run: episodes that did.")] = False,
    replayed: Annotated[bool, Option("--replayed", help="Of a run: what replay drew, with age, A and A'.")] = False,
    evaluated: Annotated[bool, Option("--eval", help="Of a run: episodes of its evaluations.")] = False,
    task: Annotated[str, Option(help="Of a run: task id, or whole words of it; * is any text.")] = "",
    step: Annotated[str, Option(help="Of a run: a step or a range, e.g. 40 or 30-50.")] = "",
    family: Annotated[str, Option(help="Of a run: kind of task.")] = "",
    split: Annotated[str, Option(help="Of a run: episodes of evaluations on this split.")] = "",
    limit: Annotated[int | None, Option("--limit", "--episodes", help=_LIMIT, callback=within(0, 1_000_000))] = None,
    full: Annotated[bool, Option("--full", help="Whole texts, however long.")] = False,
    as_json: Annotated[bool, Option("--json", help="Episodes as JSON, one per line.")] = False,
) -> None:
    """Settings and metrics with their meaning; what an algorithm or a preset is set to; a run and its episodes.

    Examples: spear show algorithm spear-dr-bot-grpo algorithm.imitation.max_age=10

    spear show metrics replay

    spear show runs/quickstart --failed --family pick_and_place_simple
    """
    from spear_rl.app.show import Selection, Words, shown

    selection = Selection.of(
        failed=failed, solved=solved, replayed=replayed, evaluated=evaluated, task=task, step=step, family=family,
        split=split, limit=limit,
    )  # fmt: skip
    words = Words(max(console.width, 60), full)
    console.print(shown(what, *source_and_settings(settings), selection, words, as_json=as_json), soft_wrap=True)


@app.command()
def view(
    runs: Annotated[Path, Argument(metavar="[RUNS_DIR]", help="A folder of runs, or one run.")] = Path("runs"),
    host: Annotated[
        str, Option(help="Address to listen at; any but the default needs the token in the address that is printed.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="0 takes a free one.", callback=within(0, 65_535))] = 8485,
) -> None:
    """Runs in a browser, live: curves side by side, episodes to filter, one episode turn by turn.

    Example: spear view runs
    """
    require_packages("jinja2", "pyarrow", "starlette", "uvicorn", extra="view")
    from spear_rl.app.show.view.server import ViewServer

    server = ViewServer(runs, host=host, port=port)
    console.print(f"the runs are shown at {server.address} (Ctrl+C ends it)", soft_wrap=True)
    server.serve()


@app.command()
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[Path, Option(help="HTML file to write.")] = Path("report.html"),
    step: Annotated[str, Option(help="Episodes of a step or a range, e.g. 40 or 30-50.")] = "",
    task: Annotated[str, Option(help="Episodes of tasks with this text in their id.")] = "",
    family: Annotated[str, Option(help="Episodes of this kind of task.")] = "",
    sort: Annotated[str, Option(help="Column to sort episodes by, - before it for descending.")] = "-step",
) -> None:
    """Runs as one HTML file that opens without a network: curves, episodes, some of them turn by turn.

    Example: spear report runs/quickstart runs/base --out report.html
    """
    require_packages("jinja2", "pyarrow", "starlette", "uvicorn", extra="view")
    from spear_rl.app.show.view.report import write_report

    check_writable(out, "--out")
    written = write_report(runs, out, {"step": step, "task": task, "family": family, "sort": sort})
    console.print(f"the report is in {written}", soft_wrap=True)
