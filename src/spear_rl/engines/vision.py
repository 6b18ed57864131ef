"""Vision-language models: pixels for scoring and for sampling. Knows no loss and no environment.

Images travel as PNG files and become pixels only here, for one forward pass at a time.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spear_rl.engines.generation.padded import StopStrings, sampled
from spear_rl.rollout.generator import Sampling
from spear_rl.rollout.rendering.images import pil_image
from spear_rl.types import Completion, images_of, limit_of

MAX_PROMPTS = 64
"""Prompts generated in one batch, which holds their pixels and KV cache."""


class Pixels:
    """A model's inputs besides token ids, made by its processor."""

    def __init__(self, model: Any, processor: Any) -> None:
        self._model, self._processor = model, processor
        self._accepted = set(inspect.signature(model.forward).parameters)

    def inputs(self, input_ids: Tensor, images: Sequence[tuple[bytes, ...]]) -> dict[str, Any]:
        """The model's inputs for [B, T] tokens with the images of each row; none if no row has an image."""
        if not any(images):
            return {}
        pictures = [[pil_image(image) for image in row] for row in images]
        made = self._processor.image_processor(images=pictures, return_tensors="pt")
        inputs = {name: value.to(self._model.device) for name, value in made.items() if name in self._accepted}
        inputs["pixel_values"] = inputs["pixel_values"].to(self._model.get_input_embeddings().weight.dtype)
        if "mm_token_type_ids" in self._accepted:  # models with 3D positions are told where images are
            inputs["mm_token_type_ids"] = (input_ids == self._processor.image_token_id).int().to(self._model.device)
        return inputs

    @property
    def placeholders(self) -> Tensor:
        """Placeholder tokens of images, video and audio, which a policy must not generate."""
        found = {getattr(self._processor, f"{kind}_token_id", None) for kind in ("image", "video", "audio")}
        return torch.tensor(sorted(token for token in found if token is not None), device=self._model.device)


class VisionDecoder:
    """Samples with transformers' `generate`, which knows every model's positions; the sampling itself is ours."""

    def __init__(self, model: Any, tokenizer: Any, pixels: Pixels, *, pad_id: int, end_ids: Sequence[int]) -> None:
        self._model, self._tokenizer, self._pixels = model, tokenizer, pixels
        self._pad_id, self._end_ids = pad_id, sorted(set(end_ids))

    def forget(self) -> None:
        """Nothing is kept between batches."""

    @torch.no_grad()
    def completions(
        self, prompts: Sequence[list[int]], sampling: Sampling, generator: torch.Generator
    ) -> list[Completion]:
        """One completion per prompt, with the log-probability of every token at this temperature."""
        self._model.eval()
        starts = range(0, len(prompts), MAX_PROMPTS)
        return [c for start in starts for c in self._batch(prompts[start : start + MAX_PROMPTS], sampling, generator)]

    def _batch(self, prompts: Sequence[list[int]], sampling: Sampling, generator: torch.Generator) -> list[Completion]:
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad_id] * (width - len(prompt)) + prompt for prompt in prompts])
        real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        stops = StopStrings(self._tokenizer, sampling.stop)
        forbidden = self._pixels.placeholders
        found: list[tuple[Tensor, Tensor, Tensor]] = []

        def draw(input_ids: Tensor, logits: Tensor) -> Tensor:
            """Sample here and leave `generate` only that token to choose."""
            found.append(sampled(logits, sampling, generator, forbidden=forbidden))
            return torch.full_like(logits, -torch.inf).scatter(-1, found[-1][0][:, None], 0.0)

        def has_stopped(input_ids: Tensor, logits: Tensor, **_: Any) -> Tensor:
            written = input_ids[:, width:].tolist()
            return torch.tensor([stops.end(row) for row in written], device=input_ids.device)

        self._model.generate(
            input_ids=ids.to(self._model.device),
            attention_mask=real.to(self._model.device),
            **self._pixels.inputs(ids, [*map(images_of, prompts)]),
            # Greedy, since `draw` leaves one choice; what a model's own generation config adds is switched off.
            generation_config=GenerationConfig(
                max_new_tokens=max(limit_of(prompt, sampling.max_new_tokens) for prompt in prompts),
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                no_repeat_ngram_size=0,
                min_new_tokens=0,
                eos_token_id=self._end_ids,
                pad_token_id=self._pad_id,
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([has_stopped]) if sampling.stop else None,
        )
        columns = (torch.stack(parts, 1).tolist() for parts in zip(*found, strict=True))
        return [self._completion(stops, *row) for row in zip(*columns, strict=True)]

    def _completion(
        self, stops: StopStrings, tokens: list[int], scores: list[float], entropies: list[float]
    ) -> Completion:
        """The row up to its end; `generate` samples on for rows that have ended."""
        for length in range(1, len(tokens) + 1):
            if tokens[length - 1] in self._end_ids or stops.end(tokens[:length]):
                return Completion(tokens[:length], scores[:length], entropies=entropies[:length])
        return Completion(tokens, scores, truncated=True, entropies=entropies)
