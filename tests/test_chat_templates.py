"""Chat templates of the families people use: every layout renders, sampled tokens stay, thoughts are handled."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest

from spear_rl.engines.models.prepare import all_end_ids
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.errors import ConfigError
from spear_rl.rollout import ChatRenderer, Observation, StepResult, Task, collect_groups
from spear_rl.rollout.collect import demonstration
from spear_rl.rollout.rendering.conversation import merged, tool_results
from spear_rl.rollout.rendering.renderer import LAYOUTS
from spear_rl.train.step import collate
from spear_rl.types import Completion

FOLDER = Path(__file__).parent / "chat_templates"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
ENDS = {
    "llama3": "<|eot_id|>",
    "gemma2": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "mistral": "</s>",
    "llama2": "</s>",
}
STARTS = {"llama3": "<|begin_of_text|>", "gemma2": "<bos>", "gemma3": "<bos>", "mistral": "<s>", "llama2": "<s>"}
EOS = {"gemma2": "<eos>", "gemma3": "<eos>"}
"""End tokens that are not the one that ends a turn; else they are the same."""
TOKENS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"]
TOKENS += ["<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<s>", "</s>", "[INST]", "[/INST]"]


class Clock(datetime):
    """A clock that stands still, for templates that ask transformers for today's date."""

    today = datetime(2024, 7, 26)

    @classmethod
    def now(cls, *_: object) -> datetime:
        return cls.today


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> type[Clock]:
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(Clock, "today", Clock.today)
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    return Clock


@cache
def tokenizer_of(family: str, special_tags: bool = False):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(TOKENS)
    backend.add_tokens([AddedToken(tag, special=special_tags) for tag in ("<think>", "</think>")])
    end = ENDS.get(family, "<|im_end|>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS.get(family, end), bos_token=STARTS.get(family), pad_token="<|im_start|>"
    )
    tokenizer.chat_template = (FOLDER / f"{family}.jinja").read_text()
    return tokenizer


class Game:
    """Three turns; the observation says what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def reset(self) -> Observation:
        return Observation("You see a desk.", state_key="0", choices=("look", "open"))

    def step(self, action: str) -> StepResult:
        self.told.append(action)
        done = len(self.told) == 3
        return StepResult(Observation(f"Told: {action}", state_key=str(len(self.told))), reward=float(done), done=done)

    def close(self) -> None:
        pass


def task_of(games: list[Game], *, role: str = "user", **options: object) -> Task:
    def make() -> Game:
        games.append(Game())
        return games[-1]

    known = {"instructions": "Obey the rules of the house.", "demonstrate": lambda seed: ["look", "open", "look"]}
    return Task("t", make, instructions_role=role, **(known | options))


class Scripted:
    """Answers with given texts, each ended by the turn's end token."""

    def __init__(self, renderer: ChatRenderer, tokenizer, texts: list[str]) -> None:
        self.renderer, self.tokenizer, self.texts, self.prompts = renderer, tokenizer, texts, []

    def generate(self, prompts):
        out = []
        for prompt in prompts:
            self.prompts.append(list(prompt))
            text = self.texts[(len(self.prompts) - 1) % len(self.texts)]
            ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.renderer.end_id]
            out.append(Completion(ids, [-0.5] * len(ids)))
        return out


def played(family: str, layout: str, *, role: str = "user", texts: list[str], **options: object):
    """(the episode, the prompts, what the environment was told, the tokenizer)."""
    tokenizer, games = tokenizer_of(family), []
    renderer = ChatRenderer(tokenizer, **options)
    generator = Scripted(renderer, tokenizer, texts)
    [group] = collect_groups(
        [task_of(games, role=role)],
        group_size=1,
        generator=generator,
        renderer=renderer,
        max_turns=5,
        step=0,
        layout=LAYOUTS[layout],
    )
    return group.trajectories[0], generator.prompts, games[0].told, tokenizer


def rendered(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_renders_with_every_family(family, layout, role):
    episode, prompts, told, tokenizer = played(family, layout, role=role, texts=["look"])
    assert told == ["look"] * 3
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    assert all("Obey the rules of the house." in text for text in texts), "instructions are in every prompt"
    assert all(text.count("Obey the rules") == 1 for text in texts)
    assert "Told: look" in texts[1]
    start = STARTS.get(family)
    assert all(start is None or family == "llama2" or text.count(start) == 1 for text in texts), "one beginning token"
    rows = collate([episode], [[1.0] * 3], pad_id=0).input_ids
    assert len(rows) == (1 if layout == "chat" else 3)
    if layout == "chat":
        for turn, prompt in zip(episode.turns, prompts[1:], strict=False):
            before = [*turn.prompt_ids, *turn.completion.token_ids]
            assert prompt[: len(before)] == before, "sampled tokens stay as they are"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3_thinking", "llama2")])
def test_a_growing_chat_without_thoughts_is_what_the_template_says(family):
    _, prompts, _, tokenizer = played(family, "chat", texts=["look", "open"])
    first = "Obey the rules of the house.\n\nYou see a desk.\nPossible actions: look; open"
    messages = [{"role": "user", "content": first}]
    for turn, action in zip(prompts, ["look", "open", "look"], strict=True):
        assert tokenizer.decode(turn) == rendered(tokenizer, messages).replace("[/INST] ", "[/INST]")
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": f"Told: {action}"}]


@pytest.mark.parametrize(("family", "date"), [("llama3", "26 Jul 2024"), ("smollm3", "26 July 2024")])
def test_prompts_do_not_depend_on_the_day(family, date, clock):
    tokenizer, messages = tokenizer_of(family), [{"role": "user", "content": "?"}]
    renderer = ChatRenderer(tokenizer)
    prompt, reply = renderer.prompt(messages), renderer.extended([], [], "over")
    assert date in tokenizer.decode(prompt)
    clock.today = datetime(2031, 1, 5)
    assert " 2031" in rendered(tokenizer, messages), "the template itself asks for the date"
    for own in (renderer, ChatRenderer(tokenizer)):
        assert own.prompt(messages) == prompt
        assert own.extended([], [], "over") == reply


def test_a_blank_before_the_end_token_does_not_end_an_answer_twice():
    _, prompts, _, tokenizer = played("llama2", "chat", texts=["look"])
    assert tokenizer.decode(prompts[1]).count("</s>") == 1
    assert "look</s><s>[INST] Told: look" in tokenizer.decode(prompts[1])


THOUGHT = "<think>\nThe desk may be full.\n</think>\n\n"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3", "smollm3", "qwen2_5"])
def test_thoughts_reach_neither_the_environment_nor_a_later_prompt_of_its_own(family, layout):
    episode, prompts, told, tokenizer = played(family, layout, texts=[f"{THOUGHT}look"])
    assert told == ["look"] * 3
    assert all(turn.text.startswith("<think>") for turn in episode.turns), "the record keeps them"
    is_shown = "may be full" in tokenizer.decode(prompts[1])
    assert is_shown is (layout == "chat"), "a growing chat keeps the tokens that were sampled"
    rows = collate([episode], [[1.0] * 3], pad_id=0).input_ids
    assert len(rows) == (1 if layout == "chat" else 3)


def test_an_environment_that_asks_for_thoughts_gets_them():
    tokenizer, games = tokenizer_of("qwen3"), []
    renderer = ChatRenderer(tokenizer)
    text = f"{THOUGHT}<action>look</action>"
    collect_groups(
        [task_of(games, answer_format="<think></think><action>{action}</action>")],
        group_size=1,
        generator=Scripted(renderer, tokenizer, [text]),
        renderer=renderer,
        max_turns=5,
        step=0,
    )
    assert games[0].told == [text] * 3


@pytest.mark.parametrize(
    ("family", "thinking", "ending"),
    [
        ("qwen3", None, "<|im_start|>assistant\n"),
        ("qwen3", True, "<|im_start|>assistant\n"),
        ("qwen3", False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("smollm3", None, "<|im_start|>assistant\n"),
        ("smollm3", False, "<|im_start|>assistant\n<think>\n\n</think>\n"),
    ],
)
def test_the_switch_for_thinking_reaches_every_prompt(family, thinking, ending):
    _, prompts, told, tokenizer = played(family, "chat", texts=["look"], thinking=thinking)
    assert all(tokenizer.decode(prompt).endswith(ending) for prompt in prompts)
    assert told == ["look"] * 3
    if family == "smollm3":
        assert ("/no_think" in tokenizer.decode(prompts[0])) is (thinking is False)


@pytest.mark.parametrize("family", ["qwen2_5", "llama3", "gemma3", "mistral", "smollm2"])
def test_a_switch_that_the_template_lacks_is_refused(family):
    with pytest.raises(ConfigError, match=r"rollout.thinking: the model's chat template has no such switch"):
        ChatRenderer(tokenizer_of(family), thinking=False)


def test_where_the_prompt_opens_a_thought_an_answer_closes_it():
    tokenizer, games = tokenizer_of("qwen3_thinking"), []
    renderer = ChatRenderer(tokenizer)
    assert tokenizer.decode(renderer.prompt([{"role": "user", "content": "?"}])).endswith("<think>\n")
    shown = demonstration(task_of(games), renderer=renderer, tagged=True, seed=0)
    assert games[-1].told == ["look", "open", "look"]
    assert tokenizer.decode(shown.turns[0].completion.token_ids) == "</think>\n\nlook<|im_end|>"
    _, prompts, told, _ = played("qwen3_thinking", "turns", texts=["hm, a desk\n</think>\n\nlook"])
    assert told == ["look"] * 3
    assert "hm, a desk" not in tokenizer.decode(prompts[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_ends_with_the_templates_end_token_and_generation_stops_there(family):
    tokenizer = tokenizer_of(family)
    renderer, end = ChatRenderer(tokenizer), ENDS.get(family, "<|im_end|>")
    assert tokenizer.decode(renderer.answer("look")[-1:]) == end
    ends = all_end_ids(tiny_model("tiny-xs", tokenizer, seed=0), tokenizer)
    assert {tokenizer.convert_tokens_to_ids(end), tokenizer.eos_token_id} <= set(ends)


def test_tags_of_thoughts_that_are_special_tokens_are_not_lost():
    tokenizer = tokenizer_of("qwen3", special_tags=True)
    ids = tokenizer.encode("<think>hm</think>look<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hmlook"
    assert ChatRenderer(tokenizer).parse(ids) == "<think>hm</think>look"


def test_a_template_that_drops_the_system_message_gets_it_in_the_users():
    _, prompts, _, tokenizer = played("llama2", "chat", role="system", texts=["look"])
    assert tokenizer.decode(prompts[0]).startswith("<s>[INST] Obey the rules of the house.\n\nYou see a desk.")


def test_a_conversation_that_a_template_cannot_show_is_one_sentence():
    renderer = ChatRenderer(tokenizer_of("gemma3"))
    with pytest.raises(ConfigError, match="its chat template cannot show this conversation: Conversation roles must"):
        renderer.prompt([{"role": "assistant", "content": "a"}])
    assert renderer.prompt([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


def test_a_conversation_that_is_merged_leaves_later_ones_as_they_are():
    tokenizer = tokenizer_of("smollm3")
    renderer = ChatRenderer(tokenizer)
    user = {"role": "user", "content": "?"}
    cut = renderer.prompt([{"role": "system", "content": "Answer in <think></think>."}, user])
    assert "user\nAnswer in <think></think>." in tokenizer.decode(cut), "the template would cut it"
    plain = [{"role": "system", "content": "Be good."}, user]
    assert renderer.prompt(plain) == ChatRenderer(tokenizer).prompt(plain)


def test_a_tokenizer_with_several_templates_uses_its_default():
    import copy

    tokenizer = copy.deepcopy(tokenizer_of("qwen3"))
    single, messages = tokenizer.chat_template, [{"role": "user", "content": "?"}]
    expected = ChatRenderer(tokenizer_of("qwen3"), thinking=False).prompt(messages)
    tokenizer.chat_template = {"default": single, "tool_use": "{{ 'tools' }}"}
    assert ChatRenderer(tokenizer, thinking=False).prompt(messages) == expected
    tokenizer.chat_template = {"rag": single, "tool_use": "{{ 'tools' }}"}
    with pytest.raises(ConfigError, match="its chat template cannot show this conversation"):
        ChatRenderer(tokenizer).prompt(messages)


def test_merged_messages_alternate_and_lose_nothing():
    messages = [("system", "a"), ("user", "b"), ("user", "c"), ("assistant", "d"), ("assistant", "e"), ("system", "f")]
    out = merged([{"role": role, "content": text} for role, text in messages])
    assert [(m["role"], m["content"]) for m in out] == [
        ("user", "a\n\nb\n\nc"),
        ("assistant", "d\n\ne"),
        ("user", "f"),
    ]


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_fixtures_show_tools_and_defaults_as_published(family):
    tokenizer, messages = tokenizer_of(family), [{"role": "user", "content": "?"}]
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    assert '"look"' in rendered(tokenizer, messages, tools=[tool])
    assert "# Tools" not in rendered(tokenizer, messages)
    assert ("default assistant" in rendered(tokenizer, messages)) is (family == "qwen2_5")


@pytest.mark.parametrize("thinking", [None, False])
def test_the_setting_reaches_the_renderer_of_a_run(thinking):
    from spear_rl.app.build.rollout import Player
    from spear_rl.app.config import load

    overrides = ["task.env=lookup"] + ([] if thinking is None else ["rollout.thinking=false"])
    with Player(load(None, overrides), tokenizer_of("qwen3")) as player:
        prompt = player.renderer.prompt([{"role": "user", "content": "?"}])
    assert tokenizer_of("qwen3").decode(prompt).endswith("</think>\n\n") is (thinking is False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('one question alone') if messages | length > 1 else messages[0]['content'] }}",
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>' + m['content'] }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_say_how_an_answer_ends_leaves_it_to_the_tokenizer(template):
    import copy

    tokenizer = copy.deepcopy(tokenizer_of("qwen3"))
    tokenizer.chat_template = template
    renderer = ChatRenderer(tokenizer)
    assert renderer.answer("look")[-1] == tokenizer.eos_token_id
    assert renderer.prompt([{"role": "user", "content": "?"}])


SCHEMA = {"type": "object", "properties": {"query": {"type": "string", "description": "What."}}, "required": ["query"]}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": SCHEMA}}
NEEDS_CALLS = (
    "{% for m in messages %}{% if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('no id') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def with_tools(replies: list[str]) -> Task:
    class Tools(Game):
        def reset(self) -> Observation:
            return Observation("You see a desk.")

        def step(self, action: str) -> StepResult:
            self.told.append(action)
            return StepResult(Observation(replies[len(self.told) - 1]), done=len(self.told) == len(replies))

    return Task("t", Tools, instructions="Obey the rules.", instructions_role="system", tools=(json.dumps(TOOL),))


def prompts_of(tokenizer, texts, replies):
    renderer = ChatRenderer(tokenizer)
    generator = Scripted(renderer, tokenizer, texts)
    task = with_tools(replies)
    collect_groups([task], group_size=1, generator=generator, renderer=renderer, max_turns=5, step=0,
                   layout=LAYOUTS["chat"])  # fmt: skip
    return [tokenizer.decode(prompt) for prompt in generator.prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_are_described_by_the_template_where_it_can_and_else_in_words(family):
    [first, *_] = prompts_of(tokenizer_of(family), ["done"], ["over"])
    template = (FOLDER / f"{family}.jinja").read_text()
    assert "look_up" in first
    assert "Obey the rules." in first
    assert ("To call one, write" in first) == ("tools" not in template), "described once, by one of the two"
    assert first.count('"look_up"') == 1


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_prompts_with_tools_are_what_the_template_says(family):
    tokenizer, call = tokenizer_of(family), '<tool_call>\n{"name": "look_up"}\n</tool_call>'
    results = ["a desk", "two\n\nlines"]
    reply = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    first, second = prompts_of(tokenizer, [call, "done"], [reply, "over"])
    messages = [{"role": "system", "content": "Obey the rules."}, {"role": "user", "content": "You see a desk."}]
    assert first == rendered(tokenizer, messages, tools=[TOOL])
    messages += [{"role": "assistant", "content": call}, *({"role": "tool", "content": text} for text in results)]
    assert second.rpartition(call)[2] == rendered(tokenizer, messages, tools=[TOOL]).rpartition(call)[2]


def test_a_template_that_wants_calls_before_results_gets_them_as_the_users_text():
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = NEEDS_CALLS
    reply = "<tool_response>\na desk\n</tool_response>"
    first, second = prompts_of(tokenizer, ["look_up()", "done"], [reply, "over"])
    assert '"look_up"' in first
    assert f"<|im_start|>user\n{reply}<|im_end|>" in second


def test_a_reply_that_is_not_results_alone_stays_the_users():
    assert tool_results("<tool_response>\na\n</tool_response>\nand more") == []
    assert tool_results("<tool_response>\nunclosed") == []
    assert [message["content"] for message in tool_results("<tool_response>\na\n</tool_response>")] == ["a"]
