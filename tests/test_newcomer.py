"""README and tutorial, command by command, with short trainings; `make test-newcomer` plays them whole."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_every_command_of_readme_and_tutorial_does_what_the_page_says():
    done = subprocess.run(
        [sys.executable, "tests/newcomer.py", "--short"], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
