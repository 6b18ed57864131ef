"""Which requests a server on the user's own machine answers.

A foreign Host is DNS rebinding: a name of another site that resolves to this machine. A foreign Origin is another
site's script or form.
"""

import ipaddress
import re

_ADDRESS = r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?"
_HOST = re.compile(_ADDRESS)
_ORIGIN = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://({_ADDRESS})")

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    # With no-referrer a browser would send `Origin: null` with our own forms, as it does from a sandboxed frame.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of every answer; a server adds its Content-Security-Policy."""


def name_in(host: str) -> str | None:
    """The name in a Host header; None if the header is malformed."""
    found = _HOST.fullmatch(host)
    return found[1].strip("[]").lower() if found and int(found[2] or 0) <= 65535 else None


def address_in(origin: str) -> str | None:
    """The address in an Origin header, as a Host header would have it; None if there is none or it is malformed."""
    found = _ORIGIN.fullmatch(origin)
    return found[1].lower() if found and int(found[3] or 0) <= 65535 else None


def is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_own_name(name: str, bound: str) -> bool:
    """Whether a server that is bound to an address goes by this name; one that is bound to all goes by any."""
    return bound in ("0.0.0.0", "::") or name == bound.lower() or is_loopback(name)
