"""The messages between the interpreter, the fork server and its children. Nothing is ever unpickled."""

import os
import select
import struct

HEADER = struct.Struct(">cI")
"""Between the interpreter and a child: kind and payload length."""
COMMAND = struct.Struct(">cIi")
"""From the interpreter to the server: command, child, number."""
ANSWER = struct.Struct(">Ii")
"""From the server: child, and a number (0, a wait status or an errno)."""

# To a child, and from it.
SEED, CELL = b"s", b"c"
READY, BROKEN, DONE, RAISED, OUT_OF_MEMORY = b"r", b"b", b"d", b"e", b"m"
# To the server. TAKE returns four descriptors: code in, reply out, stdout, stderr. END is answered once the child is
# gone. FORGET, for a child that did nothing wrong, is not answered.
TAKE, SIGNAL, END, FORGET = b"t", b"k", b"x", b"f"
NUM_DESCRIPTORS = 4


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(payload)) + payload


def is_readable(descriptor: int, seconds: float) -> bool:
    """Whether there is data or an end of file within that time. (`select` fails beyond descriptor 1023.)"""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


def read_exactly(descriptor: int, num_bytes: int) -> bytes:
    """Read from a blocking descriptor; EOFError if it ends early."""
    out = b""
    while len(out) < num_bytes:
        chunk = os.read(descriptor, num_bytes - len(out))
        if not chunk:
            raise EOFError
        out += chunk
    return out


def write_all(descriptor: int, payload: bytes) -> None:
    while payload:
        payload = payload[os.write(descriptor, payload) :]
