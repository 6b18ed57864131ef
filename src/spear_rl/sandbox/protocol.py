"""How the interpreter, its fork-server and a child speak: a letter, a length, bytes. Nothing is ever unpickled."""

from __future__ import annotations

import os
import select
import struct

HEADER = struct.Struct(">cI")
"""Of a frame between the interpreter and a child."""
COMMAND = struct.Struct(">cIi")
"""From the interpreter to the server: what to do, to which child, with what number."""
ANSWER = struct.Struct(">Ii")
"""From the server: which child, and a number (0, a wait status or an errno)."""

# To a child, and from it.
SEED, CELL = b"s", b"c"
READY, BROKEN, DONE, RAISED, OUT_OF_MEMORY = b"r", b"b", b"d", b"e", b"m"
# To the server. TAKE is answered with four descriptors: code in, reply out, stdout, stderr. END is answered when the
# child is gone; FORGET, for a child that did nothing wrong, is not answered at all.
TAKE, SIGNAL, END, FORGET = b"t", b"k", b"x", b"f"
NUM_DESCRIPTORS = 4


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(payload)) + payload


def is_readable(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read, or an end, within that time. (select fails beyond descriptor 1023.)"""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


def read_exactly(descriptor: int, num_bytes: int) -> bytes:
    """That many bytes of a blocking descriptor; EOFError when it ends before."""
    out = b""
    while len(out) < num_bytes:
        piece = os.read(descriptor, num_bytes - len(out))
        if not piece:
            raise EOFError
        out += piece
    return out


def write_all(descriptor: int, payload: bytes) -> None:
    while payload:
        payload = payload[os.write(descriptor, payload) :]
