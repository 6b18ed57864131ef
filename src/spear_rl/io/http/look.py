"""The look that our pages share: style sheets, the script that draws curves, and base.html.jinja. Needs jinja2.

A page is sent by a site, or is one file that opens without a network (file.html.jinja).
"""

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from spear_rl.io.escaping import one_line, visible


@cache
def asset(name: str) -> str:
    """A style sheet or script that the package brings along."""
    return (resources.files(__package__) / "static" / name).read_text("utf-8")


@cache
def view_style() -> str:
    return asset("page.css") + asset("view.css")


@cache
def templates(package: str, folder: str = "templates") -> jinja2.Environment:
    """The templates of a package, which may extend ours."""
    own, base = jinja2.PackageLoader(package, folder), jinja2.PackageLoader(__package__, ".")
    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader([own, base]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"visible": visible, "line": one_line}
    return made


def inlined() -> dict[str, Any]:
    """What file.html.jinja needs: style, scripts, and the policy that lets nothing else run or load."""
    # Files of this package: safe to insert without escaping.
    style, scripts = asset("uPlot.min.css") + view_style(), [asset("uPlot.min.js"), asset("view.js")]
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
    policy += f"style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}"
    return {"policy": policy, "style": Markup(style), "scripts": [Markup(script) for script in scripts]}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
