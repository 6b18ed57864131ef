"""Names of algorithms, and loading of `package.module:function`. Never imports torch."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from spear_rl.errors import ConfigError, OptionError
from spear_rl.io.escaping import clipped, in_words
from spear_rl.io.files import same_folder

BASES = {
    "grpo": "spear_rl.algorithms.grpo:grpo",
    "dr-grpo": "spear_rl.algorithms.grpo:dr_grpo",
    "rloo": "spear_rl.algorithms.grpo:rloo",
    "gigpo": "spear_rl.algorithms.gigpo:gigpo",
    "hgpo": "spear_rl.algorithms.step_credit:hgpo",
    "graphgpo": "spear_rl.algorithms.step_credit:graphgpo",
    "g2po": "spear_rl.algorithms.step_credit:g2po",
    "ppo": "spear_rl.algorithms.ppo:ppo",
}
"""The base algorithms, named as users name their own. A new algorithm is a file and a line here."""

WRAPPERS = ("spear", "dr-bot")
"""In the order of a name: spear-dr-bot-grpo is spear(dr_bot(grpo()))."""

ALGORITHM_NAMES = [f"{spear}{dr_bot}{base}" for spear in ("", "spear-") for dr_bot in ("", "dr-bot-") for base in BASES]


def split_name(name: str) -> tuple[list[str], str]:
    """The wrappers that an algorithm's name begins with, outermost first, and its base."""
    wrappers = []
    for wrapper in WRAPPERS:
        if name.startswith(f"{wrapper}-"):
            wrappers.append(wrapper)
            name = name.removeprefix(f"{wrapper}-")
    return wrappers, name


def look_in_current_folder() -> None:
    """Let modules of the current folder be imported."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def loaded(name: str, *, kind: str, example: str) -> Any:
    """The function that `name` ("package.module:function") names; modules are also looked for in the current folder."""
    module_name, colon, function_name = name.partition(":")
    name = clipped(name, 200)
    if not (module_name and colon and function_name):
        raise ConfigError(f"{name!r} names no {kind}: write package.module:function, e.g. {example}")
    look_in_current_folder()
    try:
        with same_folder():
            module = import_module(module_name)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        fault = f"importing {clipped(module_name, 200)} needs {error.name}, which is not installed"
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            fault = f"there is no module {clipped(error.name, 200)}, neither installed nor in this folder"
        raise ConfigError(f"{name}: {fault}") from error
    except BaseException as error:  # also SystemExit, which would end the run as if all were well
        raise ConfigError(f"{name}: importing {module_name} raised {in_words(error)}") from error
    if not hasattr(module, function_name):
        raise ConfigError(f"{name}: the module {module_name} has no {function_name}")
    function = getattr(module, function_name)
    if not callable(function):
        raise ConfigError(f"{name}: {function_name} is no function but {type(function).__name__}")
    return function


def option_function(name: str, option: str) -> Callable[..., Any]:
    """The function that an environment's option names as module:function."""
    try:
        function: Callable[..., Any] = loaded(name, kind="function", example="my_module:function")
    except ConfigError as error:
        raise OptionError(f"{option}: {error}") from error
    return function
