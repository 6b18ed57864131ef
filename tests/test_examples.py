"""The worked examples run as they are written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def success_of(*options: str) -> list[float]:
    """The success rates that the one-file example prints."""
    command = [sys.executable, str(EXAMPLES / "minimal_spear.py"), *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return [float(rate) for rate in re.findall(r"^step +\d+ +success ([\d.]+)", run.stdout, re.MULTILINE)]


@pytest.mark.slow
def test_spear_in_one_file_learns_and_rises_before_its_base():
    with_spear, base = success_of("--seed", "3"), success_of("--seed", "3", "--base")
    assert with_spear[0] < 0.1
    assert base[0] < 0.1
    assert with_spear[-1] > 0.8
    assert sum(with_spear) > sum(base)


def test_spear_in_one_file_repeats_itself_from_its_seed_and_reports_ten_times():
    first, again = (success_of("--seed", "1", "--steps", "20") for _ in range(2))
    assert first == again
    assert len(first) == 10


def test_the_one_file_example_stays_short_and_needs_the_core_alone():
    text = (EXAMPLES / "minimal_spear.py").read_text("utf-8")
    assert len(text.splitlines()) < 250
    used = set(re.findall(r"^from (spear_rl\S*) import", text, re.MULTILINE))
    assert used == {"spear_rl.functional", "spear_rl.replay", "spear_rl.algorithms"}
    assert "transformers" not in text
