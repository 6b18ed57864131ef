"""Vision-language models: pixels beside tokens, for scoring rows and for sampling. Knows no loss and no environment.

Pictures travel as PNG files and become pixels only here, for the rows of one forward pass at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spear_rl.engines.base import NonFiniteLossError
from spear_rl.engines.generation.sampling import nucleus
from spear_rl.engines.scoring.logprobs import RowInputs
from spear_rl.rollout.generator import Sampling
from spear_rl.rollout.rendering.images import pil_image
from spear_rl.types import Completion

MAX_PROMPTS = 64
"""Prompts that are written side by side: each holds its pixels, keys and values all the time."""


class Pixels:
    """What a model is fed beside token ids, by its own processor."""

    def __init__(self, model: Any, processor: Any) -> None:
        self._model, self._processor = model, processor
        self._accepted = set(inspect.signature(model.forward).parameters)

    def beside(self, input_ids: Tensor, images: Sequence[tuple[bytes, ...]]) -> dict[str, Any]:
        """The model's inputs for [B, T] tokens with these pictures in each row; nothing if no row has any."""
        if not any(images):
            return {}
        pictures = [[pil_image(image) for image in row] for row in images]
        made = self._processor.image_processor(images=pictures, return_tensors="pt")
        fed = {name: value.to(self._model.device) for name, value in made.items() if name in self._accepted}
        fed["pixel_values"] = fed["pixel_values"].to(self._model.get_input_embeddings().weight.dtype)
        if "mm_token_type_ids" in self._accepted:  # who has positions in three dimensions is told where pictures are
            fed["mm_token_type_ids"] = (input_ids == self._processor.image_token_id).int().to(self._model.device)
        return fed

    def fed(self, inputs: RowInputs, images: Sequence[tuple[bytes, ...]]) -> RowInputs:
        """Rows to be scored, with their pixels."""
        return replace(inputs, fed=inputs.fed | self.beside(inputs.fed["input_ids"], images))

    @property
    def placeholders(self) -> Tensor:
        """Tokens that stand for pictures and the like: a policy must never write one, with nothing behind it."""
        found = {getattr(self._processor, f"{kind}_token_id", None) for kind in ("image", "video", "audio")}
        return torch.tensor(sorted(token for token in found if token is not None), device=self._model.device)


class VisionDecoder:
    """Samples with transformers' `generate`, which knows every model's own positions, and with draws of our own."""

    def __init__(self, model: Any, tokenizer: Any, pixels: Pixels, *, pad_id: int, end_ids: Sequence[int]) -> None:
        self._model, self._tokenizer, self._pixels = model, tokenizer, pixels
        self._pad_id, self._end_ids = pad_id, sorted(set(end_ids))

    def forget(self) -> None:
        """Nothing is kept from one batch to the next."""

    @torch.no_grad()
    def completions(
        self, prompts: Sequence[list[int]], sampling: Sampling, generator: torch.Generator
    ) -> list[Completion]:
        """One completion a prompt, with the log-probability of every token under the policy at this temperature."""
        self._model.eval()
        starts = range(0, len(prompts), MAX_PROMPTS)
        return [c for start in starts for c in self._written(prompts[start : start + MAX_PROMPTS], sampling, generator)]

    def _written(
        self, prompts: Sequence[list[int]], sampling: Sampling, generator: torch.Generator
    ) -> list[Completion]:
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad_id] * (width - len(prompt)) + prompt for prompt in prompts])
        real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        pixels = self._pixels.beside(ids, [getattr(prompt, "images", ()) for prompt in prompts])
        draws = _Draws(sampling, generator, self._pixels.placeholders)
        ends = _Ends(self._tokenizer, sampling.stop, width)
        self._model.generate(
            input_ids=ids.to(self._model.device),
            attention_mask=real.to(self._model.device),
            **pixels,
            # Greedy, since a draw leaves one token to choose; what a model's own settings add to it is switched off.
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                no_repeat_ngram_size=0,
                min_new_tokens=0,
                eos_token_id=self._end_ids,
                pad_token_id=self._pad_id,
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([draws]),
            stopping_criteria=StoppingCriteriaList([ends]) if sampling.stop else None,
        )
        tokens, scores = torch.stack(draws.tokens, 1).tolist(), torch.stack(draws.scores, 1).tolist()
        return [self._completion(*row, ends) for row in zip(tokens, scores, strict=True)]

    def _completion(self, tokens: list[int], scores: list[float], ends: _Ends) -> Completion:
        """What was drawn up to the end; a row that has ended goes on being drawn for, in vain."""
        for length in range(1, len(tokens) + 1):
            if tokens[length - 1] in self._end_ids or ends.has_stopped(tokens[:length]):
                return Completion(tokens[:length], scores[:length])
        return Completion(tokens, scores, truncated=True)


class _Draws:
    """Draws every token itself and leaves `generate` no other.

    As with a nucleus, what may not be drawn still counts in the log-probabilities of the rest: they are those of the
    whole distribution, which the training forward computes.
    """

    def __init__(self, sampling: Sampling, generator: torch.Generator, forbidden: Tensor) -> None:
        self._sampling, self._generator, self._forbidden = sampling, generator, forbidden
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        if not torch.isfinite(logits).all():
            raise NonFiniteLossError("the policy's scores are not finite: its weights have run away")
        scores = (logits.float() / (self._sampling.temperature or 1.0)).log_softmax(-1)
        chances = scores.exp().index_fill(-1, self._forbidden, 0.0)
        if self._sampling.temperature:
            tokens = torch.multinomial(nucleus(chances, self._sampling.top_p), 1, generator=self._generator)[:, 0]
        else:
            tokens = chances.argmax(-1)
        self.tokens.append(tokens)
        self.scores.append(scores.gather(-1, tokens[:, None])[:, 0])
        return torch.full_like(logits, -torch.inf).scatter(-1, tokens[:, None], 0.0)


class _Ends:
    """Ends a row at the first of its stop strings."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], width: int) -> None:
        self._tokenizer, self._stop, self._width = tokenizer, stop, width

    def __call__(self, input_ids: Tensor, logits: Tensor, **_: Any) -> Tensor:
        written = input_ids[:, self._width :].tolist()
        return torch.tensor([self.has_stopped(row) for row in written], device=input_ids.device)

    def has_stopped(self, token_ids: list[int]) -> bool:
        tail = self._tokenizer.decode(token_ids[-16:]) if self._stop else ""
        return any(text in tail for text in self._stop)
