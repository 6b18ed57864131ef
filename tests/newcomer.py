"""Plays a newcomer: saves every file and types every command of README and tutorial, in order, and checks outcomes.

    python tests/newcomer.py            # a new clone, a new virtual environment, every command as it stands
    python tests/newcomer.py --short    # the same commands, short trainings, in the virtual environment that is there

A command must end with exit code 0 unless `EXPECTED` says otherwise. An expectation that no command meets is an error.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/tutorial.md")
SHORT = "run.steps=2 sft.episodes=24 sft.epochs=1 eval.tasks=8"
"""What --short adds to every training."""


@dataclass
class Outcome:
    """What a command left behind."""

    folder: Path
    code: int
    text: str
    is_short: bool

    def require(self, is_so: object, sentence: str) -> None:
        if not is_so:
            raise SystemExit(f"newcomer: {sentence}\n{self.text[-3000:]}")


def fine(outcome: Outcome) -> None:
    outcome.require(outcome.code == 0, f"exit code {outcome.code}, not 0")


def refused(sentence: str) -> Callable[[Outcome], None]:
    def check(outcome: Outcome) -> None:
        outcome.require(outcome.code == 2, f"exit code {outcome.code}, not 2")
        outcome.require(sentence in outcome.text, f"does not say {sentence!r}")
        outcome.require("Traceback" not in outcome.text, "a traceback")

    return check


def says(*sentences: str) -> Callable[[Outcome], None]:
    def check(outcome: Outcome) -> None:
        fine(outcome)
        for sentence in sentences:
            outcome.require(sentence in outcome.text, f"does not say {sentence!r}")

    return check


def learned(run: str, factor: float) -> Callable[[Outcome], None]:
    """Held-out success has grown to at least `factor` times its start; in a short run: was measured."""

    def check(outcome: Outcome) -> None:
        fine(outcome)
        summary = json.loads((outcome.folder / run / "summary.json").read_text())
        before, after = summary["success_before"]["success"], summary["success_after"]["success"]
        print(f"    held-out success {before:.3f} -> {after:.3f}")
        outcome.require(outcome.is_short or after >= factor * before, f"{run}: success {before:.3f} -> {after:.3f}")

    return check


def wrote(*paths: str) -> Callable[[Outcome], None]:
    def check(outcome: Outcome) -> None:
        fine(outcome)
        for path in paths:
            outcome.require((outcome.folder / path).stat().st_size > 0, f"{path} is empty")

    return check


SKIPPED = {
    r"make test\b": "it is the test suite itself",
}
"""Command -> why it is not typed."""

EXPECTED: dict[str, Callable[[Outcome], None]] = {
    r"make quickstart": learned("runs/quickstart", 2.0),
    r"pip install": says("quickstart"),
    r"spear train quickstart run\.dir=runs/mine ": learned("runs/mine", 1.5),
    r"spear train quickstart run\.dir=runs/base ": learned("runs/base", 1.5),
    r"spear compare runs/mine runs/base": wrote("runs/compare/compare.png", "runs/compare/compare.md"),
    r"spear eval runs/mine": says("all"),
    r"spear eval expert --env household": says("all"),
    r"spear show config": says("[run]", "seed = 0"),
    r"spear show algorithm": says("clip_low"),
    r"spear list": says("quickstart", "household"),
    r"spear show metrics": says("replay/age"),
    r"spear init environment my_game": wrote("my_game.py"),
    r"spear check-env my_game": says("no fault found"),
    r"spear train tiny task\.env=my_game:tasks": learned("runs/own", 2.0),
    r"spear verl paper-alfworld engine\.model=FOLDER": refused("is no folder"),
    r"spear check-env drawers": says("no fault found"),
    r"spear eval expert --env drawers": says("all"),
    r"spear train drawers\.toml run\.dir=runs/drawers-0": learned("runs/drawers-0", 1.2),
    r"spear compare runs/drawers-0": wrote("runs/compare/compare.png"),
    r"spear show runs/drawers-0": says("drawers/train/"),
}
"""Beginning of a command -> what it must do, beyond ending well."""


def steps_of(page: str) -> Iterator[tuple[str, str]]:
    """("save", "NAME\\0TEXT") and ("type", command), in the order of the page."""
    text = (ROOT / page).read_text("utf-8")
    for found in re.finditer(r"(?ms)^```(\w+)\n(.*?)^```", text):
        language, body = found.groups()
        if language == "sh":
            for line in body.replace("\\\n", " ").splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    yield "type", line.strip()
        elif name := re.findall(r"[Ss]ave this as\s+`([\w./]+)`", text[: found.start()][-400:]):
            yield "save", f"{name[-1]}\0{body}"


def typed(command: str, folder: Path, before: list[str], *, is_short: bool, bin_folder: Path | None) -> Outcome:
    """Run a line in bash, after the lines that change the shell itself (activate)."""
    words = command.split("#")[0].strip()
    if is_short and words == "make quickstart":
        words = "spear train quickstart"
    if is_short and re.match(r"spear (train|sft) (?!run\.dir=)", words):
        words += f" {SHORT}"
    if words.startswith("pip install"):  # "an environment of yours"; the constraints spare a download of CUDA
        own = folder.parent / "own"
        pip = f"PIP_CONSTRAINT={folder}/constraints.txt {own}/bin/{words}"
        words = f"python3 -m venv {own} && {pip} && {own}/bin/spear list"
        words = words.replace("git+URL", f"git+file://localhost{folder}")
    if words.startswith(("spear shop", "spear view")):
        return _served(words, folder, before, bin_folder)
    script = "\n".join([*before, words])
    env = os.environ | {"COLUMNS": "100"} | ({"PATH": f"{bin_folder}:{os.environ['PATH']}"} if bin_folder else {})
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, text=True, capture_output=True)
    return Outcome(folder, done.returncode, done.stdout + done.stderr, is_short)


def _served(words: str, folder: Path, before: list[str], bin_folder: Path | None) -> Outcome:
    """A server is there when it answers; then it is closed as a person does, with Ctrl-C."""
    env = os.environ | ({"PATH": f"{bin_folder}:{os.environ['PATH']}"} if bin_folder else {})
    script = "\n".join([*before, f"exec {words} --port 0"])
    server = subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    address = re.search(r"http://\S+", line)
    page = urllib.request.urlopen(address.group(), timeout=60).read().decode() if address else ""
    server.send_signal(signal.SIGINT)
    text = line + server.communicate(timeout=60)[0]
    return Outcome(folder, server.returncode if "<html" in page.lower() else 1, text, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="short trainings, no clone, no installation")
    is_short = parser.parse_args().short
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told us to ignore it
    met: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as temporary:
        folder = Path(temporary) / "spear_rl"
        bin_folder = None
        if is_short:
            folder.mkdir()
            shutil.copytree(ROOT / "experiments", folder / "experiments")
            bin_folder = Path(sys.executable).parent
        else:
            subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        before: list[str] = []
        for page in PAGES:
            for kind, what in steps_of(page):
                if kind == "save":
                    name, _, text = what.partition("\0")
                    (folder / name).write_text(text, "utf-8")
                    continue
                skipped = next((why for start, why in SKIPPED.items() if re.match(start, what)), "")
                if is_short and what.startswith("pip install"):
                    skipped = skipped or "short: nothing is installed"
                if re.match(r"\. ", what):
                    before += [] if is_short else [what.split("#")[0]]
                    continue
                if page == PAGES[1] and what.startswith("make quickstart"):
                    skipped = "typed already"
                print(
                    f"{page}: {what.split('#')[0].strip()}{f'   (not typed: {skipped})' if skipped else ''}", flush=True
                )
                expected = [start for start in EXPECTED if re.match(start, what)]
                met |= set(expected)
                if skipped:
                    continue
                begin = time.monotonic()
                outcome = typed(what, folder, before, is_short=is_short, bin_folder=bin_folder)
                for check in [EXPECTED[start] for start in expected] or [fine]:
                    check(outcome)
                print(f"    fine, {time.monotonic() - begin:.0f} s", flush=True)
        if stale := EXPECTED.keys() - met:
            raise SystemExit(f"newcomer: no command begins with {', '.join(sorted(stale))}")
        shutil.rmtree(folder, ignore_errors=True)
    print("newcomer: all is as README and tutorial say")


if __name__ == "__main__":
    main()
