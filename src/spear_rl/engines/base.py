"""What an engine is: it generates, scores and trains. Knows no algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from spear_rl.functional.losses import LossFn
from spear_rl.rollout.generator import Generator, Sampling
from spear_rl.types import Completion, Metrics


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right, every tensor [B, T]; column t always describes token t."""

    input_ids: Tensor
    attention: Tensor
    """True on real tokens."""
    mask: Tensor
    """True on the tokens the policy wrote and that train."""
    old_logprobs: Tensor
    advantages: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def rows(self, index: Tensor) -> Batch:
        """The rows at `index`, in that order."""
        return Batch(*(getattr(self, f.name)[index] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class EpisodeBatch(Batch):
    """Rows of episodes: one per episode, or one per turn where prompts do not grow."""

    episodes: Tensor
    """[B], the number of the episode that a row is of."""
    images: tuple[tuple[bytes, ...], ...] = ()
    """For a vision-language model: PNG files per row, in the order of their placeholder tokens."""

    def rows(self, index: Tensor) -> EpisodeBatch:
        tensors = {f.name: getattr(self, f.name)[index] for f in fields(Batch)}
        images = tuple(self.images[row] for row in index.tolist()) if self.images else ()
        return EpisodeBatch(**tensors, episodes=self.episodes[index], images=images)


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the objective."""

    name: str
    batch: Batch
    loss: LossFn
    weight: float = 1.0
    generator: torch.Generator | None = None
    """The random stream that the loss draws from (`LossInputs.generator`)."""
    rows_wanted: float = 0
    """Rows it was meant to have in all; with fewer, a mini-batch's term weighs less (`train.step.minibatches`)."""


METRICS = {
    "loss": "The loss of this term before its weight, mean over the updates of the step.",
    "grad_norm": "Norm of an update's whole gradient before it is clipped to optim.max_grad_norm.",
    "sampler_gap": "Mean absolute difference of a token's log-probability when sampled and when trained, same weights.",
}
"""What `Engine.update` reports beside what the losses do; the name of a term stands before each."""


class NonFiniteLossError(RuntimeError):
    """The loss, its gradient or the policy's logits are not finite."""


class Engine(Protocol):
    """What one training step needs of the policy."""

    pad_id: int

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]: ...
    def update(self, terms: Sequence[Term]) -> Metrics:
        """Accumulate the gradient of every term, then take one optimizer step."""

    def sync(self) -> None:
        """Make `generate` use the weights that `update` left."""


class TrainableEngine(Engine, Protocol):
    """What a run needs besides: learning rate, evaluation, checkpoints. `spear_rl.testing.check_engine` tests one."""

    tokenizer: Any
    processor: Any
    """Of a vision-language model, else None."""

    def set_learning_rate(self, learning_rate: float) -> None: ...
    def reset_optimizer(self, learning_rate: float) -> None:
        """Start with fresh optimizer state, as between the cold start and RL."""

    def set_reference(self, model: Any) -> None:
        """Compare with this frozen model in the KL term; it was loaded from what `save` wrote."""

    def scored(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[B, T] log-probabilities and entropies of the trained tokens under the current weights."""

    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> Generator:
        """A generator with its own sampling and random stream: evaluation leaves training unchanged."""

    def check_weights(self, bound: float) -> None:
        """Raise NonFiniteLossError if a weight is not finite or larger than `bound`."""

    def save(self, folder: Path) -> None:
        """Write a transformers folder, or a peft adapter, with the tokenizer."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds besides the weights: tensors, numbers, strings, and lists and dicts of them.

        Random states are copies, so that playing episodes does not change them; optimizer state need not be.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ValueModel(Protocol):
    """A critic that an engine holds."""

    def values(self, batch: Batch) -> Tensor:
        """[B, T] value of the state before each masked token; 0 elsewhere."""

    def update(self, batch: Batch, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Metrics:
        """One optimizer step of `functional.value_loss` on the masked tokens; the policy stays as it is."""


@runtime_checkable
class CriticEngine(Protocol):
    """What an engine needs besides for an algorithm with a critic; its `state_dict` then holds the critic too."""

    critic: ValueModel | None

    def hold_critic(self, learning_rate: float) -> None:
        """Make a critic from the policy as it is now; all its values are 0 at first."""


class Sampler(Protocol):
    """Generates in the engine's place."""

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]: ...
    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> Generator: ...
    def load(self, named_weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the trainer's weights."""


def missing_members(engine: object) -> list[str]:
    """Attributes and methods of TrainableEngine that `engine` lacks."""
    annotated = [*Engine.__annotations__, *TrainableEngine.__annotations__]
    names = [*annotated, *(name for name in dir(TrainableEngine) if not name.startswith("_"))]
    return sorted({name for name in names if not hasattr(engine, name)})
