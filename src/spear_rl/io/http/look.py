"""The look that our pages share: page.css, and base.html.jinja for the templates of each site. Needs jinja2."""

from functools import cache
from importlib import resources

import jinja2

from spear_rl.io.escaping import one_line, visible


@cache
def shared_style() -> str:
    return (resources.files(__package__) / "page.css").read_text("utf-8")


@cache
def templates(package: str, folder: str = "templates") -> jinja2.Environment:
    """The templates of a package, which may extend base.html.jinja."""
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
