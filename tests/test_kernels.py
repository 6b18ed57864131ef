"""The GPU kernels in Triton's interpreter, which needs no GPU; skipped where Triton is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton and no GPU (test_gpu has the GPU)"
)

SCRIPT = """
import torch
from spear_rl.engines.packed import attention, kernels
from spear_rl.engines.generation.sampling import chosen

torch.manual_seed(0)
for heads, kv_heads, width in ((9, 3, 64), (4, 4, 32), (16, 1, 16)):
    stretch = 128
    q, keys, values = torch.randn(4, heads, width), *torch.randn(2, 5 * stretch, kv_heads, width)
    bases = torch.tensor([2, 0, 3, 1, 0]).int() * stretch
    lengths = torch.tensor([100, 1, 65, 128]).int()
    k, v = torch.randn(2, kv_heads, 4, width).transpose(1, 2)
    out = kernels.single_token_attention(q, k, v, keys, values, bases, lengths, 0.1)
    for row in range(4):
        assert torch.equal(keys[bases[row] + lengths[row] - 1], k[row])
        assert torch.equal(values[bases[row] + lengths[row] - 1], v[row])
        kept = slice(int(bases[row]), int(bases[row] + lengths[row]))
        mask = torch.ones(1, int(lengths[row]), dtype=torch.bool)
        expected = attention._masked(q[row : row + 1], keys[kept], values[kept], mask, 0.1)
        torch.testing.assert_close(out[row : row + 1], expected, rtol=1e-4, atol=1e-5)
for size in (288, 4096, 9000):
    logits, chance = torch.randn(64, size) * 3, torch.rand(64).clamp(1e-6, 1 - 1e-6)
    for temperature in (1.0, 0.4):
        tokens, scores, entropies = kernels.sampled_tokens(logits, chance, temperature)
        expected, exact, exact_entropies = chosen(logits, chance, temperature=temperature, top_p=1.0)
        assert (tokens == expected).float().mean() > 0.96
        torch.testing.assert_close(scores[tokens == expected], exact[tokens == expected], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(entropies, exact_entropies, rtol=1e-4, atol=1e-4)
tokens, scores, entropies = kernels.sampled_tokens(torch.full((2, 300), float("nan")), torch.rand(2), 1.0)
assert scores.isnan().all() and entropies.isnan().all()
one = torch.full((1, 5000), float("-inf"))
one[0, 4500] = 1.0
assert [x.item() for x in kernels.sampled_tokens(one, torch.tensor([0.999]), 1.0)] == [4500, 0.0, 0.0]
"""

TREE_SCRIPT = """
import random
import numpy as np
import torch
from spear_rl.engines.packed import attention, tree, tree_kernels

rng = random.Random(0)
torch.manual_seed(0)
for heads, kv_heads, width, count in ((9, 3, 64, 150), (4, 4, 32, 64), (2, 1, 16, 1), (6, 2, 64, 200)):
    ends, path = np.full(count, count), []
    for place in range(count):
        if path and rng.random() < 0.15:
            for _ in range(rng.randint(1, len(path))):
                ends[path.pop()] = place
        path.append(place)
    blocks = tree.Blocks.of(ends, torch.device("cpu"))
    q, k, v = (torch.randn(count, n, width, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    token = torch.arange(count)
    mask = (token <= token[:, None]) & (token[:, None] < blocks.ends)
    expected, wish = attention._masked(q, k, v, mask, 0.1), torch.randn(count, heads, width)
    wanted = torch.autograd.grad((expected * wish).sum(), (q, k, v))
    with torch.no_grad():
        out, sums = tree_kernels.tree_attention(q, k, v, blocks, 0.1)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        found = tree_kernels.tree_attention_backward(wish, q, k, v, out, sums, blocks, 0.1)
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.parametrize("script", [SCRIPT, TREE_SCRIPT], ids=["decoding", "shared prefixes"])
def test_the_kernels_compute_what_plain_code_computes(script):
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
