"""As the paper and the originals do it: what later prompts show, which answers are invalid, which states are the same,
which turns are dropped, and Sokoban's rooms, symbols and moves."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_rl.algorithms import GiGPO, anchor_of, dr_bot, gigpo, grpo
from spear_rl.algorithms.filters import FlatGroups, Overlong, Repetitive, Unreadable, Void
from spear_rl.app.build.rollout import Player, tasks_of
from spear_rl.app.build.training import algorithm_of
from spear_rl.app.config import load, presets
from spear_rl.engines.models.tiny import tiny_tokenizer
from spear_rl.envs import household, sokoban
from spear_rl.envs.shared.answer_tags import parsed_answer, published_answer
from spear_rl.envs.sokoban.env import SokobanEnv, moves_in
from spear_rl.envs.sokoban.experts import optimal_moves
from spear_rl.envs.sokoban.generator import PUBLISHED, generated_level
from spear_rl.envs.sokoban.rules import DIRECTIONS
from spear_rl.envs.sokoban.text import content_hash
from spear_rl.errors import ConfigError, OptionError
from spear_rl.rollout import ChatRenderer
from spear_rl.rollout.env import INADMISSIBLE, NO_THOUGHT, Observation, StepResult, Task
from spear_rl.rollout.rendering.renderer import LAYOUTS
from spear_rl.rollout.workers.protocol import answer_frame, answer_in, frames
from spear_rl.testing import check_environment
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn
from test_alfworld import write_game

THOUGHT = "zebra"
ACTIONS = "Possible actions: "


class Ponderer:
    """Answers with a thought up to the token limit, then one of the possible actions, and notes all prompts."""

    def __init__(self, tokenizer: Any, num_tokens: int, answer: str) -> None:
        self._tokenizer, self._num_tokens, self._answer = tokenizer, num_tokens, answer
        self._rng = random.Random(0)
        self.prompts: list[list[int]] = []

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return [self._completion(prompt) for prompt in prompts]

    def _completion(self, prompt: list[int]) -> Completion:
        self.prompts.append(prompt)
        listed = self._tokenizer.decode(prompt).rpartition(ACTIONS)[2].partition("<|")[0].split("; ")
        action = self._rng.choice(listed).replace("<your query>", "red shoes")
        bare = self._tokenizer.encode(self._answer.format(thought="", action=action), add_special_tokens=False)
        thought = f" {THOUGHT}" * (self._num_tokens - len(bare) - 1)
        ids = self._tokenizer.encode(self._answer.format(thought=thought, action=action), add_special_tokens=False)
        ids = [*ids, self._tokenizer.eos_token_id]
        assert len(ids) == self._num_tokens
        return Completion(ids, [0.0] * len(ids))

    @property
    def texts(self) -> list[str]:
        return [self._tokenizer.decode(prompt) for prompt in self.prompts]


def pondered(preset: str, *changes: str, answer: str = "<think>{thought}</think><action>{action}</action>") -> Any:
    """(config, policy, episodes) of one episode of four tasks of a preset, with thoughts as long as it allows."""
    config = load(preset, list(changes))
    tasks = tasks_of(config, "validation", count=4)
    seen = [task.make_env().reset() for task in tasks]
    words = [THOUGHT, f" {THOUGHT}", "<think> </think> <action> </action>", *(task.instructions for task in tasks)]
    tokenizer = tiny_tokenizer([*words, *(s.text for s in seen), *(c for s in seen for c in s.choices)])
    policy = Ponderer(tokenizer, config.rollout.max_new_tokens, answer)
    with Player(config, tokenizer) as player:
        groups = player.groups(tasks, policy, group_size=1, step=0)
    return config, policy, [t for group in groups for t in group.trajectories]


@pytest.fixture
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEAR_RL_CACHE", str(tmp_path / "cache"))
    for number in range(4):
        write_game(tmp_path / "json_2.1.1" / "valid_seen" / f"pick_and_place_simple-{number}" / "trial_1", number)
    return tmp_path


PAPER = [
    ("paper-alfworld", ["task.env=household", "task.options.level=hard"]),
    ("paper-alfworld", ["task.options.data={games}"]),
    ("paper-webshop", []),
    ("paper-sokoban", ["task.options.observation=text"]),
]


@pytest.mark.filterwarnings("ignore:a game file states rules")
@pytest.mark.parametrize(("preset", "changes"), PAPER)
def test_thoughts_of_512_tokens_never_enter_a_later_prompt_of_the_papers_presets(preset, changes, games):
    config, policy, played = pondered(preset, *(change.format(games=games) for change in changes))
    assert config.rollout.max_new_tokens == 512
    assert max(map(len, policy.prompts)) <= config.rollout.max_context
    assert not [text for text in policy.texts if THOUGHT in text]
    assert {t.stop for t in played} <= {Stop.DONE, Stop.MAX_TURNS}
    assert any(len(t.turns) > 2 for t in played)
    for t in played:
        assert all(turn.action for turn in t.turns)
    assert any(f"> {played[0].turns[0].action}\n" in text for text in policy.texts)


def test_with_history_answer_thoughts_are_kept_and_two_of_them_overflow_a_short_prompt():
    _, policy, played = pondered("paper-sokoban", "task.options.observation=text", "rollout.history=answer")
    assert [text for text in policy.texts if THOUGHT in text]
    assert Stop.OVERLONG in {t.stop for t in played}


def test_a_thought_cut_off_at_the_token_limit_leaves_no_trace_in_later_prompts():
    for answer in ("<think>{thought}", "{thought}", "<Think>{thought}</THINK>"):
        changes = ["task.env=household", "task.options.invalid=strict", "rollout.max_turns=6"]
        _, policy, played = pondered("paper-alfworld", *changes, answer=answer)
        assert not [text for text in policy.texts if THOUGHT in text], answer
        assert all(turn.action == "" and turn.invalid for t in played for turn in t.turns)
        assert "> (nothing)" in policy.texts[-1]


@pytest.mark.parametrize("layout", ["turns", "log"])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<think>zebra</think><action>go</action>", "> go\n"),
        ("<think>zebra</think>go", "> go\n"),
        ("zebra</think>go", "> go\n"),
        ("go<think>zebra", "> go\n"),
        ("<THINK>zebra</Think>go", "> go\n"),
        ("<think>zebra", "> (nothing)\n"),
        ("", "> (nothing)\n"),
    ],
)
def test_where_an_environment_names_no_action_the_answer_without_thoughts_is_shown(tokenizer, layout, text, shown):
    observations = [Observation("first"), Observation("second")]
    turns = [Turn([1], Completion([2], [0.0]), text=text)]
    task = Task("t", make_env=lambda: None)
    prompt = tokenizer.decode(LAYOUTS[layout](ChatRenderer(tokenizer), task, observations, turns))
    assert shown in prompt
    assert "zebra" not in prompt
    whole = LAYOUTS[layout](ChatRenderer(tokenizer), task, observations, turns, history="answer")
    assert f"> {text}\n" in tokenizer.decode(whole)


def test_an_action_is_shown_up_to_a_limit(tokenizer):
    turns = [Turn([1], Completion([2], [0.0]), text="-", action="x" * 5000)]
    task, seen = Task("t", make_env=lambda: None), [Observation("first"), Observation("second")]
    prompt = tokenizer.decode(LAYOUTS["turns"](ChatRenderer(tokenizer), task, seen, turns))
    assert "x" * 400 in prompt
    assert "x" * 401 not in prompt


@given(task=st.text(max_size=20), action=st.none() | st.text(max_size=20))
@settings(max_examples=50, deadline=None)
def test_task_and_action_come_back_from_a_worker_as_they_were(task, action):
    result = StepResult(Observation("seen", task=task), action=action)
    [frame] = frames(bytearray(answer_frame(3, result)))
    assert answer_in(frame) == (3, result)


def test_later_prompts_of_sokoban_show_the_task_instead_of_the_first_room():
    _, policy, played = pondered("paper-sokoban", "task.options.observation=text", "rollout.max_turns=5")
    first = [t.turns[0].observation for t in played]
    for text in policy.texts[len(played) :]:
        above = text.partition("Steps taken")[0]
        assert "Your task is to push every box onto a target." in above
        assert not any(room in above for room in first)


@pytest.mark.parametrize("layout", ["turns", "log"])
def test_later_prompts_repeat_the_task_and_not_the_room(layout):
    changes = ["task.env=household", f"rollout.layout={layout}", "rollout.max_turns=5"]
    _, policy, played = pondered("paper-alfworld", *changes)
    rooms = {t.turns[0].observation.rpartition("\n\n")[0] for t in played}
    assert [any(room in text for room in rooms) for text in policy.texts].count(True) == len(played)
    assert all("Your task is to: " in text for text in policy.texts)


def test_without_a_task_of_its_own_the_whole_first_observation_is_repeated(tokenizer):
    seen = [Observation("the opening\n\nthe question"), Observation("second")]
    turns, task = [Turn([1], Completion([2], [0.0]), text="go")], Task("t", make_env=lambda: None)
    assert "the opening" in tokenizer.decode(LAYOUTS["turns"](ChatRenderer(tokenizer), task, seen, turns))


# which answers are invalid


TABLE = [  # answer; strict: reason and whether the game acts; published: the same
    ("<think>hm</think><action>look</action>", ("", True), ("", True)),
    ("<action>look</action>", ("", True), (NO_THOUGHT, True)),
    ("look", ("", True), ("no_action", True)),
    ("<think>hm</think>look", ("", True), ("no_action", True)),
    ("<think>hm</think>I think about it.\nSo: look", ("no_action", False), ("no_action", True)),
    ("<think>hm</think><action>look", ("unclosed_tag", False), ("no_action", True)),
    ("<think>hm</think><action>fly away</action>", (INADMISSIBLE, False), ("", False)),
    ("<action>fly away</action>", (INADMISSIBLE, False), (NO_THOUGHT, False)),
    ("<think>hm</think>fly\naway", ("no_action", False), ("no_action", False)),
    ("<think>hm</think>overlook", (INADMISSIBLE, False), ("no_action", False)),
    ("", ("no_action", False), ("no_action", False)),
]


@pytest.mark.parametrize("rule", ["strict", "published"])
@pytest.mark.parametrize(("answer", "strict", "published"), TABLE)
def test_each_rule_charges_its_own_answers(answer, strict, published, rule):
    env = household.tasks("train", invalid=rule, max_tasks=1)[0].make_env()
    env.reset()
    result = env.step(answer)
    assert (result.invalid, result.used_tool) == (strict if rule == "strict" else published)
    assert (result.observation.text == "Nothing happens.") != result.used_tool


@pytest.mark.filterwarnings("ignore:a game file states rules")
def test_the_papers_preset_plays_alfworld_by_the_published_rule_and_others_do_not(games):
    for settings_, invalid in ((["paper-alfworld"], ""), ([None], INADMISSIBLE)):
        config = load(settings_[0], ["task.env=alfworld", f"task.options.data={games}"])
        env = tasks_of(config, "validation", count=1)[0].make_env()
        env.reset()
        assert env.step("<think>hm</think><action>fly</action>").invalid == invalid


@pytest.mark.parametrize("rule", ["strict", "published"])
def test_an_expert_s_answers_are_valid_by_either_rule(rule):
    assert not check_environment(household.tasks("train", invalid=rule, max_tasks=3))
    task = household.tasks("train", invalid=rule, max_tasks=1)[0]
    env = task.make_env()
    env.reset()
    results = [env.step(task.answer_format.format(action=command)) for command in task.demonstrate(0)]
    assert results[-1].success
    assert not any(result.invalid for result in results)


def test_an_untagged_last_action_can_win():
    task = household.tasks("train", invalid="published", max_tasks=1)[0]
    env = task.make_env()
    env.reset()
    results = [env.step(f"Next I will {command}.") for command in task.demonstrate(0)]
    assert (results[-1].reward, results[-1].success, results[-1].done) == (10.0, True, True)
    assert {result.invalid for result in results} == {"no_action"}


def test_an_action_without_its_thought_pays_and_trains_and_one_without_tags_is_void():
    turns = [Turn([1], Completion([2], [0.0]), invalid=invalid) for invalid in ("", NO_THOUGHT, "no_action")]
    [group] = grpo().shaped([Group("t", [Trajectory(turns, Stop.DONE)])], 0)
    assert [turn.shaping for turn in group.trajectories[0].turns] == [0.0, -0.1, -0.1]
    assert Void()([group]) == [["", "", "void"]]


@given(
    before=st.text("ab<>/ \n", max_size=10),
    command=st.sampled_from(["look", "go to desk 1"]),
    closings=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_closing_an_action_more_than_once_changes_nothing(before, command, closings):
    answer = f"{before}<action>{command}" + "</action>" * closings
    assert parsed_answer(answer) == (command, "")
    assert published_answer(answer, ()).command == command


# which states are the same


def episodes(draw: Callable[[int], int]) -> list[Group]:
    def turn() -> Turn:
        text, key = "abc"[draw(3)], "xyz"[draw(3)]
        return Turn([1], Completion([2], [0.0]), reward=float(draw(4)), observation=text, state_key=key)

    played = [Trajectory([turn() for _ in range(1 + draw(4))], Stop.DONE) for _ in range(8)]
    return [Group("a", played[:4]), Group("b", played[4:])]


def with_keys(groups: list[Group], key: Callable[[Turn], str]) -> list[Group]:
    return [
        replace(g, trajectories=[
            replace(t, turns=[replace(turn, state_key=key(turn)) for turn in t.turns]) for t in g.trajectories
        ])
        for g in groups
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_the_anchor_text_compares_turns_with_the_same_observation(seed):
    groups = episodes(random.Random(seed).randrange)
    by_text = GiGPO(anchor="text")(groups)
    assert by_text == GiGPO()(with_keys(groups, lambda turn: turn.observation))
    assert by_text != GiGPO(anchor="state")(groups) == GiGPO()(groups)


def test_two_states_that_look_alike_are_one_by_text_and_two_by_state():
    def turn(reward: float, key: str, picture: bytes = b"") -> Turn:
        images = (b"earlier", picture) if picture else ()
        shown = Completion([2], [0.0])
        return Turn([1], shown, reward=reward, observation="a drawer", state_key=key, images=images)

    def step_parts(first: Turn, second: Turn, **options: Any) -> list[float]:
        group = Group("t", [Trajectory([first], Stop.DONE), Trajectory([second], Stop.DONE)])
        return [a for [a] in GiGPO(episode_weight=0.0, divide_by_std=False, **options)([group])]

    hidden = turn(1.0, "mug inside"), turn(0.0, "empty")
    assert step_parts(*hidden) == [0.0, 0.0]
    assert step_parts(*hidden, anchor="text") == [0.5, -0.5]
    assert step_parts(turn(1.0, "", b"one"), turn(0.0, "", b"two"), anchor="text") == [0.0, 0.0]
    assert step_parts(turn(1.0, "", b"one"), turn(0.0, "", b"one"), anchor="text") == [0.5, -0.5]
    assert anchor_of(Turn([1], Completion([2], [0.0])), "text") == ""


def test_the_anchor_is_a_setting_that_algorithms_without_states_do_not_look_at():
    text = ["algorithm.anchor=text"]
    assert algorithm_of(load(None, ["algorithm.name=spear-dr-bot-gigpo", *text])).advantages.anchor == "text"
    for name in ("grpo", "dr-bot-grpo", "rloo"):
        with_it = algorithm_of(load(None, [f"algorithm.name={name}", *text]))
        assert with_it == algorithm_of(load(None, [f"algorithm.name={name}"]))
    for preset in ("paper-alfworld", "paper-webshop", "paper-sokoban"):
        assert algorithm_of(load(preset)).advantages.anchor == "text"
        algorithm_of(load(preset, ["algorithm.name=spear-dr-bot-grpo"]))
    assert algorithm_of(load("quickstart", ["algorithm.name=gigpo"])).advantages.anchor == "state"


def test_replayed_step_parts_use_the_same_anchor():
    names = ["algorithm.name=spear-gigpo", "algorithm.anchor=text", "algorithm.imitation.keep_step_part=true"]
    assert algorithm_of(load(None, names)).imitation.step_parts.anchor == "text"


# Dr.BoT's filters


FILTERS = {
    "overlong": Overlong(),
    "void": Void(),
    "repetitive": Repetitive(),
    "unreadable": Unreadable(),
    "flat_groups": FlatGroups(),
}


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_has_a_switch_that_leaves_out_that_filter_alone(name):
    run = ["algorithm.name=dr-bot-gigpo", "algorithm.max_length=1024"]
    algorithm = algorithm_of(load(None, [*run, f"algorithm.filters.{name}=false"]))
    assert algorithm.filters == tuple(kept for other, kept in FILTERS.items() if other != name)
    assert replace(algorithm, filters=()) == replace(algorithm_of(load(None, run)), filters=())
    assert dr_bot(gigpo(), **{name: False}).filters == algorithm.filters
    assert dr_bot(gigpo()).filters == tuple(FILTERS.values())


def test_without_dr_bot_the_filters_switches_mean_nothing():
    off = [f"algorithm.filters.{name}=false" for name in FILTERS]
    assert algorithm_of(load(None, ["algorithm.name=gigpo", *off])) == algorithm_of(
        load(None, ["algorithm.name=gigpo"])
    )


# Sokoban


def test_the_published_rooms_take_about_three_moves_and_every_one_can_be_solved():
    """gym_sokoban 0.0.6 gives 3.1 to 3.5 in samples of 500 rooms of 6 x 6 with one box; our level easy 7.3."""
    lengths = []
    for seed in range(400):
        level = generated_level(PUBLISHED, seed)
        assert level.room.targets.isdisjoint((level.start.player, *level.start.boxes))
        lengths.append(len(optimal_moves(level)))
    assert 2.9 < fmean(lengths) < 3.8
    assert min(lengths) == 1


def test_the_published_panel_is_recorded_and_no_room_is_in_two_splits():
    panels = {split: sokoban.tasks(split, rooms="published") for split in sokoban.SPLITS}
    assert {split: len(panel) for split, panel in panels.items()} == sokoban.SPLITS
    rooms = [{content_hash(task.make_env().reset().state_key) for task in panel} for panel in panels.values()]
    assert len(set().union(*rooms)) == sum(map(len, rooms))
    assert panels["test"][0].id == "sokoban/published/test/00000"
    assert {task.family for task in panels["train"]} == {"published"}


@pytest.mark.slow
def test_the_published_panel_is_what_the_generator_gives():
    from spear_rl.envs.shared.generated_panels import recorded_manifest
    from spear_rl.envs.sokoban.panel import MANIFEST, _manifest

    assert recorded_manifest(MANIFEST)["published"] == _manifest(PUBLISHED)


def test_published_rooms_of_another_size_can_be_had_but_no_number_of_pushes(monkeypatch):
    from spear_rl.envs.shared import generated_panels

    monkeypatch.setattr(generated_panels, "SPLITS", {"train": 20, "validation": 2, "test": 2})
    panel = sokoban.tasks("train", rooms="published", width=8, num_boxes=2)
    assert panel[0].id == "sokoban/published-8x8-2/train/00000"
    assert all(task.demonstrate(0) for task in panel)
    with pytest.raises(OptionError, match=r"rooms: .* leave out min_pushes"):
        sokoban.tasks("train", rooms="published", min_pushes=2)


def test_published_symbols_show_the_room_alone():
    task = sokoban.tasks("train", rooms="published", symbols="published", grid="compact", max_tasks=1)[0]
    plain = sokoban.tasks("train", rooms="published", grid="compact", max_tasks=1)[0]
    env, usual = task.make_env(), plain.make_env()
    pairs = {"#": "#", "-": "_", ".": "O", "*": "\u221a", "$": "X", "@": "P", "+": "S", "\n": "\n"}
    seen, known = env.reset(), usual.reset()
    for move in task.demonstrate(0):
        assert seen.text == "".join(pairs[symbol] for symbol in known.state_key)
        assert seen.state_key == known.state_key
        seen, known = env.step(move).observation, usual.step(move).observation
    assert "\u221a" in seen.text
    assert "X box" in task.instructions
    assert "$ box" in plain.instructions


@pytest.mark.parametrize(
    ("command", "most", "strict", "substring"),
    [
        ("right", 1, ["right"], ["right"]),
        ("go right", 1, [], ["right"]),
        ("right || up", 1, [], ["right"]),
        ("right || up", 2, ["right", "up"], ["right", "up"]),
        ("right||up ||", 5, ["right", "up"], ["right", "up"]),
        ("right || up || left", 2, ["right", "up"], ["right", "up"]),
        ("right || jump || left", 5, [], ["right", "left"]),
        ("step left || then up", 5, [], ["left", "up"]),
        ("stay", 5, [], []),
        ("||", 5, [], []),
        ("", 5, [], []),
    ],
)
def test_a_turn_s_moves_are_read_strictly_or_by_substring(command, most, strict, substring):
    assert moves_in(command, most=most) == strict
    assert moves_in(command, parse="substring", most=most) == substring


@given(seed=st.integers(0, 200), moves=st.lists(st.sampled_from(DIRECTIONS), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_several_moves_in_one_turn_are_those_moves_one_by_one(seed, moves):
    level = generated_level(PUBLISHED, seed)
    one, many = SokobanEnv(level), SokobanEnv(level, moves_per_turn=6)
    one.reset()
    many.reset()
    results = []
    for move in moves:
        results.append(one.step(f"<action>{move}</action>"))
        if results[-1].done:
            break
    together = many.step("<action>" + " || ".join(map(str.title, moves)) + "</action>")
    assert together.observation.state_key == results[-1].observation.state_key
    assert together.reward == pytest.approx(sum(result.reward for result in results))
    assert (together.done, together.success) == (results[-1].done, results[-1].success)
    assert together.used_tool == any(result.used_tool for result in results)
    assert together.action == " || ".join(moves)


def test_the_paper_s_preset_has_the_published_rooms_and_symbols():
    config = load("paper-sokoban", ["task.options.observation=text"])
    task = tasks_of(config, "validation", count=1)[0]
    assert task.id.startswith("sokoban/published/")
    assert "O target" in task.instructions
    env = task.make_env()
    env.reset()
    assert env.step("<think>hm</think><action>I go up</action>").invalid == ""


def test_settings_of_these_points_are_refused_by_name_where_they_are_wrong():
    for setting in ("rollout.history=thoughts", "algorithm.anchor=room", "algorithm.filters.void=maybe"):
        with pytest.raises(ConfigError, match=setting.partition("=")[0]):
            load(None, [setting])
    for options in ({"invalid": "lax"}, {"invalid": 3}):
        with pytest.raises(OptionError, match="invalid"):
            household.tasks("train", **options)
    for options in ({"parse": "x"}, {"symbols": "x"}, {"rooms": "x"}, {"moves_per_turn": 0}):
        with pytest.raises(OptionError, match=next(iter(options))):
            sokoban.tasks("train", **options)


@pytest.mark.parametrize("preset", [name for name in presets() if name.startswith("paper-")])
def test_the_papers_presets_clip_higher_with_dr_bot_and_not_without_it(preset):
    names = {"spear-dr-bot-gigpo": (0.2, 0.28, 10.0), "spear-gigpo": (0.2, 0.2, None), "grpo": (0.2, 0.2, None)}
    for name, clips in names.items():
        loss = algorithm_of(load(preset, [f"algorithm.name={name}"])).loss
        assert (loss.clip_low, loss.clip_high, loss.dual_clip) == clips


def test_every_ablation_of_the_paper_index_is_one_setting_that_changes_the_algorithm():
    page = (Path(__file__).parent.parent / "docs" / "paper_index.md").read_text("utf-8")
    table = page.partition("## Ablations")[2].partition("The paper's own table")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`algorithm." in line]
    assert len(rows) >= 15
    for setting in re.findall(r"`(algorithm\.[\w.]+=[\w.-]+)`", "\n".join(rows)):
        assert algorithm_of(load("paper-alfworld", [setting])) != algorithm_of(load("paper-alfworld")), setting
