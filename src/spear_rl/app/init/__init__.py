"""`spear init`: starting files for an environment, an algorithm or a run's settings, which train as they are."""

import keyword
import os
import sys
from importlib import resources
from importlib.machinery import PathFinder
from pathlib import Path

from spear_rl.errors import ConfigError
from spear_rl.io.files import writing
from spear_rl.settings.ranges import nearest, shown

_NAME = "my_game"
"""Stands in the templates for the name that the user gives."""

_NEXT = {
    "environment": {
        "spear check-env {name}:tasks": "what is wrong with it: nothing yet",
        "spear train tiny task.env={name}:tasks run.dir=runs/{name}": "a learning curve in a minute or two",
        "spear show runs/{name}": "what its episodes look like",
    },
    "algorithm": {
        "spear show algorithm spear-{name}:algorithm": "every field with its value",
        "spear train lookup algorithm.name={name}:algorithm run.dir=runs/{name}": "alone",
        "spear train lookup algorithm.name=spear-{name}:algorithm run.dir=runs/spear-{name}": "with SPEAR",
    },
    "plan": {
        "spear train {name}.toml": "settings on the command line win over the file's",
        "spear show {name}.toml": "every setting, also those at their defaults",
    },
}
"""Kind of file -> command to go on with -> what it does."""


def begin(kind: str, name: str) -> str:
    """Write a starting file into the current folder; returns what was written and the commands to go on with."""
    if kind not in _NEXT:
        raise ConfigError(f"init cannot begin {shown(kind)}{nearest(kind, _NEXT)}; it is one of: {', '.join(_NEXT)}")
    suffix = ".toml" if kind == "plan" else ".py"
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        rule = "use letters, digits and _, beginning with a letter, and no word of Python's own, e.g. my_game"
        raise ConfigError(f"init: the name cannot be {shown(name)}: {rule}")
    path = Path(name + suffix)
    if os.path.lexists(path):
        raise ConfigError(f"init: {path} exists already: choose another name, or move it away")
    text = (resources.files(__package__) / (kind + suffix)).read_text("utf-8").replace(_NAME, name)
    with writing(path):
        if suffix == ".py" and _is_taken(name):
            raise ConfigError(f"init: Python already has a module {name}, which {path} would hide: choose another name")
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    commands = {command.format(name=name): meaning for command, meaning in _NEXT[kind].items()}
    width = max(map(len, commands))
    lines = (f"  {command:{width}}  # {meaning}" for command, meaning in commands.items())
    return "\n".join([f"wrote {path}: it works as it is, change it to yours. Next:", *lines])


def _is_taken(name: str) -> bool:
    if name in sys.stdlib_module_names or name in sys.builtin_module_names:
        return True
    spec = PathFinder.find_spec(name, [os.getcwd(), *sys.path])
    return spec is not None and spec.origin is not None  # a plain folder of that name is no module
