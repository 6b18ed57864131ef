"""Search: BM25 as Lucene counts it, against the formula; stems, stop words and ties."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_rl.envs.webshop.search import STOP_WORDS, Index, stems, write_index

TEXTS = [
    "red wool rug for the living room",
    "red rug",
    "blue rug, blue and blue",
    "running shoes for men",
    "a runner's shoe in red",
    "",
]


@pytest.fixture
def index(tmp_path):
    write_index(TEXTS, tmp_path)
    return Index(tmp_path)


def bm25(texts: list[str], query: str) -> list[float]:
    """The formula: idf * tf / (tf + k1 * (1 - b + b * length / mean length)), with k1 0.9 and b 0.4."""
    documents = [Counter(stems(text)) for text in texts]
    mean = sum(d.total() for d in documents) / len(documents)
    scores = [0.0] * len(texts)
    for stem in stems(query):
        having = sum(stem in d for d in documents)
        idf = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for number, d in enumerate(documents):
            tf = d[stem]
            scores[number] += idf * tf / (tf + 0.9 * (1 - 0.4 + 0.4 * d.total() / mean)) if tf else 0.0
    return scores


@settings(deadline=None)
@given(st.lists(st.sampled_from(["red", "wool", "rug", "shoe", "blue", "the", "men", "running", "zzz"]), max_size=6))
def test_the_order_is_the_formulas(tmp_path_factory, words):
    folder = tmp_path_factory.mktemp("index")
    write_index(TEXTS, folder)
    query = " ".join(words)
    expected = bm25(TEXTS, query)
    found = Index(folder).best(query, 10)
    assert set(found) == {number for number, value in enumerate(expected) if value > 0}
    values = [expected[number] for number in found]
    assert values == pytest.approx(sorted(values, reverse=True), abs=1e-5)


def test_words_are_stemmed_by_porter_and_stop_words_are_lucenes():
    assert stems("the women's running shoes, generously") == ["women", "run", "shoe", "gener"], "Porter2 says generous"
    assert stems(" ".join(STOP_WORDS)) == []
    assert len(STOP_WORDS) == 33
    assert stems("usb-c 12.5 1080p") == ["usb", "c", "12.5", "1080p"]


def test_nothing_is_found_where_nothing_is_meant(index):
    assert index.best("", 10) == index.best("the of and", 10) == index.best("qwertyuiop", 10) == []


def test_equal_scores_come_in_the_order_of_the_catalogue(tmp_path):
    write_index(["red rug"] * 30 + ["red red rug"], tmp_path)
    assert Index(tmp_path).best("rug", 7) == list(range(7))
    assert Index(tmp_path).best("rug red", 3) == [30, 0, 1]


def test_a_catalogue_without_words_can_be_searched(tmp_path):
    write_index(["", "the"], tmp_path)
    assert Index(tmp_path).best("rug", 5) == []
