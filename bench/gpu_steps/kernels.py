"""Every Triton kernel against the plain operations, at the shapes of real models, and the seconds to compile each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bench.gpu_steps.sizes import HeadShape
from bench.gpu_steps.step import Setup, at_most, figure
from bench.report import Check
from torchrelay.engine.device_counts import COMPILATION_S
from torchrelay.engine.kernels.attention import Scoring, Span
from torchrelay.engine.kernels.backends import attention_backend
from torchrelay.engine.kernels.triton import compilations  # noqa: F401  # counts
from torchrelay.engine.kernels.triton.ops import TritonOps
from torchrelay.engine.model.decoder import rms_norm
from torchrelay.engine.model.mlp import activate_and_multiply
from torchrelay.engine.model.rope import rotate

PAGE = 16
NUM_PREFILL_ROWS = 40  # more than a tile of some kernels has
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def kernels(setup: Setup) -> Iterator[Check]:
    for name, shape in setup.sizes.heads.items():
        for dtype_name, dtype in DTYPES.items():
            torch.manual_seed(0)
            errors = _attention_errors(setup, shape, dtype) | _op_errors(setup, shape, dtype)
            worst = max(errors, key=lambda each: errors[each])
            against = f"{worst}; of {len(errors)} comparisons"
            yield at_most(TOLERANCE[dtype], figure(f"{name}_{dtype_name}_error", errors[worst], "", against))
    by_kernel = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in COMPILATION_S.items())
    yield figure("compile_s", sum(COMPILATION_S.values()), "s", by_kernel or "nothing was compiled")


def _error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative where the expected number is large."""
    expected = expected.float()
    return float(((actual.float() - expected).abs() / (1 + expected.abs())).max())


def _attention_errors(setup: Setup, shape: HeadShape, dtype: torch.dtype) -> dict[str, float]:
    """Single rows, prompts, and recorded plans with padding rows, with and without the window."""
    device, contexts = setup.device, setup.sizes.contexts
    counts = [-(-context // PAGE) for context in contexts]
    pages = np.split(np.random.default_rng(0).permutation(sum(counts)), np.cumsum(counts)[:-1])
    slots = [
        (own[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:context].astype(np.int64)
        for own, context in zip(pages, contexts, strict=True)
    ]
    single = [Span(row, 1, each) for row, each in enumerate(slots)]
    several: list[Span] = []
    for each in slots:
        first_row = several[-1].first_row + several[-1].num_rows if several else len(single)
        several.append(Span(first_row, min(NUM_PREFILL_ROWS, len(each)), each))
    num_rows = several[-1].first_row + several[-1].num_rows
    queries = torch.randn(num_rows, shape.num_heads, shape.head_dim, device=device).to(dtype)
    scratch = sum(counts) * PAGE
    kv = torch.randn(2, scratch + PAGE, shape.num_kv_heads, shape.head_dim, device=device).to(dtype)
    plain, triton = attention_backend("gather")(PAGE), attention_backend("triton")(PAGE)
    scoring, errors = Scoring(shape.head_dim**-0.5, shape.cap), {}
    for window in {None, shape.window, contexts[-1] // 3}:
        wide = plain.plan([*single, *several], window, torch.float32, device)
        expected = plain.attend(queries.float(), kv.float(), wide, scoring)
        batch = triton.plan([*single, *several], window, dtype, device)
        errors[f"attention, window {window}"] = _error(triton.attend(queries, kv, batch, scoring), expected)
        fixed = triton.fixed_plan(len(single) + 2, contexts[-1], window, scratch, device)
        triton.refill(fixed, triton.plan(single, window, dtype, device))
        padded = triton.attend(queries[: len(single) + 2], kv, fixed, scoring)
        errors[f"padded rows, window {window}"] = _error(padded[: len(single)], expected[: len(single)])
    return errors


def _op_errors(setup: Setup, shape: HeadShape, dtype: torch.dtype) -> dict[str, float]:
    device, ops, num_rows, hidden = setup.device, TritonOps(), 5, setup.sizes.hidden
    x, added = torch.randn(2, num_rows, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    both = torch.randn(num_rows, 2 * hidden, device=device).to(dtype)
    errors = {
        f"gate {each}": _error(ops.gate(both, each), activate_and_multiply(both, each))
        for each in ("silu", "gelu_pytorch_tanh")
    }
    for offset in (False, True):
        total, normed = ops.add_norm(x, added, weight, 1e-5, offset)
        errors["sum"] = _error(total, x + added)
        errors[f"norm, offset {offset}"] = _error(normed, rms_norm(x + added, weight, 1e-5, offset))
    num_turned = shape.num_heads + shape.num_kv_heads
    heads = torch.randn(num_rows, num_turned + shape.num_kv_heads, shape.head_dim, device=device).to(dtype)
    norms = torch.randn(num_turned, shape.head_dim, device=device).to(dtype) if shape.qk_norm else None
    angles = torch.rand(num_rows, 1, shape.head_dim // 2, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.randperm(PAGE, device=device)[:num_rows]
    kv = torch.zeros(2, PAGE, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    queries = ops.place_heads(heads, norms, (1e-6, False), (cos, sin), kv, slots)
    turned = heads[:, :num_turned]
    turned = rotate(turned if norms is None else rms_norm(turned, norms, 1e-6), cos, sin)
    errors["queries"] = _error(queries, turned[:, : shape.num_heads])
    errors["keys"] = _error(kv[0, slots], turned[:, shape.num_heads :])
    errors["values"] = _error(kv[1, slots], heads[:, num_turned:])
    return errors
