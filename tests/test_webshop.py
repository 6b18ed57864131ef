"""The shop as an environment: pages, actions, what is refused and why, experts, and how it plugs into evaluation."""

from __future__ import annotations

import json
import random
import statistics
import string
import time

import pytest

from spear_rl.envs.webshop import Rules, source_of, tasks, webshop_env
from spear_rl.envs.webshop.data.shop import _open, open_shop
from spear_rl.envs.webshop.env import SEARCH_FORM
from spear_rl.envs.webshop.experts import EXPERTS, price_limit_in, query_in
from spear_rl.envs.webshop.session import parsed_action
from spear_rl.testing import check_tasks
from spear_rl.train.evaluate import mean_measures
from spear_rl.types import Stop, Trajectory

SMALL = {"num_products": 620}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def shop(cache):
    return open_shop(source_of(**SMALL), cache)


@pytest.fixture
def panel(cache):
    return tasks("train", cache=cache, **SMALL)


def begun(cache, number: int = 0, **rules):
    env = webshop_env(source_of(**SMALL), cache, number, Rules(**rules))
    return env, env.reset()


def walked(env, *actions: str):
    for action in actions:
        result = env.step(action)
        assert not result.invalid, (action, result.observation.text)
    return result


def test_an_author_would_find_no_fault_with_it(cache):
    assert check_tasks(tasks, options={"cache": cache, **SMALL}, num_tasks=2) == []
    assert check_tasks(tasks, options={"cache": cache, "level": "tiny", "view": "short"}, num_tasks=2) == []


def test_pages_read_as_agents_know_them(cache, shop):
    goal = shop.goal(3)
    env, first = begun(cache, 3)
    assert first.text == f"WebShop [SEP] Instruction: [SEP] {goal.instruction} [SEP] Search"
    assert first.choices == (SEARCH_FORM,)
    head = f"Instruction: [SEP] {goal.instruction} [SEP] Back to Search"
    results = env.step("search[evening dress]").observation
    listed = [shop.product(n) for n in shop.results("evening dress")]
    shown = " [SEP] ".join(f"{p.asin} [SEP] {p.title} [SEP] {p.price_tag}" for p in listed[:10])
    assert results.text == f"{head} [SEP] Page 1 (Total results: {len(listed)}) [SEP] Next > [SEP] {shown}"
    assert results.choices[:3] == ("click[back to search]", "click[next >]", f"click[{listed[0].asin.lower()}]")
    second = env.step("click[next >]").observation
    assert f"Page 2 (Total results: {len(listed)}) [SEP] < Prev [SEP] " in second.text
    assert env.step("click[< prev]").observation == results
    product = listed[0]
    item = env.step(f"click[{product.asin}]").observation
    options = " [SEP] ".join(" [SEP] ".join([name, *values]) for name, values in product.options.items())
    assert item.text == (
        f"{head} [SEP] < Prev [SEP] {options} [SEP] {product.title} [SEP] Price: {product.price_tag} [SEP] "
        f"Rating: {product.rating} [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    for name, text in (
        ("description", product.description),
        ("features", " [SEP] ".join(product.bullets)),
        ("reviews", product.reviews[0].text),
    ):
        page = env.step(f"click[{name}]").observation
        assert page.text.startswith(f"{head} [SEP] < Prev [SEP] ")
        assert text in page.text
        assert env.step("click[< prev]").observation == item


def test_the_rich_view_marks_what_can_be_and_was_clicked(cache, shop):
    env, first = begun(cache, 3, view="rich")
    assert first.text.endswith("\n[button] Search [button_]\n")
    product = shop.product(shop.results("evening dress")[0])
    walked(env, "search[evening dress]", f"click[{product.asin}]")
    value = next(iter(product.options.values()))[0]
    text = env.step(f"click[{value}]").observation.text
    assert text.startswith(f"You have clicked {value}.\n")
    assert f"[clicked button] {value} [clicked button_]" in text
    assert "[button] Buy Now [button_]" in text
    assert f"[clicked button] {product.asin} [clicked button_]" in env.step("click[< prev]").observation.text


def test_options_stay_on_sub_pages_and_go_with_the_product(cache, shop):
    env, _ = begun(cache, 3)
    product = shop.product(shop.results("evening dress")[0])
    value = next(iter(product.options.values()))[0]
    walked(env, "search[evening dress]", f"click[{product.asin}]")
    plain = env.step("click[features]").observation.state_key
    chosen = walked(env, "click[< prev]", f"click[{value}]").observation
    assert walked(env, "click[features]", "click[< prev]").observation.state_key == chosen.state_key
    walked(env, "click[features]")
    assert env.step("click[< prev]").observation.state_key == chosen.state_key != plain
    walked(env, "click[< prev]", f"click[{product.asin}]")
    assert env.step("click[features]").observation.state_key == plain, "going back to the results forgets the options"


REFUSED = [
    # where, what, why
    ((), "click[buy now]", "there is no 'buy now' on this page, open a product first"),
    ((), "click[b000]", "there is nothing to click on the search page"),
    ((), "search[]", "the search is empty"),
    ((), "search[   ]", "the search is empty"),
    (("search[rug]",), "search[]", "the search is empty"),
    (("search[rug]",), "click[b0nosuch00]", "there is no product 'b0nosuch00' on this page of results"),
    (("search[rug]",), "click[< prev]", "there is no '< prev' to click on this page"),
    (("search[rug]",), "click[features]", "there is no 'features' on this page, open a product first"),
    (("search[zzzz]",), "click[next]", "there is no product 'next' on this page of results"),
]


@pytest.mark.parametrize(("before", "action", "why"), REFUSED)
def test_what_cannot_be_done_changes_nothing_and_says_why(cache, before, action, why):
    env, seen = begun(cache)
    for said in before:
        seen = walked(env, said).observation
    result = env.step(action)
    assert result.observation.text.startswith(f"Nothing happened: {why}")
    assert result.observation.text.endswith(seen.text)
    assert (result.observation.state_key, result.observation.choices) == (seen.state_key, seen.choices)
    assert (result.invalid, result.reward, result.done, result.success) == ("inadmissible", 0.0, False, False)


UNREADABLE = {
    "": "no_action",
    "<action>": "unclosed_tag",
    "buy it": "not_an_action",
    "<action>purchase[b0]</action>": "not_an_action",
    "search rugs": "not_an_action",
    "I think we should look\nfor rugs first": "no_action",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_is_no_action_is_told_so_in_one_word(cache, text):
    env, first = begun(cache)
    result = env.step(text)
    assert (result.invalid, result.done) == (UNREADABLE[text], False)
    assert (
        result.observation.text
        == f"Nothing happened: say search[words] or click[something on this page]. [SEP] {first.text}"
    )


def test_actions_are_read_with_or_without_tags_and_in_any_case():
    for text in (
        "search[Red  Shoes]",
        "<think>[hm]</think><action> Search[red shoes] </action>",
        " SEARCH[RED\nSHOES]",
    ):
        assert parsed_action(text)[:2] == ("search", "red shoes")
    long = "search[" + "word " * 100 + "]"
    assert parsed_action(long).words == ("word " * 100).strip(), "a long search needs no tags"
    assert parsed_action("click[a [b] c]").words == "a [b] c"


def test_a_closed_shop_answers_and_does_nothing(cache, shop):
    env, _ = begun(cache, 3)
    env.close()
    after = env.step("search[rug]")
    assert after.observation.text.startswith("Nothing happened: the shop is closed.")
    assert (after.done, after.invalid, after.reward) == (True, "inadmissible", 0.0)
    untouched = webshop_env(source_of(**SMALL), cache, 3, Rules())
    assert untouched.step("search[rug]").done, "before reset() it is closed too"


def test_a_purchase_ends_the_visit_and_is_paid_once(cache, shop):
    for pays, factor in (("success", 10.0), ("score", 10.0)):
        env, _ = begun(cache, 7, pays=pays)
        said = EXPERTS["oracle"](shop, shop.goal(7), 10, 0)
        last = walked(env, *said)
        assert (last.done, last.success, last.reward, last.metrics) == (True, True, factor, {"score": 1.0})
        assert "Your score (min 0.0, max 1.0) [SEP] 1.0" in last.observation.text
        again = env.step("click[buy now]")
        assert (again.done, again.reward, again.metrics) == (True, 0.0, {"score": 1.0})
    cheap = [action for action in said if "search" in action or "b0" in action] + ["click[buy now]"]
    env, _ = begun(cache, 7)
    part = walked(env, *cheap)
    assert (part.reward, part.success, part.done) == (0.0, False, True)
    assert 0 < part.metrics["score"] < 1
    env, _ = begun(cache, 7, pays="score")
    assert walked(env, *cheap).reward == pytest.approx(10 * part.metrics["score"])


def test_the_fifteenth_turn_is_the_last_and_nonsense_takes_turns_too(cache):
    env, _ = begun(cache)
    for turn in range(15):
        result = env.step("search[rug]" if turn == 3 else "hm")
        assert result.done == (turn == 14)
    assert (result.success, result.metrics) == (False, {"score": 0.0})
    assert "The shop is closed." in result.observation.text


def noise(rng: random.Random, choices) -> str:
    """Something a policy may say: a choice, a damaged one, or anything."""
    said = rng.choice(choices) if choices else "click[x]"
    kind = rng.randrange(8)
    if kind < 3:
        return said
    if kind == 3:
        return "".join(rng.choice(string.printable + "é☃\u2028\x00") for _ in range(rng.randrange(60)))
    if kind == 4:
        place = rng.randrange(len(said))
        return said[:place] + rng.choice("[]<>' \n") + said[place + rng.randrange(2) :]
    if kind == 5:
        words = [rng.choice(["red", "rug", "日本", "%s", "(", "*", "shoe", "\\"]) for _ in range(4)]
        return f"search[{' '.join(words)}]"
    if kind == 6:
        return f"<think>{said}</think><action>{said}</action>"
    return rng.choice(["click[", "search[" + "x" * 5000 + "]", "]", "click[]", "<action>click[buy now]", said.upper()])


def test_10000_fuzzed_actions_never_break_it_and_what_is_refused_changes_nothing(cache):
    rng, steps, episode = random.Random(0), 0, 0
    views = ["text", "rich", "short"]
    while steps < 10_000:
        env, seen = begun(cache, episode % 620, view=views[episode % 3], max_turns=40)
        episode += 1
        for _ in range(45):
            result = env.step(noise(rng, seen.choices))
            steps += 1
            assert 0.0 <= result.metrics["score"] <= 1.0
            assert isinstance(result.observation.text, str)
            if result.invalid:
                assert result.reward == 0.0
                assert result.observation.text.startswith("Nothing happened: ")
                if not result.done:
                    assert (result.observation.state_key, result.observation.choices) == (seen.state_key, seen.choices)
            seen = result.observation


def test_every_choice_works(cache):
    rng = random.Random(1)
    for number in range(40):
        env, seen = begun(cache, number)
        done = False
        while not done:
            result = env.step(f"<action>{rng.choice(seen.choices)}</action>")
            assert not result.invalid
            done, seen = result.done, result.observation


def test_the_oracle_scores_1_on_all_but_one_in_a_hundred_embedded_goals(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("standard"))
    shop, solved = open_shop(source_of(), cache), []
    for number in range(0, 4000, 4):
        env = webshop_env(source_of(), cache, number, Rules())
        env.reset()
        result = walked(env, *EXPERTS["oracle"](shop, shop.goal(number), 10, number))
        solved.append(result.metrics["score"] == 1.0)
    assert statistics.fmean(solved) >= 0.99


def test_who_knows_only_the_instruction_does_well_but_not_perfectly_and_haste_costs(cache, shop):
    means = {}
    for name in ("rules", "hasty"):
        wins = []
        for number in range(0, 620, 4):
            env, _ = begun(cache, number)
            said = EXPERTS[name](shop, shop.goal(number), 10, number)
            assert len(said) <= 15
            wins.append(bool(walked(env, *said).success))
        means[name] = statistics.fmean(wins)
    assert 0.5 < means["rules"] < 0.98
    assert means["hasty"] < means["rules"] - 0.1


def test_rules_never_look_at_the_product_the_goal_was_made_from(shop):
    from dataclasses import replace

    for number in range(0, 100, 7):
        goal = shop.goal(number)
        blind = replace(goal, asin="?", number=0, title="?", attributes=(), options=(), price_limit=0.0)
        for name in ("rules", "hasty"):
            assert EXPERTS[name](shop, goal, 10, 5) == EXPERTS[name](shop, blind, 10, 5)


def test_an_instruction_gives_its_words_and_its_limit():
    text = "i am looking for a red rug with memory foam, in size 5 x 7, and price lower than 120.00 dollars"
    assert (query_in(text), price_limit_in(text)) == ("red rug memory foam 5 x 7", 120.0)
    assert price_limit_in("a rug") == 1_000_000.0


def test_an_evaluation_reports_success_and_the_mean_score(spear, tmp_path, cache):
    shared = ["--env", "webshop", "--tasks", 40]
    for name, value in {"cache": cache, **SMALL}.items():
        shared += ["--set", f"task.options.{name}={value}"]
    results = {}
    for workers in (0, 2):
        out = tmp_path / f"{workers}.json"
        code, text = spear(
            "eval",
            "expert",
            *shared,
            "--set",
            "task.options.expert=hasty",
            "--set",
            f"rollout.workers={workers}",
            "--out",
            out,
        )
        assert code == 0, text
        results[workers] = json.loads(out.read_text())
        assert f"mean score {results[workers]['metrics']['score']:.3f}" in text
    assert results[0] == results[2]
    assert results[0]["success"] < results[0]["metrics"]["score"] < 1
    assert set(results[0]["by_family"]) == {"beauty", "electronics", "fashion", "garden", "grocery"}


def test_an_episode_without_a_turn_counts_as_a_score_of_0():
    played = [Trajectory([], Stop.DONE, metrics={"score": 0.5}), Trajectory([], Stop.OVERLONG)]
    assert mean_measures(played) == {"score": 0.25}
    assert mean_measures([Trajectory([], Stop.DONE)]) == {}


def test_mistakes_in_the_options_are_one_sentence(spear, cache):
    for option, sentence in {
        "level=huge": "unknown level 'huge': there is standard, tiny, files",
        "view=html": "unknown view 'html': there is text, rich, short",
        "data=/no/such/folder": "/no/such/folder holds no items_shuffle.json",
        "num_products=-1": "num_products must be 0 or more",
    }.items():
        code, text = spear("eval", "expert", "--env", "webshop", "--set", f"task.options.{option}")
        assert (code, sentence in text) == (2, True), text
        assert "Traceback" not in text


def test_a_missing_package_is_named_in_one_sentence(spear, cache, monkeypatch):
    import spear_rl.envs.webshop.data.optional as optional

    def absent(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    _open.cache_clear()
    monkeypatch.setattr(optional, "import_module", absent)
    code, text = spear("eval", "expert", "--env", "webshop", "--set", f"task.options.cache={cache}")
    assert code == 2
    assert "pip install 'spear-rl[webshop]'" in text
    _open.cache_clear()


def test_a_step_takes_under_2_ms(cache, panel):
    rng, taken = random.Random(0), []
    for task in panel[:60]:
        env = task.make_env()
        seen, done = env.reset(), False
        query = query_in(seen.text.split(" [SEP] ")[2])
        while not done:
            action = rng.choice(seen.choices).replace(SEARCH_FORM, f"search[{query}]")
            start = time.perf_counter()
            result = env.step(action)
            taken.append(time.perf_counter() - start)
            seen, done = result.observation, result.done
    assert statistics.median(taken) < 0.002


@pytest.mark.parametrize("name", ["webshop-tiny", "webshop-smollm2", "paper-webshop"])
def test_the_presets_name_tasks_that_are_there(name, tmp_path, monkeypatch):
    from spear_rl.app.build.rollout import tasks_of
    from spear_rl.app.config import load

    monkeypatch.setenv("SPEAR_RL_CACHE", str(tmp_path))
    config = load(name)
    assert config.task.env == "webshop"
    assert config.rollout.max_turns <= 15
    assert len(tasks_of(config, "validation", count=3)) == 3


def test_the_papers_preset_plays_synthetic_goals_of_the_small_catalogue_by_the_originals_score(tmp_path, monkeypatch):
    from spear_rl.app.build.rollout import tasks_of
    from spear_rl.app.config import load
    from spear_rl.envs.webshop.generated.catalogue import main as write_catalogue

    monkeypatch.setenv("SPEAR_RL_CACHE", str(tmp_path / "cache"))
    write_catalogue([str(tmp_path), "--products", "62"])
    for name in ("items_shuffle", "items_ins_v2"):
        content = json.loads((tmp_path / f"{name}.json").read_text())
        small = content[:31] if isinstance(content, list) else content
        (tmp_path / f"{name}_1000.json").write_text(json.dumps(small))
    config = load("paper-webshop", [f"task.options.data={tmp_path}"])
    panel = tasks_of(config, "train")
    shop = open_shop(source_of(data=str(tmp_path), size="1000", goals="synthetic"))
    assert shop.num_products == 31
    assert len(panel) == len(shop.split("train")) > 31
    assert panel[0].make_env()._rules.scorer == "original"


def test_a_split_smaller_than_num_tasks_warns_once(spear, tmp_path):
    code, text = spear(
        "train", "webshop-tiny", f"run.dir={tmp_path / 'run'}", "run.steps=2", "sft.episodes=0", "eval.tasks=0",
        "rollout.num_tasks=3", "rollout.group_size=2", "rollout.max_turns=2", "task.options.max_tasks=2",
        f"task.options.cache={tmp_path}",
    )  # fmt: skip
    assert code == 0, text
    assert " ".join(text.split()).count("the train split has 2 tasks, fewer than rollout.num_tasks=3") == 1, text


@pytest.mark.slow
def test_the_tiny_shop_trains_through_the_command_line(spear, tmp_path):
    code, text = spear(
        "train", "webshop-tiny", f"run.dir={tmp_path / 'run'}", "run.steps=2", "sft.episodes=16", "eval.tasks=4",
        "rollout.num_tasks=2", "rollout.group_size=2", f"task.options.cache={tmp_path}",
    )  # fmt: skip
    assert code == 0, text
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0.0 <= metrics["rollout/score"] <= 1.0
    held_out = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[-1])
    assert 0.0 <= held_out["metrics"]["score"] <= 1.0
