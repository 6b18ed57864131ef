"""Runs commands of the command line in forked children and sends them signals; see test_stopping.py.

Everything is imported once. A line of JSON on standard input is a command, a line on standard output its outcome.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback

import tensorboard.compat.proto.event_pb2
import tensorboard.summary.writer.record_writer  # noqa: F401
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXForCausalLM  # noqa: F401

from spear_rl import cli


def child(arguments: list[str], output: str) -> None:
    """Run one command; never returns."""
    handle = os.open(output, os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.argv = ["spear", *arguments]
    code = 1
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_running(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def catches_signals(process: int) -> bool:
    """Whether a process has a handler for SIGTERM; before that, a signal ends any program."""
    with open(f"/proc/{process}/status") as status:
        caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def main() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        command, start = json.loads(line), time.monotonic()
        with tempfile.NamedTemporaryFile() as output:
            process = os.fork()
            if not process:
                child(command["arguments"], output.name)
            while command["signals"] and not catches_signals(process) and is_running(process):
                time.sleep(0.005)
            begun = time.monotonic()
            for after, number in command["signals"]:
                time.sleep(max(begun + after - time.monotonic(), 0))
                if is_running(process):
                    os.kill(process, number)
            _, status = os.waitpid(process, 0)
            said = output.read().decode(errors="replace")
        seconds = time.monotonic() - start
        print(json.dumps({"code": os.waitstatus_to_exitcode(status), "seconds": seconds, "text": said}), flush=True)


if __name__ == "__main__":
    main()
