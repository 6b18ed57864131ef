"""`spear eval --prompting`: worked examples and retries with reflections, around endpoints and models."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

import test_eval_endpoint
from spear_rl.app.build.prompting import Prompted, PromptOptions
from spear_rl.app.build.rollout import Player, tasks_of
from spear_rl.app.config import load
from spear_rl.envs import lookup
from spear_rl.errors import ConfigError
from spear_rl.rollout import LAYOUTS, InProcess, Observation, StepResult, Task
from spear_rl.rollout.prompting.examples import Example, ExampleTurn, examples_in, expert_examples
from spear_rl.rollout.prompting.layout import MAX_REFLECTIONS, PromptedLayout, worked_answer
from spear_rl.rollout.prompting.reflexion import play_trials, reflection_in, reflection_messages, transcript
from spear_rl.rollout.rendering.renderer import MessageRenderer
from spear_rl.train.evaluate import wilson_interval
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

server, completed, good_player = test_eval_endpoint.server, test_eval_endpoint.completed, test_eval_endpoint.good_player

LESSON = "Next time I look before I answer."
SMALL = ["--set", "rollout.max_new_tokens=4", "--set", "rollout.max_turns=3"]


def asks_for_reflection(request: dict) -> bool:
    return "did not succeed" in request["messages"][0]["content"]


def thoughtful(request: dict) -> str:
    """Solves lookup, with a thought before every answer."""
    return f"<think>hm, 5?</think>\n{good_player(request)}"


def learner(request: dict) -> tuple[int, dict, dict]:
    """Guesses wrongly until it reads its own reflection."""
    if asks_for_reflection(request):
        return completed(f"<think>well</think>{LESSON}")
    return completed(thoughtful(request) if LESSON in request["messages"][0]["content"] else "<think>!</think>zebra")


@pytest.fixture
def result_of(spear, server, tmp_path):
    def call(*arguments: object, policy: str = "") -> dict:
        out = tmp_path / "eval.json"
        model = [] if policy else ["--model", "m"]
        code, text = spear("eval", policy or server.url, "--env", "lookup", *model, *arguments, "--out", out)
        assert code == 0, text
        return json.loads(out.read_text()) | {"printed": text}

    return call


# ReAct


def test_a_react_prompt_has_instructions_then_examples_then_the_task(server, result_of):
    server.answer = lambda request: completed(thoughtful(request))
    result = result_of("--tasks", 1, "--prompting", "react", "--shots", 1)
    assert result["success"] == 1.0
    [source] = result["prompting"]["examples"]["red"]
    digit = next(task for task in lookup.tasks("train") if task.id == source).demonstrate.args[1]
    assert server.requests[0]["messages"] == [
        {
            "role": "user",
            "content": f"""{lookup.INSTRUCTIONS}

Think before every action. Write each answer in this form: <think>your thought</think>your action

First a worked example, from other tasks.

Example 1
Observation: red code ?
Answer: <think>I have read the task. The next step is "look".</think>look
Observation: red code {digit}
Answer: <think>I see "red code {digit}". The last step is "{digit}".</think>{digit}

Now your task.

red code ?
Possible actions: look; 0; 1; 2; 3; 4; 5; 6; 7; 8; 9""",
        }
    ]
    assert "prompting react, worked examples: 1" in result["printed"]


@pytest.mark.parametrize("detail", ["full", "short"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_prompt_of_every_layout_shows_the_examples_and_thoughts_are_not_part_of_the_action(
    server,
    result_of,
    layout,
    detail,
):
    server.answer = lambda request: completed(thoughtful(request))
    settings = ["--set", f"rollout.layout={layout}", "--set", f"rollout.detail={detail}"]
    result = result_of("--prompting", "react", *settings)
    assert (result["success"], result["turns"], result["prompting"]["name"]) == (1.0, 2.0, "react")
    for request in server.requests:
        first = request["messages"][0]["content"]
        assert first.count("\nExample ") == 2
        assert (lookup.INSTRUCTIONS in first) == (detail == "full")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("env", ["lookup", "household"])
def test_examples_are_solved_training_tasks_of_the_same_family_and_depend_on_the_seed_alone(env, seed):
    config = load(None, [f"task.env={env}", f"run.seed={seed}"])
    draw = random.Random(seed)
    split, count = draw.choice(["validation", "test"]), draw.randrange(1, 4)
    held_out, train = tasks_of(config, split), {task.id: task for task in tasks_of(config, "train")}

    def chosen(tasks) -> dict[str, list[str]]:
        with Player(config, renderer=MessageRenderer()) as player:
            about = Prompted(PromptOptions("react", shots=count), config, player, tasks, split).about()
        return about["prompting"]["examples"]

    examples = chosen(held_out)
    assert set(examples) == {task.family for task in held_out}
    for family, sources in examples.items():
        assert len(sources) == len(set(sources)) == count
        assert {train[source].family for source in sources} == {family}
    some = held_out[draw.randrange(len(held_out)) :]
    assert chosen(some) == {family: examples[family] for family in {task.family for task in some}}
    assert not {source for sources in examples.values() for source in sources} & {task.id for task in held_out}


def test_an_example_is_a_whole_episode_that_wins_when_it_is_replayed():
    config = load(None, ["task.env=household"])
    train = {task.id: task for task in tasks_of(config, "train")}
    families = sorted({task.family for task in train.values()})
    found = expert_examples(families, list(train.values()), count=2, excluded=frozenset(), seed=3, envs=InProcess())
    for example in (entry for entries in found.values() for entry in entries):
        env = train[example.source].make_env()
        seen, result = env.reset(), None
        for turn in example.turns:
            assert turn.observation == seen.text
            result = env.step(worked_answer(train[example.source], turn.thought, turn.action))
            seen = result.observation
        assert result is not None
        assert (result.success, result.invalid) == (True, "")


def test_a_task_that_is_evaluated_is_no_example_even_if_the_splits_overlap():
    tasks = lookup.tasks("train")
    for seed in range(5):
        excluded = frozenset(random.Random(seed).sample([task.id for task in tasks], 50))
        found = expert_examples(lookup.FAMILIES, tasks, count=3, excluded=excluded, seed=seed, envs=InProcess())
        assert not {example.source for entries in found.values() for example in entries} & excluded


def test_a_family_without_training_tasks_is_shown_others():
    reds = lookup.tasks("train", families=["red"])
    found = expert_examples(["red", "violet"], reds, count=2, excluded=frozenset(), seed=0, envs=InProcess())
    assert found["violet"] == found["red"]
    only = expert_examples(["violet"], reds, count=2, excluded=frozenset(), seed=0, envs=InProcess())
    assert len(only["violet"]) == 2


def test_an_environment_that_asks_for_thoughts_is_given_them(server, result_of):
    def answer(request: dict):
        return completed("<think>first</think><action>look</action>")

    server.answer = answer
    options = ["--env", "household", "--set", "task.options.invalid=published", "--set", "rollout.max_turns=2"]
    result = result_of("--prompting", "react", "--tasks", 2, *options)
    assert result["invalid_turns"] == 0.0
    shown = server.requests[0]["messages"][0]["content"]
    assert "<think>your thought</think><action>your action</action>" in shown
    assert "<think></think><action>" not in shown.replace("Think in <think></think>", "")


# Examples of the user

GIVEN = {"red": [{"observation": "red code ?", "thought": "Hidden.", "action": "look"}, {"action": "7"}]}


def test_examples_of_a_file_are_shown_as_they_are(server, result_of, tmp_path):
    (tmp_path / "e.json").write_text(json.dumps(GIVEN | {"*": [[{"thought": "Any.", "action": "look"}]] * 3}))
    result = result_of("--prompting", "react", "--examples", tmp_path / "e.json", "--tasks", 2, "--split", "train")
    texts = {request["messages"][0]["content"] for request in server.requests}
    red = next(text for text in texts if "red code" in text)
    assert "Observation: red code ?\nAnswer: <think>Hidden.</think>look\nAnswer: <think></think>7\n\nNow" in red
    assert next(text for text in texts if "green code" in text).count("<think>Any.</think>look") == 2
    assert result["prompting"]["examples"] == {"red": ["red[0]"], "green": ["*[0]", "*[1]"]}
    assert "worked examples of 'red': 1 instead of 2" in result["printed"]


def test_toml_and_json_say_the_same(tmp_path):
    (tmp_path / "e.json").write_text(json.dumps(GIVEN))
    (tmp_path / "e.toml").write_text(
        '[[red]]\nobservation = "red code ?"\nthought = "Hidden."\naction = "look"\n[[red]]\naction = "7"\n'
    )
    assert examples_in(str(tmp_path / "e.json")) == examples_in(str(tmp_path / "e.toml"))


def test_the_examples_of_the_documentation_can_be_read(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text("utf-8")
    [block] = re.findall(r"```text\n(\{.*?)```", page, re.DOTALL)
    (tmp_path / "e.json").write_text(block)
    examples = examples_in(str(tmp_path / "e.json"))
    assert {family: [len(e.turns) for e in found] for family, found in examples.items()} == {
        "pick_and_place_simple": [2],
        "*": [1],
    }


FAULTS = {
    "[]": "must be a table",
    "{": "is not valid JSON",
    '{"red": []}': "red must be a list of examples",
    '{"red": "look"}': "red must be a list of examples",
    '{"red": [[]]}': "red[0] must be a list of turns",
    '{"red": [["look"]]}': "red[0][0] must be a table of texts",
    '{"red": [{"action": 3}]}': "red[0][0] must be a table of texts",
    '{"red": [{"thought": "x"}]}': "red[0][0] has no action",
    '{"red": [{"action": "look", "act": "x"}]}': "unknown key 'act'",
    '{"blue": [{"action": "look"}]}': "has no example of 'red'",
    "\xff": "is not valid JSON",
}


@pytest.mark.parametrize("content", FAULTS)
def test_a_faulty_examples_file_is_one_sentence(spear, tmp_path, content):
    (tmp_path / "e.json").write_bytes(content.encode("latin-1"))
    ask = ("eval", "tiny-xs", "--env", "lookup", "--prompting", "react", "--examples")
    code, text = spear(*ask, tmp_path / "e.json")
    assert (code, len(text.strip().splitlines())) == (2, 1)
    assert FAULTS[content] in text
    code, text = spear(*ask, tmp_path / "none.json")
    assert (code, "none.json cannot be read" in text) == (2, True)


# Context


def layout_with(examples: list[Example], *, max_context: int | None, shots: int = 3) -> PromptedLayout:
    return PromptedLayout(
        LAYOUTS["chat"],
        thinks=True,
        examples={"red": examples},
        num_shots=shots,
        max_context=max_context,
        grows=True,
    )


class CharRenderer(MessageRenderer):
    """A token per character."""

    def prompt(self, messages) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]


def test_as_many_examples_are_shown_as_fit_and_never_more_than_the_context_holds():
    task = lookup.tasks("test")[0]
    renderer, first = CharRenderer(), [task.make_env().reset()]
    for seed in range(40):
        draw = random.Random(seed)
        turn = ExampleTurn("red code ?", "x" * draw.randrange(80), "look")
        examples = [Example(str(n), (turn,) * draw.randrange(1, 5)) for n in range(3)]
        limit = draw.randrange(150, 1500)
        layout = layout_with(examples, max_context=limit)
        least = len(layout_with(examples, max_context=None, shots=1)(renderer, task, first, []))
        if least > limit:
            with pytest.raises(ConfigError, match="not even one worked example fits"):
                layout(renderer, task, first, [])
            continue
        assert len(layout(renderer, task, first, [])) <= limit
        shown = layout.num_shown[task.id]
        assert 1 <= shown <= 3
        more = layout_with(examples, max_context=None, shots=shown + 1)(renderer, task, first, [])
        longest = max(len(e.turns) * len(f"Observation: red code ?\nAnswer: <think>{turn.thought}</think>look\n") - 1
                      for e in examples[: shown + 1])  # fmt: skip
        assert shown == 3 or len(more) + longest > limit, "one more would have fitted"
        for number in range(5):
            layout.reflect(task, f"note {number} " + "y" * draw.randrange(100))
        assert len(layout(renderer, task, first, [])) <= limit


def test_only_the_newest_reflections_are_shown():
    task, renderer = lookup.tasks("test")[0], MessageRenderer()
    layout = layout_with([], max_context=None)
    for number in range(6):
        layout.reflect(task, f"note {number}")
    text = renderer.messages(layout(renderer, task, [task.make_env().reset()], []))[0]["content"]
    assert re.findall(r"- note (\d)", text) == ["3", "4", "5"]
    assert MAX_REFLECTIONS == 3


def test_fewer_shots_are_noted_and_none_is_an_error(spear, result_of):
    ask = ["--tasks", 2, "--prompting", "react", "--shots", 3, *SMALL, "--set"]
    result = result_of(*ask, "rollout.max_context=400", policy="tiny-xs")
    assert set(result["prompting"]["examples_shown"].values()) <= {1, 2}
    assert "2 of 2 tasks had fewer than 3 worked examples" in result["printed"]
    code, text = spear("eval", "tiny-xs", "--env", "lookup", *ask, "rollout.max_context=60")
    assert (code, len(text.strip().splitlines())) == (2, 1)
    assert "rollout.max_context=60: not even one worked example fits before lookup/validation/064" in text


# Reflexion


@pytest.mark.parametrize("shots", [0, 2])
def test_a_policy_that_learns_from_its_reflection_solves_the_second_trial(server, result_of, shots):
    server.answer = (
        learner
        if shots
        else lambda request: completed(
            LESSON
            if asks_for_reflection(request)
            else good_player(request)
            if LESSON in request["messages"][0]["content"]
            else "zebra"
        )
    )
    result = result_of("--prompting", "reflexion", "--trials", 3, "--shots", shots, "--tasks", 8)
    low, high = wilson_interval(8, 8)
    assert result["trials"]["success@1"] == {"rate": 0.0, "low": 0.0, "high": 1 - low, "tasks": 8}
    assert result["trials"]["success@2"] == {"rate": 1.0, "low": low, "high": high, "tasks": 8}
    assert result["trials"]["success@3"] == result["trials"]["success@2"]
    assert (result["success"], result["episodes"], result["prompting"]["trials"]) == (1.0, 8, 3)
    for attempts in result["attempts"].values():
        assert [(a["trial"], a["success"], a.get("reflection")) for a in attempts] == [
            (1, False, LESSON),
            (2, True, None),
        ]
    for name in ("prompting reflexion", "success@1 0.0%", "success@2 100.0%", "success@3 100.0%"):
        assert name in result["printed"]
    kinds = Counter(asks_for_reflection(request) for request in server.requests)
    assert kinds == {True: 8, False: 8 * 3}, "a solved task is not played again"
    asked = next(request["messages"][0]["content"] for request in server.requests if asks_for_reflection(request))
    assert "zebra" in asked
    assert ("Example 1" in server.requests[0]["messages"][0]["content"]) == bool(shots)


def test_the_prompts_of_a_reflection_and_of_the_next_trial(server, result_of):
    server.answer = lambda request: completed(LESSON if asks_for_reflection(request) else "zebra")
    result_of("--prompting", "reflexion", "--trials", 2, "--shots", 0, "--tasks", 1)
    first, reflection, second = [request["messages"] for request in server.requests]
    task = f"red code ?\nPossible actions: {'; '.join(['look', *'0123456789'])}"
    assert first == [{"role": "user", "content": f"{lookup.INSTRUCTIONS}\n\n{task}"}]
    assert [message["role"] for message in reflection] == ["user"]
    assert (
        reflection[0]["content"]
        == f"""{lookup.INSTRUCTIONS}

You attempted the task below and did not succeed. This is what you saw and answered.

Observation: red code ?
Answer: zebra

After your last answer you saw: wrong

The attempt ended without success.

You will attempt the same task again from its beginning. In two to four sentences, say what went wrong and what \
you will do differently, with concrete steps. Write these sentences only, and no action."""
    )
    noted = f"You have tried this task before without success. What you noted after earlier attempts:\n- {LESSON}"
    assert second == [{"role": "user", "content": f"{lookup.INSTRUCTIONS}\n\n{noted}\n\nNow your task.\n\n{task}"}]


def test_success_per_trial_is_cumulative_and_each_task_stops_where_it_is_solved(server, result_of):
    needed = {"red": 0, "green": 1, "blue": 2, "gold": 9}

    def answer(request: dict):
        first = request["messages"][0]["content"]
        if asks_for_reflection(request):
            return completed("A note.")
        family = re.findall(r"(\w+) code", first)[-1]
        return completed(good_player(request) if first.count("- A note.") >= needed[family] else "zebra")

    server.answer = answer
    result = result_of("--prompting", "reflexion", "--tasks", 4, "--shots", 0)
    assert [result["trials"][f"success@{n}"]["rate"] for n in (1, 2, 3)] == [0.25, 0.5, 0.75]
    assert sorted(map(len, result["attempts"].values())) == [1, 2, 3, 3]
    assert result["success"] == 0.75
    assert result["by_family"]["gold"]["success"] == 0.0


def test_trials_have_other_seeds_and_reflections_have_no_stop_strings(server, result_of):
    server.answer = lambda request: completed("" if asks_for_reflection(request) else "zebra")
    result = result_of("--prompting", "reflexion", "--tasks", 1, "--shots", 0, "--set", 'rollout.stop=["</x>"]')
    played = [request for request in server.requests if not asks_for_reflection(request)]
    assert len({request["seed"] for request in played}) == 3
    assert len({json.dumps(request["messages"]) for request in played}) == 1, "an empty reflection changes nothing"
    assert not any("stop" in request for request in server.requests if asks_for_reflection(request))
    assert [row.get("reflection") for row in next(iter(result["attempts"].values()))] == ["", "", None]


def test_a_retry_that_is_lost_leaves_the_task_as_it_was(server, result_of):
    def answer(request: dict):
        if asks_for_reflection(request):
            return completed(LESSON)
        if LESSON in request["messages"][0]["content"] and "gold" in request["messages"][0]["content"]:
            return 500, b"boom", {"Retry-After": "0"}
        return learner(request)

    server.answer = answer
    result = result_of("--prompting", "reflexion", "--trials", 2, "--tasks", 4, "--parallel", 1)
    assert result["trials"]["success@2"]["rate"] == 0.75
    assert result["trials"]["success@2"]["tasks"] == 4
    assert result["failed_episodes"] == 1
    only = ["--set", "task.options.families=['gold']", "--tasks", 1]
    result = result_of("--prompting", "reflexion", "--trials", 2, *only)
    assert (result["success"], result["episodes"], result["failed_episodes"]) == (0.0, 1, 1)


def test_a_reflection_that_is_lost_does_not_end_the_evaluation(server, result_of):
    server.answer = lambda request: (
        (500, b"boom", {"Retry-After": "0"}) if asks_for_reflection(request) else completed("zebra")
    )
    result = result_of("--prompting", "reflexion", "--trials", 2, "--tasks", 1)
    assert [row.get("reflection") for row in next(iter(result["attempts"].values()))] == ["", None]


def test_trials_end_when_all_is_solved_or_lost():
    draws = random.Random(5)
    for _ in range(50):
        tasks = [Task(str(number), make_env=lambda: None) for number in range(draws.randrange(1, 6))]
        played: list[tuple[str, int, str]] = []
        num_trials = draws.randrange(1, 5)

        def play(chosen, trial, played=played):
            groups = []
            for task in chosen:
                fate = draws.choice(["solved", "failed", "lost"])
                played.append((task.id, trial, fate))
                turns = [] if fate == "lost" else [Trajectory([], Stop.DONE, success=fate == "solved")]
                groups.append(Group(task.id, turns, step=0, num_failed=fate == "lost"))
            return groups

        entries = play_trials(
            tasks, num_trials=num_trials, play=play, reflect=lambda failed, trial: [f"{trial}"] * len(failed)
        )
        for entry in entries:
            fates = [fate for task, _, fate in played if task == entry.task.id]
            assert len(fates) == len(entry.groups) <= num_trials
            assert "solved" not in fates[:-1]
            assert fates[0] != "lost" or len(fates) == 1
            assert fates[-1] == "solved" or fates[0] == "lost" or len(fates) == num_trials
            assert entry.solved_in == (len(fates) if fates[-1] == "solved" else None)
            assert len(entry.reflections) == fates[: num_trials - 1].count("failed")


def failed_episode(draw: random.Random) -> Trajectory:
    turns = [
        Turn([0], Completion([0], [0.0]), observation=f"seen {n} " + "o" * draw.randrange(3000), text=f"did {n}")
        for n in range(draw.randrange(1, 30))
    ]
    return Trajectory(turns, draw.choice([Stop.DONE, Stop.MAX_TURNS, Stop.OVERLONG]), success=False)


def test_a_transcript_keeps_the_first_and_the_last_turns_and_is_about_as_long_as_allowed():
    for seed in range(60):
        draw = random.Random(seed)
        episode, limit = failed_episode(draw), draw.randrange(200, 12_000)
        text = transcript(episode, limit)
        assert len(text) <= 2 * limit + 10
        assert "seen 0" in text
        shown = [int(number) for number in re.findall(r"did (\d+)", text)]
        if limit > 4000:
            assert shown[0] == 0
            assert shown[1:] == [*range(len(episode.turns))][len(episode.turns) - len(shown[1:]) :]
        [message] = reflection_messages(
            lookup.tasks("test")[0], episode, ending="The end.", earlier=["old note"], max_chars=limit
        )
        assert lookup.INSTRUCTIONS in message["content"]
        assert "- old note" in message["content"]


def test_a_reflection_is_one_line_without_thoughts_and_bounded():
    assert reflection_in("<think>hm\n</think> I  failed.\nLook first. ") == "I failed. Look first."
    assert reflection_in("<think>cut off") == "cut off"
    assert len(reflection_in("word " * 5000)) <= 1004


def test_a_model_of_this_machine_plays_react_and_reflexion_repeatably(result_of):
    run = partial(result_of, "--tasks", 3, *SMALL, policy="tiny-xs")
    plain, react = run(), run("--prompting", "react")
    assert "prompting" not in plain
    assert (react["episodes"], react["prompting"]["shots"]) == (3, 2)
    retried = run("--prompting", "reflexion", "--trials", 2, "--set", "rollout.max_context=700")
    assert retried["trials"]["success@1"]["rate"] <= retried["trials"]["success@2"]["rate"] == retried["success"]
    assert all(len(rows) == 1 + (not rows[0]["success"]) for rows in retried["attempts"].values())
    assert all(isinstance(rows[0].get("reflection", ""), str) for rows in retried["attempts"].values())
    assert retried == run("--prompting", "reflexion", "--trials", 2, "--set", "rollout.max_context=700")


# Mistakes


class Mute:
    def reset(self) -> Observation:
        return Observation("say something")

    def step(self, action: str) -> StepResult:
        return StepResult(Observation("no"), done=True)

    def close(self) -> None:
        pass


def mute_tasks(split: str) -> list[Task]:
    return [Task(f"mute/{split}", Mute)]


def losing_tasks(split: str) -> list[Task]:
    return [Task(f"losing/{split}", Mute, demonstrate=lambda seed: ["hm"])]


MISTAKES = {
    ("expert", "--prompting", "react"): "not expert",
    ("random", "--prompting", "reflexion"): "not random",
    ("tiny-xs", "--prompting", "cot"): "it is one of: none, react, reflexion",
    ("tiny-xs", "--shots", "1"): "need --prompting",
    ("tiny-xs", "--trials", "1"): "need --prompting",
    ("tiny-xs", "--prompting", "react", "--trials", "2"): "--trials is for --prompting reflexion",
    ("tiny-xs", "--prompting", "react", "--shots", "-1"): "--shots must be 0 or more",
    ("tiny-xs", "--prompting", "reflexion", "--trials", "0"): "--trials must be 1 or more",
    ("tiny-xs", "--prompting", "reflexion", "--episodes", "2"): "leave out --episodes and --samples",
    ("tiny-xs", "--prompting", "reflexion", "--samples", "2"): "leave out --episodes and --samples",
    ("tiny-xs", "--prompting", "react", "--split", "train"): "name another split",
    ("tiny-xs", "--prompting", "react", "--shots", "0", "--examples", "x.json"): "shows none of them",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_sentence(spear, arguments):
    code, text = spear("eval", *arguments, "--env", "lookup")
    assert (code, len(text.strip().splitlines())) == (2, 1)
    assert MISTAKES[arguments] in text


def test_an_environment_without_an_expert_needs_examples_or_no_shots(server, spear):
    ask = ("eval", server.url, "--model", "m", "--env")
    server.answer = lambda request: completed("x")
    code, text = spear(*ask, "test_eval_prompting:mute_tasks", "--prompting", "react")
    assert (code, "no task of the train split has an expert" in text) == (2, True)
    assert "--examples FILE" in text
    code, text = spear(*ask, "test_eval_prompting:losing_tasks", "--prompting", "react")
    assert (code, "the expert solved none of 1 training tasks" in text) == (2, True)
    code, text = spear(*ask, "test_eval_prompting:mute_tasks", "--prompting", "reflexion", "--shots", 0)
    assert code == 0, text
    assert not server.requests[-1]["messages"][0]["content"].startswith("Think")
