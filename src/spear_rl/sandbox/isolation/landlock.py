"""Landlock: restricts this process to opening files beneath given paths. Needs no root.

It does not cover chmod, chown, utime, xattr and stat; the system-call filter refuses the first four.
"""

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress

from spear_rl.sandbox.isolation.kernel import syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG, PATH_BENEATH = 1, 1

WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5
MAKE_DIR, MAKE_FILE, REFER, TRUNCATE = 1 << 7, 1 << 8, 1 << 13, 1 << 14
READ = READ_FILE | READ_DIR
CHANGE = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_FILE | REFER | TRUNCATE
RIGHTS_SINCE = {1: 13, 2: 14, 3: 15, 5: 16}
"""Landlock version -> number of file rights it knows."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


def version() -> int:
    """The kernel's Landlock version; 0 without Landlock."""
    with suppress(OSError):
        return syscall("landlock", CREATE_RULESET, None, 0, VERSION_FLAG)
    return 0


def ruleset(rules: Iterable[tuple[str, int]]) -> int:
    """A ruleset that grants these rights beneath these paths and no other: no TCP, no signals to other processes."""
    number = version()
    known = (1 << max(bits for since, bits in RIGHTS_SINCE.items() if since <= number)) - 1
    everything = _Ruleset(known, 0b11 if number >= 4 else 0, 0b11 if number >= 6 else 0)
    size = 24 if number >= 6 else 16 if number >= 4 else 8
    out = syscall("landlock_create_ruleset", CREATE_RULESET, ctypes.byref(everything), size, 0)
    for path, rights in rules:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            file_rights = WRITE_FILE | READ_FILE | TRUNCATE
            rule = _Beneath(rights & known & (-1 if os.path.isdir(path) else file_rights), descriptor)
            syscall("landlock_add_rule", ADD_RULE, out, PATH_BENEATH, ctypes.byref(rule), 0)
        finally:
            os.close(descriptor)
    return out


def restrict_self(descriptor: int) -> None:
    """Apply a ruleset to this process for good. Requires PR_SET_NO_NEW_PRIVS."""
    syscall("landlock_restrict_self", RESTRICT_SELF, descriptor, 0)
