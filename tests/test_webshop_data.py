"""Where the goods come from: the generator, WebShop's own files, goals and their split, and the shop on disk."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_rl.envs.webshop import source_of, tasks
from spear_rl.envs.webshop.data import entries as entries_module
from spear_rl.envs.webshop.data.entries import DataError, Entry, read_entries, usable
from spear_rl.envs.webshop.data.goals import SPLITS, price_limit, shuffled_order, split_of
from spear_rl.envs.webshop.data.product import Product, prices, product_of
from spear_rl.envs.webshop.data.shop import _open, open_shop, panel_hash
from spear_rl.envs.webshop.generated.catalogue import generated_entries
from spear_rl.envs.webshop.generated.catalogue import main as write_catalogue
from spear_rl.envs.webshop.manifest import EMBEDDED, hashes, recorded


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    assert write_catalogue([str(folder), "--products", "186"]) == 0
    return folder


@pytest.fixture(autouse=True)
def _fresh():
    _open.cache_clear()


def goals_of(shop) -> dict[str, list]:
    return {split: [shop.goal(int(number)) for number in shop.split(split)] for split in SPLITS}


@pytest.mark.parametrize("level", EMBEDDED)
def test_the_embedded_panels_are_the_shipped_ones(level, cache):
    assert hashes(source_of(level=level), cache) == recorded()[level]


@pytest.mark.parametrize("options", [{}, {"level": "tiny"}, {"num_products": 620, "goals": "synthetic"}])
def test_no_two_splits_share_a_goal_or_an_instruction(options, cache):
    goals = goals_of(open_shop(source_of(**options), cache))
    for one, other in (("train", "test"), ("train", "validation"), ("validation", "test")):
        assert not {key for g in goals[one] for key in g.keys} & {key for g in goals[other] for key in g.keys}
    assert all(len(goals[split]) >= 100 for split in SPLITS)


def test_the_standard_splits_do_not_even_share_a_product(cache):
    goals = goals_of(open_shop(source_of(), cache))
    assert [len(goals[split]) for split in ("test", "validation", "train")] == [500, 1000, 2500]
    asins = [{goal.asin for goal in members} for members in goals.values()]
    assert len(set.union(*asins)) == sum(map(len, asins)) == 4000


@given(st.lists(st.sets(st.integers(0, 60), min_size=1, max_size=2), max_size=200), st.integers(0, 5))
def test_a_repeated_goal_stays_in_one_split(keys, seed):
    splits = split_of(shuffled_order(len(keys), seed=seed), keys)
    found = [{key for number in splits[split] for key in keys[number]} for split in SPLITS]
    assert sum(len(one) for one in found) == len(set().union(*found))
    kept = set().union(*splits.values())
    assert all(keys[number] & set().union(*found) for number in range(len(keys)) if number not in kept)


def test_duplicates_in_the_files_never_reach_two_splits(tmp_path, cache, data):
    for name in ("items_shuffle.json", "items_ins_v2.json"):
        shutil.copy(data / name, tmp_path)
    wishes = json.loads((data / "items_human_ins.json").read_text())
    worded = {
        asin: said + [entry | {"instruction": f"please, {entry['instruction']}"} for entry in said] * 2
        for asin, said in wishes.items()
    }
    (tmp_path / "items_human_ins.json").write_text(json.dumps(worded))
    goals = goals_of(open_shop(source_of(data=str(tmp_path)), cache))
    found = [{goal.keys[0] for goal in members} for members in goals.values()]
    assert len(set.union(*found)) == sum(map(len, found)) == 186


def test_other_processes_with_other_hash_seeds_make_the_same_shop(tmp_path):
    script = (
        "import sys\n"
        "from spear_rl.envs.webshop import source_of, tasks\n"
        "from spear_rl.envs.webshop.manifest import hashes\n"
        "from spear_rl.envs.webshop.data.shop import open_shop\n"
        "source = source_of(num_products=310)\n"
        "shop = open_shop(source, sys.argv[1])\n"
        "print(hashes(source, sys.argv[1]), shop.results('red rug with memory foam'), shop.results('fast charging'))\n"
        "panel = tasks('train', num_products=310, cache=sys.argv[1])[:20]\n"
        "print([(task.id, task.family, task.demonstrate(3)) for task in panel])\n"
    )
    told = set()
    for seed in ("0", "1", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script, str(tmp_path / seed)]
        told.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(told) == 1


def test_a_product_does_not_depend_on_how_many_there_are_and_another_seed_makes_others():
    few, many = list(generated_entries(62)), list(generated_entries(93))
    assert many[:62] == few
    assert [entry.item["name"] for entry in generated_entries(62, seed=1)] != [entry.item["name"] for entry in few]
    assert len({entry.item["asin"] for entry in generated_entries(2000)}) == 2000


def test_price_limits_come_from_the_seed_alone_and_lie_above_the_price(cache):
    shop = open_shop(source_of(num_products=310), cache)
    for number in range(310):
        goal, price = shop.goal(number), shop.product(shop.goal(number).number).price
        steps = (goal.price_limit - price) / 10
        assert goal.price_limit % 10 == 0
        assert 1 < steps <= 4, "the larger of two of the next four"
        assert goal.instruction.endswith(f", and price lower than {goal.price_limit:.2f} dollars")
    random.seed(233)
    theirs = list(range(40))
    random.shuffle(theirs)
    assert shuffled_order(40, seed=233) == theirs, "the original's order of goals"
    dear = Product("A", "", "", (), (), {}, "", "", "", (985.0,), 985.0)
    assert price_limit(dear, "", (), seed=233) == 1_000_000.0


def test_searching_reading_and_choosing_all_matter(cache):
    shop = open_shop(source_of(), cache)
    goals = [shop.goal(number) for number in range(0, 4000, 8)]
    products = [shop.product(goal.number) for goal in goals]
    untold = [any(a not in p.title.lower() for a in g.attributes) for g, p in zip(goals, products, strict=True)]
    assert sum(untold) / len(untold) > 0.6, "most goals ask for something that no title tells"
    assert sum(bool(goal.options) for goal in goals) / len(goals) > 0.8
    texts = [" ".join(goal.instruction.split()) for goal in goals]
    literal = [all(a in t for a in g.attributes) for g, t in zip(goals, texts, strict=True)]
    assert 0.1 < sum(literal) / len(literal) < 0.7, "many ask in other words"
    assert len(set(texts)) == len(texts)


def test_the_files_give_the_shop_that_they_were_written_from(data, cache):
    theirs, ours = open_shop(source_of(data=str(data)), cache), open_shop(source_of(num_products=186), cache)
    unread = [replace(ours.product(n), rating="N.A.", reviews=()) for n in range(186)]
    assert [theirs.product(n) for n in range(186)] == unread, "of files neither is shown, as in the original"
    for split in SPLITS:
        goals = [[shop.goal(int(n)) for n in shop.split(split)] for shop in (theirs, ours)]
        assert panel_hash(goals[0]) == panel_hash(goals[1])


def test_the_small_and_the_full_catalogue_are_told_apart(data, tmp_path, cache, monkeypatch):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    for name in ("items_shuffle", "items_ins_v2"):
        content = json.loads((tmp_path / f"{name}.json").read_text())
        small = content[:31] if isinstance(content, list) else content
        (tmp_path / f"{name}_1000.json").write_text(json.dumps(small))
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path))
    assert open_shop(source_of(level="files"), cache).num_products == 186
    assert open_shop(source_of(level="files", size="1000"), cache).num_products == 31
    assert open_shop(source_of(level="files", num_products=12), cache).num_products == 12
    (tmp_path / "items_shuffle.json").unlink()
    (tmp_path / "items_ins_v2.json").unlink()
    assert open_shop(source_of(level="files"), cache).num_products == 31


ODD = [
    {
        "asin": "B000000001",
        "name": "Good",
        "customization_options": {"Color": [{"value": " Red/Blue "}, {"value": "RED"}]},
    },
    {"asin": "B0000000012", "name": "too long"},
    {"asin": "nan", "name": "none"},
    {"asin": "B000000001", "name": "again"},
    {"asin": None},
    "no product at all",
    {"asin": "B000000002", "pricing": "$5 to $9", "small_description": "one text", "customization_options": None},
    {"asin": "B000000003", "pricing": "", "customization_options": {"Size": None, "Fit": [{"value": "  "}]}},
    {"asin": "B000000004", "pricing": "$1,299.50", "query": " Lamps ", "full_description": None, "images": None},
]


def test_odd_entries_are_read_as_webshop_reads_them():
    entries = [Entry(item, {}, []) for item in ODD if isinstance(item, dict)]
    read = [product_of(entry, seed=233) for entry in usable(entries)]
    assert [product.asin for product in read] == [f"B00000000{n}" for n in (1, 2, 3, 4)]
    good, ranged, bare, dear = read
    assert good.options == {"color": ("red | blue", "red")}
    assert (good.price, good.price_tag) == (100.0, "$100.0")
    assert (ranged.pricing, ranged.price_tag, ranged.bullets) == ((5.0, 9.0), "$5.0 to $9.0", ("one text",))
    assert 5.0 <= ranged.price <= 9.0
    assert (bare.price, bare.options) == (100.0, {"fit": ("",)})
    assert (dear.price, dear.query, dear.description) == (1299.5, "lamps", "")


def test_prices_are_numbers_or_a_hundred():
    assert prices("$12.99") == (12.99,)
    assert prices("$5 to $9") == (5.0, 9.0)
    for nothing in (None, "", "free", "$", "$ to $", 3):
        assert prices(nothing) == (100.0,)


@given(st.text())
def test_any_price_text_gives_one_or_two_finite_numbers(text):
    assert 1 <= len(prices(text)) <= 2
    assert all(0 <= price < float("inf") for price in prices(text))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.lists(json_values, max_size=6), st.integers(1, 40), st.sampled_from([None, 1]))
def test_a_list_read_in_pieces_is_the_list(tmp_path_factory, values, chunk, indent):
    path = tmp_path_factory.mktemp("json") / "list.json"
    path.write_text(json.dumps(values, indent=indent), "utf-8")
    before, entries_module._CHUNK = entries_module._CHUNK, chunk
    try:
        assert list(entries_module._streamed(str(path))) == values
    finally:
        entries_module._CHUNK = before


@pytest.mark.parametrize("content", ["", "{}", "[1, 2", '[{"asin": "B0"', "[1 2 }", "nonsense"])
def test_a_damaged_catalogue_is_one_sentence(tmp_path, content):
    for name in ("items_shuffle.json", "items_ins_v2.json"):
        (tmp_path / name).write_text("{}" if "ins" in name else content)
    with pytest.raises(DataError, match=r"items_shuffle\.json cannot be read|there is no human goal"):
        open_shop(source_of(data=str(tmp_path)), str(tmp_path / "cache"))


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    with pytest.raises(DataError, match="the option data, or the variable WEBSHOP_DATA"):
        source_of(level="files")
    with pytest.raises(DataError, match=r"holds no items_shuffle\.json and no items_shuffle_1000\.json"):
        source_of(data=str(tmp_path))
    assert list(read_entries(_three_files(tmp_path, [{"asin": "B1"}], {"B1": 3}, {"B1": "?"}))) == [
        Entry({"asin": "B1"}, {}, [])
    ]


def _three_files(folder: Path, items, attributes, wishes):
    contents = {"items_shuffle": items, "items_ins_v2": attributes, "items_human_ins": wishes}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return entries_module.found_files(str(folder))


def test_the_shop_is_made_once_and_then_opened(tmp_path, monkeypatch):
    source = source_of(num_products=93)
    first = open_shop(source, str(tmp_path)).results("red rug")
    _open.cache_clear()
    monkeypatch.setattr("spear_rl.envs.webshop.data.shop.write_shop", lambda *_: pytest.fail("it was made again"))
    assert open_shop(source, str(tmp_path)).results("red rug") == first


@pytest.mark.parametrize("damage", ["truncate", "remove", "mark"])
def test_a_damaged_cache_is_made_anew(tmp_path, damage):
    source = source_of(num_products=93)
    first = open_shop(source, str(tmp_path)).results("red rug")
    [folder] = (tmp_path / "webshop").iterdir()
    victim = folder / ("whole.json" if damage == "mark" else "indices.npy")
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-40])
    _open.cache_clear()
    assert open_shop(source, str(tmp_path)).results("red rug") == first
    assert [path.name for path in (tmp_path / "webshop").iterdir()] == [folder.name], "nothing is left lying about"


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path):
    (tmp_path / "file").write_text("")
    shop = open_shop(source_of(num_products=93), str(tmp_path / "file"))
    assert (shop.num_products, len(shop.results("rug")) > 0) == (93, True)


def test_workers_share_the_shop_and_cannot_change_it(cache):
    import numpy

    shop = open_shop(source_of(num_products=93), cache)
    arrays = [*(shop._index._bm25.scores[name] for name in ("data", "indices", "indptr")), shop.split("train")]
    assert all(isinstance(array, numpy.memmap) and not array.flags.writeable for array in arrays)
    with pytest.raises(TypeError):
        shop._products._bytes[0:1] = b"x"


def test_files_that_change_make_another_shop(data, tmp_path, cache):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    assert open_shop(source_of(data=str(tmp_path)), cache).num_products == 186
    items = json.loads((tmp_path / "items_shuffle.json").read_text())
    (tmp_path / "items_shuffle.json").write_text(json.dumps(items[:100]))
    assert open_shop(source_of(data=str(tmp_path)), cache).num_products == 100


def test_a_panel_is_a_sequence_of_tasks_that_are_made_when_looked_at(cache):
    panel = tasks("train", num_products=310, cache=cache, max_tasks=12)
    assert len(panel) == len(list(panel)) == len({task.id for task in panel}) == 12
    assert [task.id for task in panel[2:5]] == [panel[n].id for n in (2, 3, 4)]
    only = tasks("train", num_products=310, cache=cache, families=["beauty"])
    assert {task.family for task in only} == {"beauty"}


def test_synthetic_goals_are_one_a_combination(data, cache):
    shop = open_shop(source_of(data=str(data), goals="synthetic"), cache)
    goals = [goal for members in goals_of(shop).values() for goal in members]
    per_product = dict.fromkeys(range(186), 1)
    for number in per_product:
        for values in shop.product(number).options.values():
            per_product[number] *= len(values)
    assert len(goals) == sum(per_product.values())
    goal = random.Random(0).choice([goal for goal in goals if len(goal.options) == 2])
    names = sorted(shop.product(goal.number).options)
    chosen = ", and ".join(f"{name}: {value}" for name, value in zip(names, goal.options, strict=True))
    assert f" with {chosen}, and price lower than " in goal.instruction


def item(asin: str, options: dict[str, list[str]], **fields) -> dict:
    values = {name: [{"value": value} for value in own] for name, own in options.items()}
    return {"asin": asin, "name": f"Lamp {asin}", "customization_options": values, "pricing": "$5"} | fields


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["Color", "Size", "Fit"]),
            st.lists(st.sampled_from(["Red", "red ", "blue", "a/b", "a / b", ""]), max_size=4),
            max_size=3,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_synthetic_goals_are_all_combinations_with_repeated_values_in_the_files_order(tmp_path_factory, products):
    folder = tmp_path_factory.mktemp("repeated")
    products.append({"size": ["small", "Small"]})
    asins = [f"B{number:09d}" for number in range(len(products))]
    wishes = {
        asin: {"attributes": ["soft"], "instruction": "find", "instruction_attributes": ["soft"]} for asin in asins
    }
    _three_files(folder, [item(asin, options) for asin, options in zip(asins, products, strict=True)], wishes, {})
    expected = []
    for asin, options in zip(asins, products, strict=True):
        names = sorted(name.lower() for name in options)
        own = {
            name.lower(): [v.strip().replace("/", " | ").lower() for v in values] for name, values in options.items()
        }
        expected += [(asin, tuple(values)) for values in itertools.product(*(own[name] for name in names))]
    shop = open_shop(source_of(data=str(folder), goals="synthetic"), str(folder / "cache"))
    goals = [shop.goal(number) for number in range(len(shop._goals))]
    assert [(goal.asin, goal.options) for goal in goals] == expected
    order = list(range(len(expected)))
    random.Random(233).shuffle(order)
    assert [int(n) for n in shop.split("test")] == order[: len(order) // 6], "the original's shuffle of that many goals"


def test_a_word_that_is_only_in_a_later_bullet_point_is_not_found(tmp_path):
    told = [
        item("B000000001", {}, small_description=["Zirconium rim", "quartz knob"], full_description="Onyx base."),
        item("B000000002", {"Shade": ["Jasper"]}, small_description=["", "zirconium knob"]),
        item("B000000003", {}, small_description="A zirconium text"),
    ]
    wish = [{"instruction": "find", "instruction_attributes": ["soft"]}]
    _three_files(tmp_path, told, {}, {"B000000001": wish})
    shop = open_shop(source_of(data=str(tmp_path)), str(tmp_path / "cache"))
    words = ("zirconium", "quartz", "knob", "onyx", "jasper", "shade", "lamp")
    assert [sorted(shop.results(word)) for word in words] == [[0, 2], [], [], [0], [1], [1], [0, 1, 2]]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_tenth_of_100000_products_takes_a_tenth_of_2_gb_and_2_minutes(tmp_path):
    script = (
        "import re, sys, time; from spear_rl.envs.webshop import source_of\n"
        "from spear_rl.envs.webshop.data.shop import open_shop\n"
        "start = time.process_time(); open_shop(source_of(num_products=10_000), sys.argv[1])\n"
        "status = open('/proc/self/status').read()\n"
        "print(time.process_time() - start, int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]) / 1024)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    seconds, mib = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert seconds < 12
    assert mib < 200
