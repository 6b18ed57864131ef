"""For authors of engines: says what is wrong with one before a training does. Imports torch only when called."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from spear_rl.io.escaping import in_words
from spear_rl.rollout.generator import Sampling
from spear_rl.types import Completion


def check_engine(engine: Any, *, prompts: tuple[list[int], ...] = ([1, 2, 3], [4, 5])) -> list[str]:
    """What is wrong with a `TrainableEngine`, one sentence per fault; an empty list is a pass. Trains the engine.

    Args:
        prompts: token ids in its vocabulary.
    """
    missing = import_module("spear_rl.engines.base").missing_members(engine)
    if missing:
        return [f"it lacks {', '.join(missing)}"]
    faults: list[str] = []
    completions: list[Completion] = []
    checks: dict[str, Callable[[], list[str]]] = {
        "generate": lambda: _generated(engine.generate, prompts, completions),
        "evaluation_generator": lambda: _generated(
            engine.evaluation_generator(Sampling(max_new_tokens=4, temperature=0.0), seed=1).generate, prompts, []
        ),
        "update": lambda: _trained(engine, prompts, completions),
        "save": lambda: _saved(engine),
        "state_dict": lambda: _restored(engine),
    }
    for name, check in checks.items():
        try:
            faults += [f"{name}: {fault}" for fault in check()]
        except Exception as error:
            faults.append(f"{name} raised {in_words(error)}")
    return faults


def _generated(generate: Any, prompts: tuple[list[int], ...], out: list[Completion]) -> list[str]:
    made = generate([list(prompt) for prompt in prompts])
    if not isinstance(made, list) or not all(isinstance(c, Completion) for c in made):
        return ["it must return a list of Completion"]
    if len(made) != len(prompts):
        return [f"it returned {len(made)} completions for {len(prompts)} prompts"]
    out += made
    faults = []
    if any(not c.token_ids or len(c.token_ids) != len(c.logprobs) for c in made):
        faults.append("a completion must have at least one token, and one log-probability per token")
    if any(not math.isfinite(p) or p > 1e-4 for c in made for p in c.logprobs):
        faults.append("log-probabilities must be finite and at most 0")
    return faults


def _trained(engine: Any, prompts: tuple[list[int], ...], completions: list[Completion]) -> list[str]:
    """Train on the engine's own completions, whose log-probabilities must rise."""
    torch, base = import_module("torch"), import_module("spear_rl.engines.base")
    inputs = import_module("spear_rl.functional.inputs")
    if len(completions) != len(prompts):
        return ["it was not tested, since generate failed"]
    rows = [[*prompt, *c.token_ids] for prompt, c in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [engine.pad_id] * (width - len(row)) for row in rows])
    attention = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    mask = attention & (torch.arange(width) >= torch.tensor([[len(prompt)] for prompt in prompts]))
    batch = base.Batch(ids, attention, mask, torch.zeros(ids.shape), torch.ones(ids.shape))

    def loss(given: Any) -> Any:
        return inputs.LossOutput(-inputs.token_mean(given.logprobs, given.mask), {})

    engine.sync()
    before = engine.scored(batch)[0].detach().cpu()
    engine.reset_optimizer(1e-3)
    engine.set_learning_rate(1e-3)
    metrics = engine.update([base.Term("test", batch, loss)])
    engine.sync()
    after = engine.scored(batch)[0].detach().cpu()
    engine.check_weights(1e4)
    faults = []
    own = torch.tensor([p for c in completions for p in c.logprobs])
    if not torch.allclose(before[mask], own, atol=0.1):
        faults.append("generate and scored give a token different log-probabilities")
    if not after[mask].mean() > before[mask].mean():
        faults.append("the log-probability of the trained tokens did not rise")
    if not metrics or not all(isinstance(v, float) and math.isfinite(v) for v in metrics.values()):
        faults.append("it must return finite numbers by name")
    return faults


def _saved(engine: Any) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        engine.save(Path(folder))
        return [] if any(Path(folder).iterdir()) else ["it wrote nothing"]


def _restored(engine: Any) -> list[str]:
    """A checkpoint's file may hold plain values only."""
    torch = import_module("torch")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "state.pt")
        torch.save(engine.state_dict(), file)
        engine.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return []
