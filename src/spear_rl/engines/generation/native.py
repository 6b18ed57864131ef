"""Generation by the trained model itself: continuous batching where it has KV-cache slots, else padded batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spear_rl.engines.generation.continuous import SlotDecoder
from spear_rl.engines.generation.padded import Decoder
from spear_rl.engines.memory import memory_guard
from spear_rl.engines.vision import VisionDecoder
from spear_rl.rollout.collect import Lockstep
from spear_rl.rollout.generator import Sampling, Stream, drained
from spear_rl.types import Completion


class NativeGenerator:
    """Completes prompts with one sampling setting and random stream.

    Args:
        seed: of padded batches.
        stream_seed: of the streams, which are numbered from it.
    """

    def __init__(
        self, decoder: Decoder | VisionDecoder, slots: SlotDecoder | None, sampling: Sampling, *, device: torch.device,
        seed: int, stream_seed: int,
    ) -> None:  # fmt: skip
        self._decoder, self._slots, self._sampling = decoder, slots, sampling
        self.random, self.num_streams = torch.Generator(device).manual_seed(seed), 0
        self._stream_seed = stream_seed

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        if self._slots is not None:
            return drained(self.stream(), prompts)
        with memory_guard("generating", "lower rollout.num_tasks or rollout.group_size, or rollout.max_context"):
            return self._decoder.completions(prompts, self._sampling, self.random)

    def stream(self) -> Stream:
        """Completions as they finish; without slots, batch by batch."""
        if self._slots is None:
            return Lockstep(self)
        self.num_streams += 1
        return self._slots.stream(self._sampling, seed=self._stream_seed + self.num_streams)

    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> NativeGenerator:
        """A generator with its own sampling and random stream."""
        self._decoder.forget()
        device = self.random.device
        return NativeGenerator(self._decoder, self._slots, sampling, device=device, seed=seed, stream_seed=seed)

    def forget(self) -> None:
        """Drop KV caches, which were made with other weights."""
        self._decoder.forget()
        if self._slots is not None:
            self._slots.slots.forget()
