"""Tools of a Model Context Protocol server, by the official `mcp` package: one session per process and server."""

import asyncio
import os
import shlex
import tempfile
import threading
from concurrent.futures import Future
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from spear_rl.envs.tools.env import ServerLostError
from spear_rl.envs.tools.functions import Tool
from spear_rl.errors import MissingExtraError, OptionError
from spear_rl.io.escaping import clipped, in_words

START_SECONDS, CALL_SECONDS = 60.0, 60.0
_LOST = (-32000, -32001)
"""Codes of errors that are no answer: the connection is closed, and no answer in time."""


def server_tools(spec: str) -> tuple[Tool, ...]:
    """The tools of the server that a command starts or an address names."""
    if not spec.strip():
        raise OptionError("tools: mcp: needs a command or an address, as in mcp:python server.py")
    try:
        served = _server(os.getpid(), spec).listed()
    except ServerLostError as error:
        raise OptionError(f"tools: {error}") from error
    return tuple(
        Tool(tool.name, tool.description or "", tool.input_schema, partial(_call, spec, tool.name)) for tool in served
    )


def _call(spec: str, name: str, /, **arguments: Any) -> str:
    return _server(os.getpid(), spec).call(name, arguments)


@lru_cache(maxsize=16)
def _server(pid: int, spec: str) -> "_Server":
    """By process: a fork cannot use its parent's."""
    return _Server(spec)


class _Server:
    """A session in a thread of its own; a server that has died is started again by the next call."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._mcp = _package("mcp")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"mcp {spec[:40]}", daemon=True).start()
        self._lock = threading.Lock()
        self._client: Any = None
        self._session_task: Future[None] = Future()
        self._log: Any = None

    def listed(self) -> list[Any]:
        return list(self._run(lambda client: client.list_tools()).tools)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        result = self._run(lambda client: client.call_tool(name, arguments, read_timeout_seconds=CALL_SECONDS))
        texts = [part.text if part.type == "text" else f"({part.type})" for part in result.content]
        if not texts and result.structured_content is not None:
            texts = [str(result.structured_content)]
        return f"{'Error: ' if result.is_error else ''}{chr(10).join(texts)}"

    def _run(self, request: Any) -> Any:
        with self._lock:
            if self._client is None:
                self._start()
            client = self._client
        try:
            return asyncio.run_coroutine_threadsafe(request(client), self._loop).result(CALL_SECONDS + 5)
        except Exception as error:
            code = getattr(getattr(error, "error", None), "code", None)
            if isinstance(error, self._mcp.MCPError) and code not in _LOST:
                raise RuntimeError(str(error)) from error  # the server answers, and refuses
            self._end(client)
            raise ServerLostError(self._lost(TimeoutError() if code == _LOST[1] else error)) from error

    def _end(self, client: Any) -> None:
        """Ends a session that is lost, with its process; the next call starts another."""
        with self._lock:
            if self._client is client:
                self._client = None
                self._session_task.cancel()

    def _start(self) -> None:
        started: Future[Any] = Future()
        self._session_task = asyncio.run_coroutine_threadsafe(self._session(started), self._loop)
        try:
            self._client = started.result(START_SECONDS)
        except Exception as error:
            self._session_task.cancel()
            raise ServerLostError(self._lost(error)) from error

    async def _session(self, started: "Future[Any]") -> None:
        """Opens the connection and keeps it until the server goes, in one task, as its context asks."""
        client: Any = None
        try:
            async with self._mcp.Client(self._transport()) as client:
                started.set_result(client)
                await asyncio.Event().wait()
        except BaseException as error:
            if self._client is client:  # not the one that has followed it
                self._client = None
            if not started.done():
                started.set_exception(RuntimeError(in_words(_first(error))))

    def _transport(self) -> Any:
        if self._spec.startswith(("http://", "https://")):
            return self._spec
        command, *arguments = shlex.split(self._spec)
        parameters = self._mcp.StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (as long as the server)
        return self._mcp.stdio_client(parameters, errlog=self._log)

    def _lost(self, error: BaseException) -> str:
        said = ""
        if self._log is not None:
            self._log.seek(0, os.SEEK_END)
            self._log.seek(max(self._log.tell() - 2000, 0))
            said = next((line for line in reversed(self._log.read().splitlines()) if line.strip()), "")
        why = in_words(_first(error)) if not isinstance(error, TimeoutError) else f"no answer in {CALL_SECONDS:.0f} s"
        told = f"; it says: {clipped(said, 200)}" if said else ""
        return f"the MCP server `{self._spec}` does not answer ({clipped(why, 200)}{told})"


def _first(error: BaseException) -> BaseException:
    """The first plain exception of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"an MCP server as a tool needs {error.name}: pip install 'spear-rl[mcp]'") from error
