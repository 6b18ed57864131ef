"""Train in tmux at 80x24 and 160x50 and put what the terminal shows into docs/console.md.

python docs/tools/console_captures.py [SECTION.KEY=VALUE]...

Needs tmux and the `spear` of this interpreter. Settings are added to those of a quickstart of 20 steps.
"""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).parents[1] / "console.md"
SIZES = ((80, 24), (160, 50))
SHORT = ["run.steps=20", "eval.tasks=60", "eval.every=10"]
MARKS = {"cold_start": " left loss ", "training": "mean of 9", "end": "look further:"}
"""Phase -> what the screen shows first in it."""


def captured(width: int, height: int, settings: list[str]) -> dict[str, str]:
    """The screen in each phase of one training."""
    name = f"spear-{width}x{height}"
    tmux = ["tmux", "-L", name]
    with tempfile.TemporaryDirectory() as folder:
        command = shlex.join([sys.executable, "-m", "spear_rl.cli", "train", "quickstart", *SHORT, *settings])
        shell = f"cd {shlex.quote(folder)} && PS1='$ ' exec bash --norc --noprofile"
        subprocess.run([*tmux, "new-session", "-d", "-s", name, "-x", str(width), "-y", str(height), shell], check=True)
        screens: dict[str, str] = {}
        try:
            subprocess.run([*tmux, "send-keys", "-t", name, f"clear; {command}", "Enter"], check=True)
            for phase, mark in MARKS.items():
                deadline = time.monotonic() + 1800
                while mark not in (screen := _screen(tmux, name)):
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{phase} never came; the screen shows:\n{screen}")
                    time.sleep(0.3)
                time.sleep(5)
                screens[phase] = _screen(tmux, name)
        finally:
            subprocess.run([*tmux, "kill-server"], check=False)
    return screens


def _screen(tmux: list[str], name: str) -> str:
    shown = subprocess.run([*tmux, "capture-pane", "-p", "-t", name], check=True, capture_output=True, text=True)
    return shown.stdout.rstrip() + "\n"


def put(page: str, name: str, screen: str) -> str:
    """The page with another screen in the block under the comment that names it."""
    block = re.compile(rf"(<!-- screen: {name} -->\n\n```text\n).*?(```\n)", re.DOTALL)
    return block.sub(lambda match: match[1] + screen + match[2], page)


if __name__ == "__main__":
    for width, height in SIZES:
        for phase, screen in captured(width, height, sys.argv[1:]).items():
            PAGE.write_text(put(PAGE.read_text("utf-8"), f"{width}x{height} {phase}", screen), "utf-8")
