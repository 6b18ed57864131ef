"""What the commands share: the application, the console, and how settings are read."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any

from spear_rl.app.config import Config, flat, load, presets
from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.settings.fields import meant
from spear_rl.settings.names import ALGORITHM_NAMES
from spear_rl.settings.ranges import Range, checked

try:
    import typer
    from typer import Argument

    from spear_rl.io.terminal import PlainConsole
except ImportError:
    print("error: the command line needs its extra: pip install 'spear-rl[train]'", file=sys.stderr)
    sys.exit(2)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="SPEAR: self-imitation learning with progressive exploration for LLM agents.",
)
console = PlainConsole()


def within(low: int, high: int) -> Callable[[typer.CallbackParam, int | None], Any]:
    """A range for an option, with the same error messages as for settings; one that is left out may be None."""

    def check(param: typer.CallbackParam, value: int | None) -> Any:
        return None if value is None else checked(value, Annotated[int, Range(low, high)], param.opts[0])

    return check


Options = Annotated[
    list[str] | None, Argument(metavar="[OPTION=VALUE]...", help="Options of the environment, e.g. level=easy.")
]
_SETTINGS = "[PRESET|CONFIG.TOML] [SECTION.KEY=VALUE]..."


def _completions(incomplete: str) -> list[str]:
    """What a shell offers for a setting that is being typed."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={name}" for name in ALGORITHM_NAMES] if key == "algorithm.name" else []
    return [word for word in (*presets(), *(f"{name}=" for name in flat(Config()))) if word.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    Argument(metavar=_SETTINGS, help="Settings; `spear show config` lists all.", autocompletion=_completions),
]
SETTINGS_ONLY = {"ignore_unknown_options": True}
"""Words like --seed reach `source_and_settings`, which says how a setting is written."""


def source_and_settings(settings: list[str] | None) -> tuple[str | None, list[str]]:
    """The preset or file, if one is named, and the overrides."""
    if flag := next((s for s in settings or [] if s.startswith("-")), None):
        name = flag.lstrip("-").partition("=")[0]
        hint = meant(name, list(flat(Config()))) or ", e.g. run.seed=1"
        raise ConfigError(f"there is no option {flag}: settings are written section.key=value{hint}")
    sources = [s for s in settings or [] if "=" not in s]
    if len(sources) > 1:
        raise ConfigError(f"name one preset or file, not {len(sources)}: {', '.join(sources)}")
    return (sources[0] if sources else None), [s for s in settings or [] if "=" in s]


def require_packages(*names: str, extra: str) -> None:
    """Raise MissingExtraError, which names the extra, if one of the packages is not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise MissingExtraError(f"{missing[0]} is not installed: pip install 'spear-rl[{extra}]'")


def task_options(options: list[str] | None) -> dict[str, Any]:
    return load(None, [f"task.options.{option}" for option in options or []]).task.options
