"""MkDocs hooks: pages read on a code host link to files outside docs/; on the site these links must work too.

A link to a file of ROOT_PAGES becomes a link to its page on the site. A link to any other file of the repository
becomes a link to `repo_url` if mkdocs.yml has one, else plain text. A link to a file that does not exist is a warning,
which `mkdocs build --strict` turns into a failure.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/minimal_spear.py": "minimal_spear.md",
}
"""Files outside docs/ -> their pages on the site. index.md is written for the site itself."""
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.site_links")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are files outside docs/."""
    for source, page in ROOT_PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        content = f"# {source}\n\n```python\n{text}```\n" if source.endswith(".py") else text
        if page != "index.md":
            files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links to files outside docs/ at what the site has for them."""
    uri = page.file.src_uri
    folder = (
        PurePosixPath(".") if uri in ROOT_PAGES.values() and uri != "index.md" else PurePosixPath("docs", uri).parent
    )

    def on_site(link: re.Match[str]) -> str:
        target = os.path.normpath(folder / link["target"])
        if not (ROOT / target).exists():
            log.warning(f"{uri} links to {target}, which does not exist")
            return link[0]
        if target in ROOT_PAGES or target.startswith("docs" + os.sep):
            found = ROOT_PAGES.get(target) or os.path.relpath(target, "docs")
            return f"[{link['text']}]({os.path.relpath(found, Path(uri).parent)}{link['anchor'] or ''})"
        if config.repo_url:
            return f"[{link['text']}]({config.repo_url.rstrip('/')}/blob/main/{target})"
        return link["text"]

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(on_site, part) for part in parts)
