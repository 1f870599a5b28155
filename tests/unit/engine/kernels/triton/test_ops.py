"""The fused operations of a layer in Triton's interpreter, against the plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.engine.harness import ModelOf, group_of, outputs, prompt_of, run
from tests.unit.engine.kernels.fused_ops_checks import DTYPES, FusedOpsChecks
from tests.unit.engine.kernels.triton.test_attention import DEVICE
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.kernels.backends import backends_for
from torchrelay.engine.kernels.triton.ops import TritonOps

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 0.04, torch.float16: 0.005}
SAMPLING = SamplingParams(temperature=0, max_tokens=3)
# NOTE: the interpreter truncates bf16 where devices round it, so sums are not exact.
CHECKS = FusedOpsChecks(TritonOps(), TOLERANCE, str(DEVICE), exact_sums=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (5, 96), (3, 4097), (0, 64)])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_norms_equal_plain(num_rows: int, size: int, unit_offset: bool, dtype: torch.dtype) -> None:
    CHECKS.norms(num_rows, size, unit_offset, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [(False, False), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 24), ((3, 3), 16), ((1, 1), 8)], ids=str)
def test_placed_heads_equal_plain(
    heads: tuple[int, int], head_dim: int, norm: tuple[bool, bool], dtype: torch.dtype
) -> None:
    CHECKS.placed_heads(3, heads, head_dim, norm, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 7), (3, 1500), (0, 8)])
def test_gates_equal_plain(num_rows: int, size: int, activation: str, dtype: torch.dtype) -> None:
    CHECKS.gates(num_rows, size, activation, dtype)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral"])
def test_decoder_with_triton_ops_is_exact(model_of: ModelOf, family: str) -> None:
    """Prompts in chunks beside decodes: greedy output is still transformers'."""
    model = model_of(family)
    instance = model.instance(
        token_budget=8, device=str(DEVICE), backends=replace(backends_for(DEVICE), fused_ops=CHECKS.ops)
    )
    expected = {}
    for number, length in enumerate((1, 10)):
        prompt = prompt_of(length)
        expected[f"{number}/0", 0] = model.expected(prompt, SAMPLING.max_tokens)
        instance.prefill(group_of(prompt, f"{number}/0", SAMPLING))
    assert outputs(run(instance)) == expected
