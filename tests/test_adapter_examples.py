"""The examples of docs/adapters.md, as they stand there: their files and one training step of their commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "adapters.md").read_text(encoding="utf-8")
SHORT = (
    "engine.model=tiny-xs sft.episodes=8 sft.epochs=1 rollout.num_tasks=1 rollout.group_size=2 rollout.max_turns=4 "
    "eval.tasks=4 run.steps=1 run.trackers='[\"jsonl\"]'"
)
NEEDED = {
    "Gymnasium": ["gymnasium"],
    "TextArena": ["textarena"],
    "OpenEnv": ["openenv", "gymnasium"],
    "verifiers": ["verifiers.v1", "textarena", "english_words"],
}


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.slow
@pytest.mark.parametrize("title", NEEDED)
def test_the_example_of_an_adapter_trains_as_it_is_written(title, tmp_path):
    for package in NEEDED[title]:
        pytest.importorskip(package)
    for before, code in re.findall(r"(.*?)```python\n(.*?)```", section(title), re.DOTALL):
        (tmp_path / re.findall(r"`(my_\w+\.py)`", before)[-1]).write_text(code)
    lines = [
        line for block in re.findall(r"```bash\n(.*?)```", section(title), re.DOTALL) for line in block.split("\n")
    ]
    wanted = [line for line in lines if not line.startswith(("pip ", "spear check-env"))]
    assert any(line.startswith("spear train ") for line in wanted)
    script = re.sub(r"(?m)^spear (.*)$", rf"spear \1 {SHORT}", "\n".join(wanted))
    source = Path(__file__).parents[1] / "src"
    functions = f'python() {{ "{sys.executable}" "$@"; }}\nspear() {{ python -m spear_rl.cli "$@"; }}\n'
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(source)}
    env.pop("NLTK_DATA", None)
    done = subprocess.run(
        ["bash", "-e", "-c", functions + script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    runs = list(tmp_path.glob("runs/*/metrics.jsonl"))
    assert len(runs) == sum(line.startswith("spear train ") for line in wanted)
    assert all(json.loads(run.read_text())["rollout/episodes"] == 2 for run in runs)
