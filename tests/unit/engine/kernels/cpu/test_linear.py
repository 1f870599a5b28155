"""Products with weights of 16 and 8 bits, against exact ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.engine.harness import ModelOf, group_of, outputs, prompt_of, run
from torchrelay.engine.kernels.cpu.library import Kernels, has_arithmetic
from torchrelay.engine.kernels.cpu.linear import cpu_linear, supports_weight
from torchrelay.engine.kernels.layer import Int8Matrix
from torchrelay.engine.kernels.linear import linear, rounded_linear, widened_linear

DTYPES = [torch.bfloat16, torch.float16]


def int8_matrix(num_out: int, size: int) -> Int8Matrix:
    return Int8Matrix(torch.randint(-128, 128, (num_out, size), dtype=torch.int8), torch.rand(num_out) * 0.01 + 1e-4)


@pytest.mark.parametrize("is_int8", [False, True], ids=["16 bit", "8 bit"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_out", [1, 3, 4, 67, 200, 1030])
def test_cpu_linear_equals_definition(built: Kernels, num_out: int, dtype: torch.dtype, is_int8: bool) -> None:
    """Within one rounding of the dtype."""
    weight = int8_matrix(num_out, 96) if is_int8 else torch.randn(num_out, 96).to(dtype)
    wide = weight.numbers.double() * weight.scales.double()[:, None] if is_int8 else weight.double()  # type: ignore[union-attr]
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 19, 96):
        x = torch.randn(num_rows, 96).to(dtype)
        for bias in (None, torch.randn(num_out).to(dtype)):
            exact = x.double() @ wide.t() + (0 if bias is None else bias.double())
            for actual in (cpu_linear(built, x, weight, bias), *([linear(x, weight, bias)] if is_int8 else [])):
                assert actual.dtype == dtype and actual.shape == exact.shape
                atol = 1e-4 if is_int8 else 1e-5
                torch.testing.assert_close(actual.double(), exact, rtol=torch.finfo(dtype).eps, atol=atol)


@pytest.mark.parametrize("is_int8", [False, True], ids=["16 bit", "8 bit"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_result_is_independent_of_batch_and_threads(built: Kernels, dtype: torch.dtype, is_int8: bool) -> None:
    x, weight = torch.randn(40, 256).to(dtype), int8_matrix(1030, 256) if is_int8 else torch.randn(1030, 256).to(dtype)
    together = cpu_linear(built, x, weight, None)
    for row in range(40):
        assert torch.equal(cpu_linear(built, x[row : row + 1], weight, None)[0], together[row])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            assert torch.equal(cpu_linear(built, x, weight, None), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_widened_weights_are_rounded_once(dtype: torch.dtype) -> None:
    weight = int8_matrix(67, 96)
    exact = weight.numbers.float() * weight.scales[:, None]
    assert torch.equal(weight.widened(dtype), exact.to(dtype))


@pytest.mark.parametrize("with_bias", [False, True])
def test_weights_rounded_in_blocks_give_the_same(with_bias: bool) -> None:
    x, weight = torch.randn(5, 96), int8_matrix(67, 96)
    bias = torch.randn(67) if with_bias else None
    whole = torch.nn.functional.linear(x, weight.widened(torch.float32), bias)
    for num_rows in (1, 10, 66, 67):
        torch.testing.assert_close(rounded_linear(x, weight, bias, num_rows * 96), whole)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements of a tensor that an operation made."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16:
            self.num_elements = max(self.num_elements, result.numel())
        return result


def test_no_other_device_holds_a_rounded_copy_of_an_int8_head() -> None:
    """A head of 152,000 x 4,096 took 1.2 GB beside its int8 weights."""
    numbers = torch.empty(151_936, 4096, dtype=torch.int8, device="meta")
    head = Int8Matrix(numbers, torch.empty(151_936, device="meta"))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        assert linear(torch.empty(8, 4096, dtype=torch.bfloat16, device="meta"), head).shape == (8, 151_936)
    assert 0 < largest.num_elements <= 1 << 26


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_propagate(built: Kernels, value: float) -> None:
    x, weight = torch.ones(2, 64).bfloat16(), torch.ones(5, 64).bfloat16()
    weight[3, 17] = value
    x[1, 40] = value
    actual = cpu_linear(built, x, weight, None)
    expected = torch.full((2, 5), 64.0).bfloat16()
    expected[0, 3], expected[1] = value, value
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_non_contiguous_rows_and_offset_weights(built: Kernels) -> None:
    """Not contiguous, and weights somewhere within a buffer."""
    x, memory = torch.randn(64, 3).bfloat16().t(), torch.randn(1 + 8 * 64).bfloat16()
    weight = memory[1:].view(8, 64)
    torch.testing.assert_close(cpu_linear(built, x, weight, None), linear(x.float(), weight.float()).bfloat16())


def test_unsupported_weights_use_torch() -> None:
    assert supports_weight(torch.zeros(3, 64).half())
    assert not supports_weight(torch.zeros(3, 64))
    assert not supports_weight(torch.zeros(3, 48).bfloat16())
    x, weight = torch.randn(5, 48).bfloat16(), torch.randn(7, 48).bfloat16()
    torch.testing.assert_close(linear(x, weight), linear(x.float(), weight.float()).bfloat16())


def test_batch_does_not_change_bf16_tokens(model_of: ModelOf) -> None:
    """A row's sums do not depend on the other rows of the batch."""
    alone = model_of("llama", dtype="bfloat16").instance(prefix_cache=False)
    alone.prefill(group_of(prompt_of(30), "0/0"))
    expected = outputs(run(alone))["0/0", 0]
    batched = model_of("llama", dtype="bfloat16").instance(prefix_cache=False)
    for number in range(12):
        batched.prefill(group_of(prompt_of(30, salt=number), f"{number}/0"))
    assert outputs(run(batched))["0/0", 0] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_widened_linear_equals_plain(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    """Within one rounding of the dtype; blocks that do not divide the rows of the weight."""
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(30, 48).to(dtype)
    bias = torch.randn(30).to(dtype) if with_bias else None
    actual = widened_linear(x, weight, bias, block_numel=48 * 7)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert actual.dtype == dtype
    assert torch.allclose(actual.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert torch.allclose(actual.double(), linear(x, weight, bias).double(), rtol=4 * torch.finfo(dtype).eps, atol=1e-2)


def test_fp32_arithmetic_is_native() -> None:
    assert has_arithmetic(torch.float32)
