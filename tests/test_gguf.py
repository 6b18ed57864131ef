"""GGUF files as models: whole, in parts or in pieces, the logits of the weights they were written from."""

from __future__ import annotations

import hashlib
import struct
import sys
from pathlib import Path

import pytest
import torch

from spear_rl.engines.models import gguf as gguf_module
from spear_rl.engines.models.gguf import gguf_parts, is_gguf, read_gguf
from spear_rl.engines.models.load import model_by_name, model_in_folder
from spear_rl.errors import ConfigError, MissingExtraError

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV, INNER, LAYERS = 32, 4, 2, 64, 2
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def vocabulary() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*bytes_to_unicode().values(), "he", "ll", "hell", "hello", *SPECIAL, "<tool>"]


def plain_model(kind: str, *, tied: bool, seed: int = 0, **extra: object):
    """A random model of transformers."""
    import transformers

    name = {"qwen2": "Qwen2", "llama": "Llama", "qwen3": "Qwen3", "gemma3": "Gemma3Text"}[kind]
    extra = ({"head_dim": HIDDEN // HEADS} if kind in ("qwen3", "gemma3") else {}) | extra
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        **({"num_hidden_layers": LAYERS} | ({} if kind == "gemma3" else {"rope_theta": 10000.0}) | extra),
    )
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tensors_of(model, kind: str, *, head: bool, dtype: str = "F32") -> dict[str, tuple]:
    """Names and values as llama.cpp's converter writes them; llama's queries and keys have their rows permuted."""
    weights = {name: value.detach().float().numpy() for name, value in model.state_dict().items()}

    def permuted(value, heads: int):
        shape = value.shape
        return value.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)

    is_gemma = kind == "gemma3"  # its norms are written with 1 added, and have names of their own
    out = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"] + is_gemma,
    }
    if head:
        out["output.weight"] = weights["lm_head.weight"]
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm" if is_gemma else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    }  # fmt: skip
    for name, value in weights.items():
        if not name.startswith("model.layers."):
            continue
        _, _, number, rest = name.split(".", 3)
        layer, end = rest.rsplit(".", 1)
        if kind == "llama" and layer in ("self_attn.q_proj", "self_attn.k_proj"):
            value = permuted(value, HEADS if "q_proj" in layer else KV)
        out[f"blk.{number}.{parts[layer]}.{end}"] = value + (is_gemma and "norm" in layer)
    quant = getattr(gguf.GGMLQuantizationType, dtype)
    done = {}
    for name, value in out.items():
        is_matrix = value.ndim == 2 and dtype != "F32"
        done[name] = (gguf.quants.quantize(value, quant) if is_matrix else value, quant if is_matrix else None)
    return done


def write(
    path: Path, kind: str, tensors: dict[str, tuple], *, number: int = 0, count: int = 0, keys: dict | None = None,
    **ids: int,
) -> Path:  # fmt: skip
    """Write a file; `keys` are further metadata, or replace what is written here."""

    class Writer(gguf.GGUFWriter):
        def add_key_value(self, key, value, kind_of_value, sub_type=None):
            super().add_key_value(key, own.pop(key, value), kind_of_value, sub_type)

    own = dict(keys or {})
    writer = Writer(path, kind)
    if count:
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", 0)
    if number == 0:
        tokens = vocabulary()
        writer.add_name("a tiny model")
        writer.add_context_length(256)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(len(tokens))
        writer.add_key_length(HIDDEN // HEADS)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in tokens])
        writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
        writer.add_eos_token_id(tokens.index("<|im_end|>"))
        writer.add_bos_token_id(tokens.index("<|endoftext|>"))
        writer.add_pad_token_id(tokens.index("<|endoftext|>"))
        for name, token in ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}", token)
        writer.add_chat_template(CHAT)
        for name, value in list(own.items()):
            adds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
            adds |= {bool: writer.add_bool, list: writer.add_array}
            adds[type(value)](name, value)
    for name, (value, kind_of_tensor) in tensors.items():
        writer.add_tensor(name, value, raw_dtype=kind_of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model) -> torch.Tensor:
    ids = torch.tensor([[3, 17, 260, 9, 261, 44]])
    with torch.no_grad():
        return model.eval()(ids).logits.float()


def loaded(path: Path):
    return model_by_name(str(path), texts=list, seed=0)


def in_parts(folder: Path, model, count: int = 3) -> list[Path]:
    """What llama.cpp's gguf-split writes: metadata in the first part, tensors in all."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = list(tensors_of(model, "qwen2", head=False).items())
    size = -(-len(tensors) // count)
    files = [folder / f"model-{n + 1:05d}-of-{count:05d}.gguf" for n in range(count)]
    for n, file in enumerate(files):
        write(file, "qwen2", dict(tensors[n * size : (n + 1) * size]), number=n, count=count)
    return files


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_gives_the_logits_of_its_weights(tmp_path, kind, tied):
    model = plain_model(kind, tied=tied)
    path = write(tmp_path / "model.gguf", kind, tensors_of(model, kind, head=not tied))
    own, _ = loaded(path)
    assert torch.allclose(logits(own), logits(model), atol=1e-5)
    assert own.config.tie_word_embeddings is tied
    assert (own.get_input_embeddings().weight is own.get_output_embeddings().weight) is tied
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in own.parameters())


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


GEMMA = {"sliding_window": 32, "num_hidden_layers": 6}
GEMMA_KEYS = {"gemma3.attention.sliding_window": 32, "gemma3.rope.freq_base": 1e6, "gemma3.block_count": 6}


def wide_logits(model) -> torch.Tensor:
    """Of a sequence that is long enough to tell rotary positions and windows apart, with weights that are large."""
    with torch.no_grad():
        return model.eval()(torch.arange(200)[None] % 256).logits


def with_large_weights(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.tie_weights()
    return model


@pytest.mark.parametrize(
    ("kind", "settings", "keys"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
         {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                                       "original_max_position_embeddings": 64}},
         {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
          "qwen2.rope.scaling.original_context_length": 64}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("llama", {}, {"general.name": "mistral"}),
        ("gemma3", GEMMA, GEMMA_KEYS),
        ("gemma3", GEMMA | {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
         GEMMA_KEYS | {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}),
    ],
)  # fmt: skip
def test_scaled_positions_windows_and_biases_are_read(tmp_path, kind, settings, keys):
    model = with_large_weights(plain_model(kind, tied=True, **settings))
    own, _ = loaded(write(tmp_path / "m.gguf", kind, tensors_of(model, kind, head=False), keys=keys))
    assert torch.allclose(wide_logits(own), wide_logits(model), atol=1e-4)


@pytest.mark.parametrize("length", [64, 8192])
def test_the_rotary_positions_of_llama_3_are_read_from_their_factors(tmp_path, length):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = LLAMA3 | {"original_max_position_embeddings": length}
    model = with_large_weights(plain_model("llama", tied=True, head_dim=32, rope_parameters=settings))
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    factors = (10000.0 ** (-torch.arange(0, 32, 2) / 32) / frequencies).numpy()
    tensors = tensors_of(model, "llama", head=False) | {"rope_freqs.weight": (factors, None)}
    keys = {"llama.rope.dimension_count": 32}
    own, _ = loaded(write(tmp_path / "m.gguf", "llama", tensors, keys=keys))
    assert torch.allclose(wide_logits(own), wide_logits(model), atol=1e-4)
    assert own.config.rope_parameters["rope_type"] == "llama3"
    tensors["rope_freqs.weight"] = (factors[::-1].copy(), None)
    with pytest.raises(ConfigError, match="rotary positions are scaled in an unknown way"):
        loaded(write(tmp_path / "odd.gguf", "llama", tensors, keys=keys))


@pytest.mark.parametrize("said", [1, 3, 1 << 30])
def test_a_header_that_says_another_number_of_layers_is_refused(tmp_path, said):
    tensors = tensors_of(plain_model("qwen2", tied=True), "qwen2", head=False)
    path = write(tmp_path / "m.gguf", "qwen2", tensors, keys={"qwen2.block_count": said})
    with pytest.raises(ConfigError, match=f"is damaged: it has 2 layers, and its header says {said}"):
        loaded(path)


def test_half_precision_agrees_to_a_thousandth_in_bfloat16(tmp_path):
    model = plain_model("qwen2", tied=True).to(torch.float16).float()
    own, _ = loaded(write(tmp_path / "model.gguf", "qwen2", tensors_of(model, "qwen2", head=False, dtype="F16")))
    for either in (own, model):
        for parameter in either.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    assert torch.allclose(logits(own), logits(model), atol=1e-3)


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
def test_a_head_that_repeats_the_embeddings_is_tied_again(tmp_path, dtype):
    model = plain_model("qwen2", tied=True)
    tensors = tensors_of(model, "qwen2", head=True, dtype=dtype)
    if dtype != "F32":  # usual files hold the head in a finer form than the embeddings
        value = model.state_dict()["model.embed_tokens.weight"].numpy()
        coarse = gguf.GGMLQuantizationType.Q4_0
        tensors["token_embd.weight"] = (gguf.quants.quantize(value, coarse), coarse)
    path = write(tmp_path / "model.gguf", "qwen2", tensors)
    own, _ = loaded(path)
    assert own.config.tie_word_embeddings
    assert gguf_module.gguf_config(path).tie_word_embeddings, "or spear doctor would count the head"
    assert own.get_input_embeddings().weight is own.get_output_embeddings().weight
    distance = (own.get_output_embeddings().weight - model.get_output_embeddings().weight).norm()
    assert distance < 0.01 * model.get_output_embeddings().weight.norm(), "the finer of the two is kept"


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
def test_a_head_of_its_own_stays_even_if_it_is_close(tmp_path, dtype):
    model = plain_model("qwen2", tied=False)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        model.get_output_embeddings().weight.copy_(embeddings + 0.05 * embeddings.std() * torch.randn_like(embeddings))
    path = write(tmp_path / "model.gguf", "qwen2", tensors_of(model, "qwen2", head=True, dtype=dtype))
    own, _ = loaded(path)
    assert not own.config.tie_word_embeddings
    assert not gguf_module.gguf_config(path).tie_word_embeddings
    assert torch.allclose(logits(own), logits(model), atol=1e-5 if dtype == "F32" else 1e-2)


def test_tokenizer_and_chat_template_come_from_the_file(tmp_path):
    model = plain_model("qwen2", tied=True)
    own, tokenizer = loaded(write(tmp_path / "model.gguf", "qwen2", tensors_of(model, "qwen2", head=False)))
    tokens = vocabulary()
    assert tokenizer.eos_token_id == tokens.index("<|im_end|>")
    assert tokenizer.pad_token_id == tokens.index("<|endoftext|>")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [ids[0], ids[-2]] == [tokens.index("<|im_start|>"), tokens.index("<|im_end|>")]
    assert tokens.index("hello") in ids
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [tokens.index("<tool>")]
    assert tokenizer.decode(tokenizer.encode("a <tool> b<|im_end|>"), skip_special_tokens=True) == "a <tool> b"
    assert own.generation_config.eos_token_id == [tokens.index("<|im_end|>")]


@pytest.mark.parametrize(
    ("kind", "words", "is_whole", "is_composed"),
    [("llama", "llama-bpe", True, False), ("llama", "tekken", True, False), ("qwen2", "qwen2", False, True)],
)
def test_words_are_split_as_the_familys_tokenizer_splits_them_before_and_after_saving(
    tmp_path, kind, words, is_whole, is_composed
):
    keys = {"tokenizer.ggml.pre": words, "tokenizer.ggml.merges": ["h e"]}
    tensors = tensors_of(plain_model(kind, tied=True), kind, head=False)
    _, tokenizer = loaded(write(tmp_path / "m.gguf", kind, tensors, keys=keys))
    tokenizer.save_pretrained(tmp_path / "saved")
    from transformers import AutoTokenizer

    for own in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert (own.tokenize("hello") == ["hello"]) is is_whole
        assert (own.tokenize("e\u0301") == own.tokenize("\u00e9")) is is_composed


@pytest.mark.parametrize(
    ("words", "expected"), [("smollm", ["a", "\u0120\u0120", "1", "2"]), ("gpt-2", ["a", "\u0120", "\u012012"])]
)
def test_digits_are_split_one_by_one_where_the_familys_tokenizer_does_so(tmp_path, words, expected):
    from spear_rl.rollout.rendering.encoding import has_segments

    tensors = tensors_of(plain_model("llama", tied=True), "llama", head=False)
    _, tokenizer = loaded(write(tmp_path / "m.gguf", "llama", tensors, keys={"tokenizer.ggml.pre": words}))
    tokenizer.save_pretrained(tmp_path / "saved")
    from transformers import AutoTokenizer

    for own in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        backend = own.backend_tokenizer
        assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("a  12")] == expected
        assert has_segments(backend)


def leave_out(key: str, monkeypatch) -> None:
    """Have no key of that name written."""

    class Without(gguf.GGUFWriter):
        def add_key_value(self, name, *rest):
            if name != key:
                super().add_key_value(name, *rest)

    monkeypatch.setattr(gguf, "GGUFWriter", Without)


@pytest.mark.parametrize(("prefix", "expected"), [(True, ["\u2581hi"] * 2), (False, ["hi", "\u2581hi"])])
def test_a_text_begins_with_a_blank_where_the_file_of_a_sentencepiece_model_says_so(
    tmp_path, monkeypatch, prefix, expected
):
    from transformers import AutoTokenizer

    table = ["<unk>", "<s>", "</s>", "\u2581", "h", "i", "hi", "\u2581hi", *SPECIAL, "<tool>"]
    monkeypatch.setattr(sys.modules[__name__], "vocabulary", lambda: table)
    leave_out("tokenizer.ggml.merges", monkeypatch)
    scores = [-float(n) for n in range(len(table))]
    keys = {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}
    tensors = tensors_of(plain_model("llama", tied=True), "llama", head=False)
    keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    _, tokenizer = loaded(write(tmp_path / "m.gguf", "llama", tensors, keys=keys))
    tokenizer.save_pretrained(tmp_path / "saved")
    for own in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert own.tokenize("hi hi") == expected
        assert own.decode(own.encode("hi hi")) == "hi hi"
        assert (own.decode(own.encode(" hi")) == " hi") is not prefix, "one blank is taken for the added one"


@pytest.mark.parametrize("left_out", ["model", "tokens", "merges"])
def test_a_file_without_a_whole_tokenizer_says_so(tmp_path, monkeypatch, left_out):
    leave_out(f"tokenizer.ggml.{left_out}", monkeypatch)
    path = write(tmp_path / "m.gguf", "qwen2", tensors_of(plain_model("qwen2", tied=True), "qwen2", head=False))
    with pytest.raises(ConfigError, match=r"m\.gguf has no whole tokenizer: take a file that has one$"):
        loaded(path)


def test_a_special_token_beyond_the_table_of_tokens_is_named(tmp_path):
    keys = {"tokenizer.ggml.bos_token_id": 99999}
    tensors = tensors_of(plain_model("qwen2", tied=True), "qwen2", head=False)
    with pytest.raises(ConfigError, match=r"is damaged: its bos token is 99999 of 264 tokens"):
        loaded(write(tmp_path / "m.gguf", "qwen2", tensors, keys=keys))


def test_weights_of_another_shape_and_another_version_are_told_in_full(tmp_path):
    tensors = tensors_of(plain_model("qwen2", tied=True), "qwen2", head=False)
    with pytest.raises(
        ConfigError, match=r"does not load as a GGUF model: .*: size mismatch for .*: copying"
    ) as caught:
        loaded(write(tmp_path / "m.gguf", "qwen2", tensors, keys={"qwen2.embedding_length": 64}))
    assert not set("\t\n") & set(str(caught.value))
    path = write(tmp_path / "v9.gguf", "qwen2", tensors)
    path.write_bytes(b"GGUF\x09\0\0\0" + path.read_bytes()[8:])
    with pytest.raises(ConfigError, match=r"is of GGUF version 9, not 2 or 3: convert it anew"):
        loaded(path)


def test_a_config_or_a_vision_file_beside_a_gguf_file_does_not_hide_it(tmp_path):
    model = plain_model("qwen2", tied=True)
    write(tmp_path / "q8.gguf", "qwen2", tensors_of(model, "qwen2", head=False))
    model.config.save_pretrained(tmp_path)
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF of a vision tower")
    assert torch.allclose(logits(loaded(tmp_path)[0]), logits(model), atol=1e-5)
    model.save_pretrained(tmp_path)
    assert not is_gguf(tmp_path), "a whole model comes first"


def test_every_token_that_ends_a_turn_is_known(tmp_path):
    model, tokens = plain_model("qwen2", tied=True), vocabulary()
    ends = {"eot_token_id": tokens.index("<|im_end|>"), "eom_token_id": tokens.index("<|im_start|>")}
    path = write(tmp_path / "model.gguf", "qwen2", tensors_of(model, "qwen2", head=False), **ends)
    own, tokenizer = loaded(path)
    assert tokenizer.eos_token == "<|im_end|>"
    assert own.generation_config.eos_token_id == [*ends.values()]


def test_a_saved_model_is_a_plain_folder(tmp_path):
    model = plain_model("qwen2", tied=True)
    own, tokenizer = loaded(write(tmp_path / "model.gguf", "qwen2", tensors_of(model, "qwen2", head=False)))
    own.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again, words = model_in_folder(tmp_path / "saved")
    assert torch.equal(logits(again), logits(own))
    assert words.chat_template == CHAT
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()


def test_parts_are_found_beside_the_first_or_in_their_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAR_RL_CACHE", str(tmp_path / "cache"))
    model = plain_model("qwen2", tied=True)
    files = in_parts(tmp_path / "parts", model)
    for name in (files[0], files[0].parent):
        assert torch.allclose(logits(loaded(name)[0]), logits(model), atol=1e-5)
    assert not list((tmp_path / "cache").rglob("*.gguf")), "the joined file is deleted again"
    for file in files:
        file.rename(file.with_name(file.name.upper()))
    assert torch.allclose(logits(loaded(files[0].with_name(files[0].name.upper()))[0]), logits(model), atol=1e-5)


@pytest.mark.parametrize(
    "names",
    [
        ("m.gguf.aa", "m.gguf.ab", "m.gguf.ac"),
        ("m.gguf.00", "m.gguf.01", "m.gguf.02"),
        ("m.gguf-split-a", "m.gguf-split-b", "m.gguf-split-c"),
        ("m.gguf.part1of3", "m.gguf.part2of3", "m.gguf.part3of3"),
        ("m.gguf.1", "m.gguf.2", "m.gguf.3"),
    ],
)
def test_pieces_of_plain_split_are_joined(tmp_path, monkeypatch, names):
    monkeypatch.setenv("SPEAR_RL_CACHE", str(tmp_path / "cache"))
    model, folder = plain_model("qwen2", tied=True), tmp_path / "pieces"
    content = write(tmp_path / "m.gguf", "qwen2", tensors_of(model, "qwen2", head=False)).read_bytes()
    folder.mkdir()
    size = -(-len(content) // 3)
    for n, name in enumerate(names):
        (folder / name).write_bytes(content[n * size : (n + 1) * size])
    (folder / "README.md").write_text("how they were split")
    for path in (folder / names[0], folder):
        assert torch.allclose(logits(loaded(path)[0]), logits(model), atol=1e-5)
    with pytest.raises(ConfigError, match=f"is part 2 of 3: name the first, {names[0]}"):
        loaded(folder / names[1])
    (folder / names[1]).rename(folder / "elsewhere")
    with pytest.raises(ConfigError, match=f"has 3 parts, and {names[1]} is missing"):
        loaded(folder / names[0])
    (folder / "elsewhere").rename(folder / names[1])
    (folder / names[2]).unlink()
    with pytest.raises(ConfigError, match=r"missing|cut off"):
        loaded(folder / names[0])


def test_missing_and_exchanged_parts_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAR_RL_CACHE", str(tmp_path / "cache"))
    one, two, three = in_parts(tmp_path, plain_model("qwen2", tied=True))
    with pytest.raises(ConfigError, match=f"is part 2 of 3: name the first, {one.name}"):
        loaded(two)
    aside = two.rename(tmp_path / "aside")
    with pytest.raises(ConfigError, match=f"has 3 parts, and {two.name} is missing"):
        loaded(one)
    one.rename(tmp_path / "first")
    with pytest.raises(ConfigError, match=f"has 3 parts, and {one.name}, {two.name} is missing"):
        loaded(three)
    (tmp_path / "first").rename(one)
    three.rename(two)
    aside.rename(three)
    with pytest.raises(ConfigError, match=r"is part 3 of 3 by its header, not 2 of 3"):
        loaded(one)
    one.rename(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="is one of several parts"):
        loaded(tmp_path / "model.gguf")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.99])
def test_a_file_that_is_cut_off_says_so(tmp_path, share):
    path = write(tmp_path / "m.gguf", "qwen2", tensors_of(plain_model("qwen2", tied=True), "qwen2", head=False))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ConfigError, match="is cut off") as caught:
        loaded(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [0, 7, 8])  # of small numbers, truth values, texts
def test_a_list_that_is_longer_than_its_file_ends_with_it(tmp_path, kind):
    key = struct.pack("<Q", 3) + b"a.b"
    header = struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, kind, 2**40)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + header + bytes(64))
    with pytest.raises(ConfigError, match="is cut off or damaged"):
        loaded(tmp_path / "m.gguf")


def test_metadata_that_is_no_text_is_damage_and_no_matter_of_a_json_file(tmp_path):
    path = write(tmp_path / "m.gguf", "qwen2", tensors_of(plain_model("qwen2", tied=True), "qwen2", head=False))
    path.write_bytes(path.read_bytes().replace(b"{% for m in", b"{\xff for m in", 1))
    with pytest.raises(ConfigError, match=r"m\.gguf is damaged \('utf-8' codec .*\): download it again$"):
        loaded(path)


def test_other_files_and_architectures_are_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("not what it seems")
    with pytest.raises(ConfigError, match="does not begin with GGUF"):
        loaded(tmp_path / "text.gguf")
    with pytest.raises(ConfigError, match="there is no file"):
        loaded(Path("folder/none.gguf"))
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ConfigError, match="is neither a model's folder nor a GGUF file"):
        loaded(tmp_path / "notes.txt")
    tensors = tensors_of(plain_model("qwen2", tied=True), "qwen2", head=False)
    with pytest.raises(ConfigError, match="of the architecture 'whisper', which transformers cannot read"):
        loaded(write(tmp_path / "odd.gguf", "whisper", tensors))
    tensors.pop("blk.1.ffn_up.weight")
    with pytest.raises(ConfigError, match=r"lacks weights of Qwen2ForCausalLM: .*mlp.up_proj"):
        loaded(write(tmp_path / "hole.gguf", "qwen2", tensors))


def test_a_folder_of_several_models_asks_which(tmp_path):
    model = plain_model("qwen2", tied=True)
    for name in ("q4.gguf", "q8.gguf"):
        write(tmp_path / name, "qwen2", tensors_of(model, "qwen2", head=False))
    with pytest.raises(ConfigError, match=r"holds several GGUF models: name one of q4.gguf, q8.gguf"):
        loaded(tmp_path)
    assert torch.allclose(logits(loaded(tmp_path / "q8.gguf")[0]), logits(model), atol=1e-5)


def test_a_published_file_is_checked_by_its_hash(tmp_path, monkeypatch):
    path = write(tmp_path / "Known.gguf", "qwen2", tensors_of(plain_model("qwen2", tied=True), "qwen2", head=False))
    monkeypatch.setitem(gguf_module.KNOWN_HASHES, "known.gguf", hashlib.sha256(path.read_bytes()).hexdigest())
    loaded(path)
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not the published file of that name"):
        loaded(path)


def test_names_of_parts(tmp_path):
    for name in ("a.gguf", "b.gguf.bak", "b.gguf.aa", "b.gguf.ab"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert gguf_parts(tmp_path / "a.gguf") == [tmp_path / "a.gguf"]
    assert gguf_parts(tmp_path / "b.gguf.bak") == [tmp_path / "b.gguf.bak"], "a suffix that is no piece"
    assert gguf_parts(tmp_path / "b.gguf.aa") == [tmp_path / "b.gguf.aa", tmp_path / "b.gguf.ab"]
    assert not is_gguf(tmp_path / "none.gguf")


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(gguf_module, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'spear-rl\[gguf\]'"):
        read_gguf(path)


def test_doctor_reads_a_gguf_files_shape(tmp_path):
    from spear_rl.app.doctor import empty_model

    model = plain_model("qwen2", tied=True)
    path = write(tmp_path / "m.gguf", "qwen2", tensors_of(model, "qwen2", head=False))
    shape = empty_model(str(path))
    assert [p.shape for p in shape.parameters()] == [p.shape for p in model.parameters()]


@pytest.mark.slow
def test_a_run_begins_with_a_gguf_file_and_its_checkpoints_are_plain_folders(tmp_path, spear):
    path = write(tmp_path / "m.gguf", "qwen2", tensors_of(plain_model("qwen2", tied=True), "qwen2", head=False))
    small = ["rollout.num_tasks=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "eval.tasks=0"]
    code, said = spear(
        "train",
        "lookup",
        f"engine.model={path}",
        f"run.dir={tmp_path / 'run'}",
        "run.steps=1",
        "sft.episodes=0",
        *small,
    )
    assert code == 0, said
    [*_, folder] = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert (folder / "model.safetensors").is_file()
    model, tokenizer = model_in_folder(folder)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert tokenizer.chat_template == CHAT


@pytest.mark.slow
def test_an_adapter_on_a_gguf_file_is_evaluated_and_resumed_from_another_folder(tmp_path, spear, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    tensors = tensors_of(plain_model("qwen2", tied=True), "qwen2", head=False)
    write(Path("m.gguf"), "qwen2", tensors, keys={"qwen2.context_length": 4096})
    small = ["rollout.num_tasks=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "eval.tasks=0"]
    begun = ["train", "lookup", "engine.model=m.gguf", "engine.lora_rank=2", "run.dir=run", "run.steps=1"]
    code, said = spear(*begun, "sft.episodes=0", *small)
    assert code == 0, said
    monkeypatch.chdir(tmp_path / "elsewhere")
    for command in (["eval", "../run", "--tasks", "1"], ["train", "run.dir=../run", "run.resume=true", "run.steps=2"]):
        code, said = spear(*command)
        assert code == 0, said
