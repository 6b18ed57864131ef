"""The command line. An error that the user can fix is one sentence and exit code 2."""

import os
import sys
import warnings
from typing import Annotated

from spear_rl import __version__
from spear_rl.cli.shared import app, console  # first: it says which packages are missing

from spear_rl.cli import train, experiment, look, tools  # in the order of the help  # isort: skip
from spear_rl.errors import UserError
from spear_rl.io.escaping import indented
from spear_rl.io.terminal import error_console, log_to_stderr, protect_stderr

import typer  # isort: skip
from typer import Option  # isort: skip

__all__ = ["app", "console", "experiment", "look", "main", "tools", "train"]

_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "TRANSFORMERS_VERBOSITY": "error"}
"""For this process and its workers, unless the user has set them; read when torch and transformers are loaded.

Threads that wait sleep instead of spinning, which on a busy machine takes the time of those they wait for.
"""


def _version(value: bool) -> None:
    if value:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    log_to_stderr()


def main() -> None:
    """Run the command line; user errors become one sentence and exit code 2."""
    protect_stderr()
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", module=r"transformers(\.|$)")
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
