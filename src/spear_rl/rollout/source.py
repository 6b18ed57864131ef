"""Tasks by name: `package.module:function`. Says clearly what is wrong with a name that leads nowhere."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from spear_rl.errors import ConfigError
from spear_rl.rollout.env import TasksFn


def loaded_tasks(name: str) -> TasksFn:
    """The function that `name` ("package.module:function") names; modules are also looked for in the current folder."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"{name!r} names no environment: write package.module:function, e.g. my_game:tasks")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{name}: there is no module {error.name}, neither installed nor in this folder"
            ) from error
        raise ConfigError(f"{name}: importing {module_name} needs {error.name}, which is not installed") from error
    except Exception as error:
        raise ConfigError(f"{name}: importing {module_name} raised {type(error).__name__}: {error}") from error
    if not hasattr(module, function_name):
        raise ConfigError(f"{name}: the module {module_name} has no {function_name}")
    function = getattr(module, function_name)
    if not callable(function):
        raise ConfigError(f"{name}: {function_name} is no function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]
