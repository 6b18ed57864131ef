"""A GGUF file of a Qwen2.5 model by every name it can have here, against plain transformers on the same weights.

    python benchmarks/model_parity.py models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf [--work FOLDER]

Token ids on odd texts and chat prompts are compared with those of a tokenizer that transformers makes of the file's
table, and logits on chat prompts with those of plain transformers: of the file, its pieces, its parts, a folder saved
from it in bfloat16, that folder on a local hub, and an adapter on each. Needs `spear-rl[gguf,lora]`, 10 GB of memory
and disk space for 7 times the file.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spear_rl.engines.models.load import model_by_name
from spear_rl.rollout.rendering.renderer import ChatRenderer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

SYSTEM = {"role": "system", "content": "You are in a house. Answer with one action."}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "run", "description": "Runs code.", "parameters": {}}}]
CHATS = [
    [{"role": "user", "content": "Put a clean mug on the desk. Actions: go to sinkbasin 1, take mug 1."}],
    [SYSTEM, {"role": "user", "content": "You see cabinet 1, drawer 12 and fridge 1.\n\nWhat now?"}],
    [
        {"role": "user", "content": "What is 12345 * 67?"},
        {"role": "assistant", "content": "```python\nprint(12345 * 67)\n```"},
        {"role": "user", "content": "827115"},
    ],
    [{"role": "user", "content": "Grüße, 世界! e\u0301 and é, 👩‍👩‍👧, \u202b\u05e9\u05dc\u05d5\u05dd\u202c"}],
    [SYSTEM, {"role": "user", "content": "def f(x):\n\treturn  x**2   # \t\t 1000000\r\n" * 8}],
]
TEXTS = [
    " \n \n\n\t x", "  leading and trailing  ", "0 00 000 1234567890 3.14159 1e-5 0x7f", "I'll we'Re DON'T it's",
    "e\u0301 é ﬁ Å Å ㎏ ① ½", "naïve Ελλάδα Привет 你好,世界 こんにちは 안녕 हिन्दी ไทย עברית العربية",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 \u200b\u200d\ufeff\u00ad", "\x00\x01\x1f\x7f\x85\u2028\u2029\u3000\ufffd", "a\r\nb\rc\n\n\n\nd",
    "def f(x):\n    if x <= 1:\n\t\treturn {'a': [1, 2]}  # no\n", "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>",
    "<|im_start|> <|im_end |> <tool_call>\n{}\n</tool_call>",
    "\\begin{aligned} x^2 &= \\frac{1}{2} \\end{aligned}", "https://a.b/c?d=e&f=%20#g user@host.example", "_" * 99,
]  # fmt: skip


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("file", type=Path)
    asked.add_argument("--work", type=Path, help="a folder for what is written (default: a temporary one)")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        os.environ |= {"HF_HOME": f"{work}/hub", "SPEAR_RL_CACHE": f"{work}/cache"}
        compare(given.file.absolute(), Path(work))


def compare(file: Path, work: Path) -> None:
    from huggingface_hub import constants

    from local_hub import Hub, serving

    prompts = compared_tokens(file)
    print("| engine.model | float32 | bfloat16 | largest logit |\n|---|---|---|---|", flush=True)
    expected = logits(plain_file(file), prompts)
    model, tokenizer = report("the file", file, prompts, expected)
    for part in (model.to(torch.bfloat16), tokenizer):
        part.save_pretrained(work / "folder")
    del model
    report("pieces of it", pieces(file, work), prompts, expected)
    report("parts of it", parts(file, work), prompts, expected)
    adapt(plain_file(file), str(file), work / "on-file")
    expected = logits(adapted(plain_file(file), work / "on-file"), prompts)
    report("an adapter on it", work / "on-file", prompts, expected)

    expected = logits(plain_folder(work / "folder"), prompts)
    report("a folder saved from it", work / "folder", prompts, expected)
    with serving(Hub()) as hub:
        constants.ENDPOINT = hub.address
        constants.HUGGINGFACE_CO_URL_TEMPLATE = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        hub.add("owner/name", work / "folder")
        report("that folder on a hub", "owner/name", prompts, expected)
        adapt(plain_folder(work / "folder"), "owner/name", work / "on-hub")
        hub.add("owner/adapter", work / "on-hub")
        expected = logits(adapted(plain_folder(work / "folder"), work / "on-hub"), prompts)
        report("an adapter there on it", "owner/adapter", prompts, expected)


def compared_tokens(file: Path) -> list[Tensor]:
    """The chat prompts' tokens; prints how many texts and prompts have the same tokens in both tokenizers."""
    from gguf import GGUFReader
    from transformers import AddedToken, Qwen2Tokenizer

    from spear_rl.engines.models.gguf_settings import gguf_tokenizer

    reader = GGUFReader(file)
    ours = gguf_tokenizer(file, reader)[0]
    words, kinds, merges, template = (
        reader.fields[f"tokenizer.{name}"].contents()
        for name in ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")
    )
    table = {word: number for number, word in enumerate(words)}
    plain = Qwen2Tokenizer(vocab=table, merges=[tuple(merge.split(" ")) for merge in merges])
    kinds = zip(words, kinds, strict=True)
    plain.add_tokens([AddedToken(word, special=kind == 3, normalized=False) for word, kind in kinds if kind in (3, 4)])
    plain.chat_template = template
    draw = random.Random(0)
    letters = "".join(TEXTS) + "".join(map(chr, range(0x20, 0x600)))
    texts = [*TEXTS, *("".join(draw.choices(letters, k=draw.randrange(60))) for _ in range(20_000))]
    same = sum(ours.encode(text) == plain.encode(text) for text in texts)
    print(f"{same} of {len(texts)} texts have the same tokens")
    prompts = [ChatRenderer(ours).prompt(chat) for chat in CHATS]
    expected = [plain.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS]
    same = sum(one == other for one, other in zip(prompts, expected, strict=True))
    described = [words.apply_chat_template(CHATS[0], tools=TOOLS, tokenize=False) for words in (ours, plain)]
    print(f"{same} of {len(CHATS)} chat prompts have the same tokens, with tools too: {described[0] == described[1]}")
    return [torch.tensor([prompt]) for prompt in prompts]


def plain_file(file: Path) -> Any:
    """The model that transformers reads, in float32, with the head for both ends."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.get_input_embeddings().weight = model.get_output_embeddings().weight
    return model.eval()


def plain_folder(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def adapt(model: Any, base: str, folder: Path) -> None:
    """Save an adapter with random weights for a model, as peft does."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapter = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    adapter.peft_config["default"].base_model_name_or_path = base
    adapter.save_pretrained(folder, save_embedding_layers=False)


def adapted(model: Any, folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder).merge_and_unload()


def pieces(file: Path, work: Path) -> Path:
    """The first of the pieces that `split -n 3 -a 2` makes of a file."""
    size = -(-file.stat().st_size // 3)
    with file.open("rb") as whole:
        for end in ("aa", "ab", "ac"):
            (work / f"cut.gguf.{end}").write_bytes(whole.read(size))
    return work / "cut.gguf.aa"


def parts(file: Path, work: Path) -> Path:
    """The first of the parts that the package gguf writes with at most 100 tensors each."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(file)
    kind = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(work / "parts.gguf", kind, split_max_tensors=100)
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(work.glob("parts-*.gguf"))


def logits(model: Any, prompts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """A model's logits in float32 and in bfloat16; the model stays as it is."""
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    with torch.no_grad():
        return [model(prompt).logits for prompt in prompts], [rounded(prompt).logits.float() for prompt in prompts]


def report(what: str, name: Path | str, prompts: Sequence[Tensor], expected: tuple[list[Tensor], list[Tensor]]) -> Any:
    """Load a model by a name, print a row of the table; the model and its tokenizer."""
    model, tokenizer = model_by_name(str(name), texts=list, seed=0)
    found = logits(model.eval(), prompts)
    far = [
        max(float((one - other).abs().max()) for one, other in zip(ours, plain, strict=True))
        for ours, plain in zip(found, expected, strict=True)
    ]
    largest = max(float(one.abs().max()) for one in expected[0])
    print(f"| {what} | {far[0]:.1e} | {far[1]:.1e} | {largest:.1f} |", flush=True)
    return model, tokenizer


if __name__ == "__main__":
    main()
