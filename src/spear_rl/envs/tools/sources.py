"""Where tools come from, each a word that one can type.

my_module:add            a typed function, a list of them, or a class: one object per episode, its public methods
sandbox                  a Python interpreter, isolated (`spear_rl.sandbox`)
search:corpus.jsonl      BM25 over passages, one JSON object per line with `text` and, if there is one, `title`
mcp:COMMAND, mcp:URL     a server of the Model Context Protocol: a command to start, or an http address
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from spear_rl.envs.tools.functions import Tool, tool_of
from spear_rl.errors import ConfigError, OptionError
from spear_rl.sandbox import Limits, Session
from spear_rl.settings.names import loaded, look_in_current_folder

Opened = AbstractContextManager[Sequence[Tool]]


def described_tools(names: Sequence[str]) -> tuple[Tool, ...]:
    """All tools of the sources, for the instructions; OptionError where one cannot be had."""
    tools = [tool for name in names for tool in _source(name)[0]]
    seen = [tool.name for tool in tools]
    if twice := next((name for name in seen if seen.count(name) > 1), None):
        raise OptionError(f"tools: there are two tools named {twice}: rename one")
    if not tools:
        raise OptionError("tools names no tool: give tools=my_module:functions, sandbox, search:FILE or mcp:COMMAND")
    return tuple(tools)


@contextmanager
def opened_tools(names: Sequence[str]) -> Iterator[dict[str, Tool]]:
    """Name -> tool for one episode."""
    with ExitStack() as stack:
        yield {tool.name: tool for name in names for tool in stack.enter_context(_source(name)[1]())}


@lru_cache(maxsize=64)
def _source(name: str) -> tuple[tuple[Tool, ...], Callable[[], Opened]]:
    """(the tools of a source, what opens them for one episode)."""
    prefix, _, rest = name.partition(":")
    if name == "sandbox":
        return (_interpreter_tool(_no_session),), _sandbox
    if prefix == "search":
        from spear_rl.envs.tools.search import search_tool

        found = (search_tool(rest),)
        return found, lambda: nullcontext(found)
    if prefix == "mcp":
        from spear_rl.envs.tools.mcp import server_tools

        served = server_tools(rest)
        return served, lambda: nullcontext(served)
    value = _loaded(name)
    if isinstance(value, type):
        try:
            inspect.signature(value).bind()
        except TypeError as error:
            raise OptionError(f"tools: an object of {name} is made without arguments ({error})") from error
        return tuple(_methods(value, None)), lambda: nullcontext(_methods(value, value()))
    functions = tuple(tool_of(function) for function in (value if isinstance(value, list | tuple) else [value]))
    return functions, lambda: nullcontext(functions)


def _loaded(name: str) -> Any:
    """What `module:attribute` names: a function, a class, or a list of functions."""
    module, _, attribute = name.partition(":")
    look_in_current_folder()
    try:
        with suppress(Exception):  # `loaded` says what is wrong
            value = getattr(import_module(module), attribute)
            if isinstance(value, list | tuple) and all(callable(entry) for entry in value):
                return value
        return loaded(name, kind="tool", example="my_tools:functions")
    except ConfigError as error:
        raise OptionError(f"tools: {error}") from error


def _methods(kind: type, instance: Any) -> list[Tool]:
    """The public methods of a class as tools; bound to `instance` where there is one."""
    tools = []
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            tool = tool_of(method.__get__(object.__new__(kind) if instance is None else instance))
            tools.append(tool if instance is not None else replace(tool, run=_no_session))
    return tools


@contextmanager
def _sandbox() -> Iterator[Sequence[Tool]]:
    from spear_rl.envs.tool_math import open_session

    with ExitStack() as stack:
        sessions: list[Session] = []

        def run(code: str) -> str:
            if not sessions:  # at the first call: most episodes need none
                sessions.append(stack.enter_context(open_session(Limits(), "auto")))
            result = sessions[0].run(code)
            return "\n".join(filter(None, (result.stdout.strip("\n"), result.error))) or "(no output)"

        yield [_interpreter_tool(run)]


def _interpreter_tool(run: Callable[..., str]) -> Tool:
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    return Tool(
        "python", "Runs Python code and returns what it prints. Variables stay for later calls.", parameters, run
    )


def _no_session(*_: Any, **__: Any) -> str:
    raise RuntimeError("no episode is under way")
