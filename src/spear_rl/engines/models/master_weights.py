"""Mixed precision: the model computes in bfloat16, its weights are trained in float32.

A step of 1e-6 on a weight of 1 is lost in bfloat16, whose neighbours of 1 are 0.004 apart. So every half-precision
parameter has a float32 master, which accumulates its gradients and is stepped; the model gets a rounded copy.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from spear_rl.engines.base import NonFiniteLossError


class MasterWeights:
    """What the optimizer steps: float32 parameters themselves, and float32 masters of the others."""

    def __init__(self, model: Any, dtype: torch.dtype | None = None) -> None:
        """Rounds the model's trained parameters to `dtype` and keeps the exact ones as masters."""
        self.pairs: list[tuple[nn.Parameter, Tensor]] = []  # half-precision parameters and their masters
        self.trained: list[Tensor] = []
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        for parameter in model.parameters():
            target = parameter.dtype if dtype is None else dtype
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(target)
            elif target == torch.float32:
                parameter.data = parameter.data.float()
                self.trained.append(parameter)
            else:
                master = parameter.detach().float().clone().requires_grad_()
                parameter.data = parameter.data.to(target)
                parameter.register_post_accumulate_grad_hook(self._accumulate)
                self.pairs.append((parameter, master))
                self.trained.append(master)
        self._master_of = {id(parameter): master for parameter, master in self.pairs}
        self._initial_largest = largest_entry(self.trained)

    def write_back(self) -> None:
        """Copy the rounded masters into the model, in place: captured CUDA graphs keep their addresses."""
        with torch.no_grad():
            torch._foreach_copy_([p.data for p, _ in self.pairs], [m.data for _, m in self.pairs])

    def exact_weights(self) -> dict[str, Tensor]:
        """Masters by parameter name; a tied one under both of its names."""
        return {name: master.detach() for p, master in self.pairs for name in self._names[id(p)]}

    def check(self, bound: float, optimizer: torch.optim.Optimizer) -> None:
        """Raise if weights or the optimizer's state are not finite, or a weight is larger than `bound`.

        A model that came with larger weights may have up to ten times those.
        """
        largest = largest_entry(self.trained)
        if not largest <= max(bound, 10 * self._initial_largest):
            raise NonFiniteLossError(f"the policy has diverged (its largest weight is {largest:g}) and was not saved")
        moments = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        if not math.isfinite(largest_entry(moments)):
            raise NonFiniteLossError("the optimizer's state is not finite and was not saved")

    def _accumulate(self, parameter: Tensor) -> None:
        """Add a gradient in float32 and free it, so that only one parameter's is alive at a time."""
        master = self._master_of[id(parameter)]
        gradient = parameter.grad
        if gradient is not None:
            if master.grad is None:
                master.grad = gradient.float()
            else:
                master.grad.add_(gradient)
        parameter.grad = None


def largest_entry(tensors: Iterable[Tensor]) -> float:
    """The largest absolute value, NaN if there is one; 0 if there are no values."""
    norms = [
        torch.linalg.vector_norm(x.detach(), ord=float("inf")).to("cpu", torch.float32) for x in tensors if x.numel()
    ]
    return float(torch.stack(norms).max()) if norms else 0.0
