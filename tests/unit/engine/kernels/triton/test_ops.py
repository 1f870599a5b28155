"""The fused operations of a layer in Triton's interpreter, against the plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.engine.harness import ModelOf, group_of, outputs, prompt_of, run
from tests.unit.engine.kernels.triton.test_attention import DEVICE
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.kernels.backends import backends_for
from torchrelay.engine.kernels.triton.ops import TritonOps
from torchrelay.engine.model import mlp
from torchrelay.engine.model.decoder import rms_norm
from torchrelay.engine.model.rope import rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 0.04, torch.float16: 0.005}
SAMPLING = SamplingParams(temperature=0, max_tokens=4)
STEPS = TritonOps()


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (5, 96), (3, 4097), (0, 64)])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_norms_equal_plain(num_rows: int, size: int, unit_offset: bool, dtype: torch.dtype) -> None:
    x, added = (random(num_rows, size, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = random(size, dtype=dtype, seed=3)
    here, other, factors = x.to(DEVICE), added.to(DEVICE), weight.to(DEVICE)
    actual = STEPS.rms_norm(here, factors, 1e-5, unit_offset)
    expected = rms_norm(x, weight, 1e-5, unit_offset)
    torch.testing.assert_close(actual.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    total, normed = STEPS.add_norm(here, other, factors, 1e-5, unit_offset)
    # NOTE: the interpreter cuts bf16 off where devices round it.
    torch.testing.assert_close(total.cpu(), x + added, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    expected = rms_norm(x + added, weight, 1e-5, unit_offset)
    torch.testing.assert_close(normed.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("normed", "unit_offset"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 24), (3, 3, 16), (1, 1, 8)])
def test_placed_heads_equal_plain(
    heads: int,
    kv_heads: int,
    head_dim: int,
    normed: bool,
    unit_offset: bool,
    dtype: torch.dtype,
) -> None:
    num_rows, num_slots = 3, 20
    together = random(num_rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    norms = random(heads + kv_heads, head_dim, dtype=dtype, seed=1) if normed else None
    turns = torch.rand(num_rows, 1, head_dim // 2)
    cos, sin = turns.cos().to(dtype), turns.sin().to(dtype)
    slots = torch.tensor([13, 0, 7])
    kv = torch.zeros(2, num_slots, kv_heads, head_dim, dtype=dtype, device=DEVICE)
    given = (None if norms is None else norms.to(DEVICE), (1e-6, unit_offset), (cos.to(DEVICE), sin.to(DEVICE)))
    queries = STEPS.place_heads(together.to(DEVICE), *given, kv, slots.to(DEVICE))

    turned = together[:, : heads + kv_heads]
    turned = rotate(turned if norms is None else rms_norm(turned, norms, 1e-6, unit_offset), cos, sin)
    expected = torch.zeros(2, num_slots, kv_heads, head_dim, dtype=dtype)
    expected[0, slots] = turned[:, heads:]
    expected[1, slots] = together[:, heads + kv_heads :]
    torch.testing.assert_close(queries.cpu(), turned[:, :heads], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(kv.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(kv.cpu()[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 7), (3, 1500), (0, 8)])
def test_gates_equal_plain(num_rows: int, size: int, activation: str, dtype: torch.dtype) -> None:
    eye = torch.eye(2 * size, dtype=dtype), torch.eye(size, dtype=dtype)
    both = 3 * random(num_rows, 2 * size, dtype=dtype)
    actual = STEPS.gate(both.to(DEVICE), activation).cpu()
    torch.testing.assert_close(
        actual, mlp.gated_mlp(both, *eye, activation), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
def test_decoder_with_triton_ops_is_exact(model_of: ModelOf, family: str) -> None:
    """Prompts in chunks beside decodes: greedy output is still transformers'."""
    model = model_of(family)
    instance = model.instance(
        token_budget=20, device=str(DEVICE), backends=replace(backends_for(DEVICE), fused_ops=STEPS)
    )
    expected = {}
    for number, length in enumerate((1, 26)):
        prompt = prompt_of(length)
        expected[f"{number}/0", 0] = model.expected(prompt, SAMPLING.max_tokens)
        instance.prefill(group_of(prompt, f"{number}/0", SAMPLING))
    assert outputs(run(instance)) == expected
