"""A search tool over a local corpus: BM25 (bm25s) in memory, one index per process."""

import json
import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from spear_rl.envs.tools.functions import Tool
from spear_rl.errors import MissingExtraError, OptionError
from spear_rl.io.escaping import in_words

NUM_RESULTS = 3
_WORD = re.compile(r"\w+")
_PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "The words to look for."}},
    "required": ["query"],
}


class Passage(NamedTuple):
    title: str
    text: str


class Index:
    """Passages by BM25; equal scores in the order of the passages."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages, self._words = passages, dict[str, int]()
        documents = [
            [self._words.setdefault(word, len(self._words)) for word in _words(f"{title} {text}")]
            for title, text in passages
        ]
        self._bm25 = _package("bm25s").BM25(method="lucene")
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        if self._words:
            self._bm25.index((documents, self._words), show_progress=False)

    def best(self, query: str, count: int) -> list[Passage]:
        ids = [self._words[word] for word in _words(query[:10_000]) if word in self._words]
        if not ids:
            return []
        scores = self._bm25.get_scores_from_ids(ids)
        order = _package("numpy").argsort(-scores, kind="stable")[:count]
        return [self._passages[int(number)] for number in order if scores[int(number)] > 0]


def search_tool(source: str) -> Tool:
    """The tool over the corpus of `source`, as `FILE` or `FILE,COUNT` with the number of results per search."""
    path, _, count = source.rpartition(",") if re.search(r",\d+\Z", source) else (source, "", "")
    index, most = corpus_index(path), int(count or NUM_RESULTS)

    def search(query: str) -> str:
        found = index.best(query, most)
        return "\n".join(f"{title}: {text}" if title else text for title, text in found) or "Nothing was found."

    return Tool("search", "Searches the corpus and returns the best passages.", _PARAMETERS, search)


@lru_cache(maxsize=8)
def corpus_index(source: str) -> Index:
    """The index of a file of JSON lines, or of the generated corpus (generated:NUMBER of people)."""
    if source.startswith("generated:"):
        from spear_rl.envs.search.world import passages

        return Index(passages(int(source.partition(":")[2])))
    return Index(_read(Path(source)))


def _read(path: Path) -> list[Passage]:
    found = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row: Any = json.loads(line) if line.strip() else {"text": ""}
                if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                    raise OptionError(f'tools: line {number} of {path} is no object with a text "text"')
                found += [Passage(str(row.get("title", "")), row["text"])] if row["text"] else []
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"tools: the corpus {path} cannot be read ({in_words(error)})") from error
    if not found:
        raise OptionError(f"tools: the corpus {path} has no passage")
    return found


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"a search tool needs {error.name}: pip install 'spear-rl[search]'") from error
