"""Runs commands of the command line in forked children, each with one fault; see test_faults.py.

Everything is imported once. A line of JSON on standard input is a command, a line on standard output its outcome.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import traceback

import tensorboard.compat.proto.event_pb2
import tensorboard.summary.writer.record_writer  # noqa: F401
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXForCausalLM  # noqa: F401

from spear_rl import cli


def child(command: dict, output: str, counter: int) -> None:
    """Run one command with the shim armed; never returns."""
    handle = os.open(output, os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    shim = ctypes.CDLL(None)
    shim.fault_count.restype = ctypes.c_long
    sys.argv = ["spear", *command["arguments"]]
    code = 1
    shim.fault_arm(
        command["folder"].encode(),
        ctypes.c_long(command.get("at", 0)),
        command.get("error", 0),
        command.get("stays", 0),
    )
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(counter, str(shim.fault_count()).encode())
    os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        with tempfile.NamedTemporaryFile() as output:
            reading, writing = os.pipe()
            process = os.fork()
            if not process:
                child(json.loads(line), output.name, writing)
            os.close(writing)
            _, status = os.waitpid(process, 0)
            count = os.read(reading, 32)
            os.close(reading)
            said = output.read().decode(errors="replace")
        outcome = {"code": os.waitstatus_to_exitcode(status), "count": int(count or 0), "text": said}
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
