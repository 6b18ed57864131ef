"""Page texts against those of WebShop's own templates and text conversion, which are written out here."""

from __future__ import annotations

import json

import pytest

from spear_rl.envs.webshop import tasks

ASINS = [f"B{number:09d}" for number in range(12)]
ODD = {
    "asin": ASINS[0],
    "name": " Lamp <b> & co ",
    "full_description": "\n First line\nsecond line ",
    "small_description": ["  A bullet point ", "", " \n", "Another"],
    "pricing": "$2000 to $2001.5",
    "customization_options": {
        "Color": [{"value": " Dark/Red "}, {"value": "BLUE"}, {"value": "Blue"}, {"value": "café"}],
        "Size": [{"value": '12" x 12"'}, {"value": "a / b"}, {"value": ""}],
    },
    "average_rating": "4.8",
    "reviews": [{"title": "Good", "stars": 5, "review": "Very good."}],
    "product_category": "Home › Light",
    "query": "lamps",
}
WISH = {"instruction": " find a  co lamp.", "instruction_attributes": ["lamp"], "instruction_options": []}
INSTRUCTION = " find a  co lamp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    plain = [{"asin": asin, "name": f"Plain lamp {asin[-1]}", "pricing": "$2000"} for asin in ASINS[1:]]
    contents = {
        "shuffle": [ODD, *plain],
        "ins_v2": {},
        "human_ins": {ASINS[0]: [WISH]},
    }
    for name, content in contents.items():
        (folder / f"items_{name}.json").write_text(json.dumps(content))
    return folder


def begun(folder, view: str):
    env = tasks("train", data=str(folder), cache=str(folder / "cache"), view=view)[0].make_env()
    return env, env.reset().text


def after(env, *actions: str) -> str:
    for action in actions:
        result = env.step(action)
        assert not result.invalid, (action, result.observation.text)
    return result.observation.text


OPEN = ("search[co plain lamp]", f"click[{ASINS[0]}]")
TEXT_HEAD = "Instruction: [SEP] find a  co lamp [SEP] Back to Search [SEP] "
RICH_HEAD = f"Instruction:\n{INSTRUCTION}\n[button] Back to Search [button_]\n"


def test_the_first_page_is_the_originals(folder):
    assert begun(folder, "text")[1] == "WebShop [SEP] Instruction: [SEP] find a  co lamp [SEP] Search"
    assert begun(folder, "rich")[1] == f"WebShop\nInstruction: \n{INSTRUCTION}\n[button] Search [button_]\n"


def test_results_have_next_on_every_page_and_a_blank_line_before_a_product(folder):
    env, _ = begun(folder, "rich")
    first = after(env, OPEN[0])
    head = f"{RICH_HEAD}Page 1 (Total results: 12)\n[button] Next > [button_]\n"
    assert first.startswith(f"{head}\n[button] {ASINS[0]} [button_]\n Lamp <b> & co \n$2000.0 to $2001.5\n\n[button] B")
    last = after(env, "click[next >]", "click[next >]")
    assert last == f"{RICH_HEAD}Page 3 (Total results: 12)\n[button] < Prev [button_]\n[button] Next > [button_]\n"
    env, _ = begun(folder, "text")
    assert after(env, "search[zzz]") == f"{TEXT_HEAD}Page 1 (Total results: 0) [SEP] Next >"
    assert after(env, "click[next >]") == f"{TEXT_HEAD}Page 2 (Total results: 0) [SEP] < Prev [SEP] Next >"


def test_an_item_has_its_values_as_they_are_spelled_and_no_rating(folder):
    env, _ = begun(folder, "text")
    assert after(env, *OPEN) == (
        f"{TEXT_HEAD}< Prev [SEP] color [SEP] dark | red [SEP] blue [SEP] blue [SEP] café [SEP] "
        'size [SEP] 12" x 12" [SEP] a  |  b [SEP] Lamp <b> & co [SEP] Price: $2000.0 to $2001.5 [SEP] '
        "Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    env, _ = begun(folder, "rich")
    head = f"{RICH_HEAD}[button] < Prev [button_]\n"
    tail = " Lamp <b> & co \nPrice: $2000.0 to $2001.5\nRating: N.A.\n" + "".join(
        f"[button] {name} [button_]\n" for name in ("Description", "Features", "Reviews", "Buy Now")
    )
    assert after(env, *OPEN, "click[blue]", "click[a | b]") == (
        f"You have clicked a  |  b.\nYou have clicked blue.\nYou have clicked blue.\n{head}"
        "color\n  [button] dark | red [button_]\n  [clicked button] blue [clicked button_]\n"
        "  [clicked button] blue [clicked button_]\n  [button] café [button_]\n"
        'size\n  [button] 12" x 12" [button_]\n  [clicked button] a  |  b [clicked button_]\n' + tail
    )
    quoted = after(env, "click[café]", 'click[12" x 12"]')
    assert quoted.startswith("Instruction:"), "the original does not find these two in the page's address"


def test_sub_pages_show_what_there_is_and_nothing_else(folder):
    env, _ = begun(folder, "text")
    after(env, *OPEN)
    shown = {"description": "First line\nsecond line", "features": "A bullet point [SEP]  [SEP] Another", "reviews": ""}
    for name, text in shown.items():
        assert after(env, f"click[{name}]") == f"{TEXT_HEAD}< Prev" + (f" [SEP] {text}" if text else "")
        after(env, "click[< prev]")
    env, _ = begun(folder, "rich")
    after(env, *OPEN)
    head = f"{RICH_HEAD}[button] < Prev [button_]\n"
    assert after(env, "click[features]") == f"{head}   A bullet point \n \n Another\n"
    assert after(env, "click[< prev]", "click[description]") == f"{head}\n First line\nsecond line \n"
    assert after(env, "click[< prev]", "click[< prev]", f"click[{ASINS[1]}]", "click[description]") == head


@pytest.mark.parametrize("expert", ["oracle", "rules", "hasty"])
def test_experts_never_choose_a_value_that_has_no_name(folder, expert):
    task = tasks("train", data=str(folder), cache=str(folder / "cache"), expert=expert)[0]
    for seed in range(30):
        env = task.make_env()
        env.reset()
        assert after(env, *task.demonstrate(seed)).startswith("Thank you")


CLOSING = (
    "Thank you for shopping with us!|Your code: |None| (Paste it in your MTurk interface.)|Purchased|asin|B000000000|"
    'options|{"color": "caf\\u00e9", "size": "12\\" x 12\\""}|attrs|None|category|None|query|None|product category|'
    "None|Target|asin|options|attrs|price upper|instuction text|category|product category|query|Goal |None|Reward|"
    "Your score (min 0.0, max 1.0)|1.0|Reward Details |None"
)


def test_the_closing_page_is_the_originals(folder):
    bought = ('click[12" x 12"]', "click[café]", "click[buy now]")
    assert after(begun(folder, "text")[0], *OPEN, *bought) == " [SEP] ".join(
        line.strip() for line in CLOSING.split("|")
    )
    assert after(begun(folder, "rich")[0], *OPEN, *bought) == CLOSING.replace("|", "\n") + "\n"


def test_a_search_is_accepted_on_every_page_and_offered_where_there_is_a_search_bar(folder):
    pages = [(), OPEN[:1], OPEN, (*OPEN, "click[blue]"), (*OPEN, "click[features]")]
    for actions in pages:
        env, _ = begun(folder, "rich")
        for action in actions:
            env.step(action)
        result = env.step("search[plain lamp]")
        assert not result.invalid
        assert "Page 1 (Total results: 12)" in result.observation.text
        assert not any(choice.startswith("search") for choice in result.observation.choices)
        opened = f"[clicked button] {ASINS[0]} [clicked button_]" in after(env, "click[next >]")
        assert opened == (len(actions) > 1), "a product stays marked until the search page"
    after(env, "click[back to search]", "search[plain lamp]")
    assert "clicked" not in after(env, "click[next >]")
