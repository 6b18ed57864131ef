"""For authors of engines: says what is wrong with one before a training does. Imports torch only when called."""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from spear_rl.io.escaping import in_words
from spear_rl.rollout.generator import Sampling
from spear_rl.types import Completion


def check_engine(engine: Any, *, prompts: Sequence[list[int]] = ([1, 2, 3], [4, 5])) -> list[str]:
    """What is wrong with a `TrainableEngine`, one sentence per fault; an empty list is a pass. Trains the engine.

    Args:
        prompts: token ids of its vocabulary.
    """
    if missing := import_module("spear_rl.engines.base").missing_members(engine):
        return [f"it lacks {', '.join(missing)}"]
    completions: list[Completion] = []
    checks: dict[str, Callable[[], Iterator[str]]] = {
        "generate": lambda: _generation(engine, prompts, completions),
        "evaluation_generator": lambda: _generation(
            engine.evaluation_generator(Sampling(max_new_tokens=4, temperature=0.0), seed=1), prompts, []
        ),
        "update": lambda: _training(engine, prompts, completions),
        "save": lambda: _checkpoint(engine),
    }
    faults: list[str] = []
    for name, check in checks.items():
        try:
            faults.extend(f"{name}: {fault}" for fault in check())
        except Exception as error:
            faults.append(f"{name} raised {in_words(error)}")
    return faults


def _generation(generator: Any, prompts: Sequence[list[int]], out: list[Completion]) -> Iterator[str]:
    made = generator.generate([list(prompt) for prompt in prompts])
    if not isinstance(made, list) or not all(isinstance(c, Completion) for c in made):
        yield "it must return a list of Completion"
    elif len(made) != len(prompts):
        yield f"it returned {len(made)} completions for {len(prompts)} prompts"
    elif any(not c.token_ids or len(c.token_ids) != len(c.logprobs) for c in made):
        yield "a completion must have at least one token, and one log-probability per token"
    elif any(not math.isfinite(p) or p > 1e-4 for c in made for p in c.logprobs):
        yield "log-probabilities must be finite and at most 0"
    else:
        out += made


def _training(engine: Any, prompts: Sequence[list[int]], completions: Sequence[Completion]) -> Iterator[str]:
    """Train on the engine's own completions, whose log-probabilities must rise."""
    if not completions:
        yield "it cannot be checked before generate works"
        return
    torch, base = import_module("torch"), import_module("spear_rl.engines.base")
    inputs = import_module("spear_rl.functional.losses")
    rows = [[*prompt, *c.token_ids] for prompt, c in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [engine.pad_id] * (width - len(row)) for row in rows])
    attention = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    mask = attention & (torch.arange(width) >= torch.tensor([[len(prompt)] for prompt in prompts]))
    batch = base.Batch(ids, attention, mask, torch.zeros(ids.shape), torch.ones(ids.shape))

    def loss(given: Any) -> Any:
        return inputs.LossOutput(-inputs.token_mean(given.logprobs, given.mask), {})

    before = engine.scored(batch)[0].detach().cpu()[mask]
    engine.reset_optimizer(1e-3)
    engine.set_learning_rate(1e-3)
    metrics = engine.update([base.Term("test", batch, loss)])
    engine.sync()
    after = engine.scored(batch)[0].detach().cpu()[mask]
    engine.check_weights(1e4)
    if not torch.allclose(before, torch.tensor([p for c in completions for p in c.logprobs]), atol=0.1):
        yield "generate and scored give a token different log-probabilities"
    if not after.mean() > before.mean():
        yield "the log-probability of the trained tokens did not rise"
    if not metrics or not all(isinstance(value, float) and math.isfinite(value) for value in metrics.values()):
        yield "it must return finite numbers by name"


def _checkpoint(engine: Any) -> Iterator[str]:
    torch = import_module("torch")
    with tempfile.TemporaryDirectory() as folder:
        engine.save(Path(folder))
        if not any(Path(folder).iterdir()):
            yield "it wrote nothing"
        state = Path(folder, "state.pt")
        torch.save(engine.state_dict(), state)
        # Checkpoints are read with weights_only: anything but plain values is refused.
        engine.load_state_dict(torch.load(state, map_location="cpu", weights_only=True))
