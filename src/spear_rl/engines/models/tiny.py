"""A language model from scratch, small enough to train on a laptop in minutes, with a word-level tokenizer."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

TINY_SIZES: dict[str, dict[str, int]] = {
    "tiny-xs": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "tiny": {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
}
TINY_VISION = "tiny-vision"
FROM_SCRATCH = (*TINY_SIZES, TINY_VISION)
"""Names of the built-in models that need no files."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_WORD = r" ?\w+|\s+|[^\w\s]"
_SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def tiny_tokenizer(texts: Iterable[str], *, max_words: int = 2048) -> Any:
    """One token per common word of `texts`; any other text is encoded as bytes, so nothing is lost."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    counts = Counter(word for text in texts for word in re.findall(_WORD, text))
    words = sorted(counts, key=lambda word: (-counts[word], word))[:max_words]
    vocabulary = [(token, 0.0) for token in _SPECIAL]
    vocabulary += [(f"<0x{value:02X}>", -100.0) for value in range(256)]
    vocabulary += [(word, -1.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=_SPECIAL[2:],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_model(size: str, tokenizer: Any, *, seed: int = 0) -> Any:
    """A GPT-NeoX of one of TINY_SIZES with random weights drawn from `seed`.

    Rotary positions on a quarter of each head and an initial scale of width ** -0.5: in trial runs both made it learn
    sooner to copy names, which is most of what an agent's commands are.
    """
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = TINY_SIZES[size]
    config = GPTNeoXConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        intermediate_size=3 * shape["hidden_size"],
        max_position_embeddings=32768,
        rotary_pct=0.25,
        tie_word_embeddings=True,
        initializer_range=shape["hidden_size"] ** -0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPTNeoXForCausalLM(config)
