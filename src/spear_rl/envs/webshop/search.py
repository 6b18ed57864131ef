"""BM25 search as in Lucene: stems without stop words, in memory-mapped arrays that processes share."""

import json
import re
from array import array
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from spear_rl.envs.webshop.data.optional import package
from spear_rl.envs.webshop.data.words import STOP_WORDS

K1, B = 0.9, 0.4  # the original's parameters of BM25
_ARRAYS = ("data", "indices", "indptr")
_WORD = re.compile(r"\w+(?:['\u2019.]\w+)*")
_POSSESSIVE = re.compile("['\u2019]s$")


def stems(text: str) -> list[str]:
    """The stems of a lower-cased text in order: "the women's running shoes" -> ["women", "run", "shoe"]."""
    return [_stem(word) for word in _WORD.findall(text) if word not in STOP_WORDS]


@lru_cache(maxsize=1_000_000)
def _stem(word: str) -> str:
    return str(package("Stemmer").Stemmer("porter").stemWord(_POSSESSIVE.sub("", word)))


class Index:
    """The search index in a folder, memory-mapped; documents are numbered in the order they were given."""

    def __init__(self, folder: Path) -> None:
        state = json.loads((folder / "vocabulary.json").read_text("utf-8"))
        arrays = {name: package("numpy").load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        self._vocabulary: dict[str, int] = state["words"]
        self._bm25 = package("bm25s").BM25(k1=K1, b=B, method="lucene")
        self._bm25.scores = arrays | {"num_docs": state["num_documents"]}
        self._bm25.nonoccurrence_array = None

    def best(self, query: str, count: int) -> list[int]:
        """The numbers of the best documents, best first; of equal scores the lower number first."""
        numpy = package("numpy")
        ids = [self._vocabulary[stem] for stem in stems(query.lower()) if stem in self._vocabulary]
        if not ids:
            return []
        scores = self._bm25.get_scores_from_ids(ids)
        found = numpy.flatnonzero(scores > 0)
        if len(found) > count:
            least = numpy.partition(scores[found], len(found) - count)[len(found) - count]
            found = found[scores[found] >= least]
        # Stable, so that equal scores stay in the order of their numbers.
        order = numpy.argsort(-scores[found], kind="stable")[:count]
        return [int(number) for number in found[order]]


def write_index(texts: Iterable[str], folder: Path) -> None:
    """Write the index of some texts into a folder."""
    bm25s, numpy = package("bm25s"), package("numpy")
    vocabulary = dict[str, int]()
    documents = [array("i", (vocabulary.setdefault(stem, len(vocabulary)) for stem in stems(text))) for text in texts]
    if not vocabulary:  # BM25 needs at least one word
        vocabulary, documents = {"": 0}, [array("i", [0]) for _ in documents]
    bm25 = bm25s.BM25(k1=K1, b=B, method="lucene")
    scores = bm25.build_index_from_ids(list(vocabulary.values()), documents, show_progress=False)
    for name in _ARRAYS:
        numpy.save(folder / f"{name}.npy", scores[name], allow_pickle=False)
    state = {"words": vocabulary, "num_documents": len(documents)}
    (folder / "vocabulary.json").write_text(json.dumps(state, ensure_ascii=False), "utf-8")
