"""The changes of adapters that the CPU's kernel adds equal those of torch's operations, for any rows and shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.adapters import make_adapter
from tests.unit.engine.harness import ModelOf
from tests.unit.engine.kernels.cpu.counted_layers import assert_same_logits, instances
from torchrelay.engine.kernels import low_rank
from torchrelay.engine.kernels.cpu.library import Kernels
from torchrelay.engine.kernels.low_rank import AdaptedRows, Adapter, LowRank


def a_change(num_in: int, num_out: int, rank: int, begin: int, dtype: torch.dtype) -> LowRank:
    a, b = torch.randn(rank, num_in).to(dtype), torch.randn(rank, num_out).to(dtype)
    return LowRank(a / num_in**0.5, b, 0.5, begin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rank", "num_in", "num_out"), [(1, 32, 5), (4, 64, 64), (7, 96, 100), (16, 64, 33), (5, 32, 8200)]
)
def test_kernel_adds_what_torch_adds(
    monkeypatch: pytest.MonkeyPatch, built: Kernels, dtype: torch.dtype, rank: int, num_in: int, num_out: int
) -> None:
    monkeypatch.setattr(low_rank, "kernels", lambda: built)
    torch.manual_seed(rank)
    adapters = []
    for name in ("first", "second"):
        changes = a_change(num_in, num_out, rank, 0, dtype), a_change(num_in, 9, rank + 1, num_out + 3, dtype)
        adapters.append(Adapter(name, ({}, {"o": changes}), 0))
    adapted = AdaptedRows([(adapters[0], [1, 2, 5]), (adapters[1], [3])], 6, torch.device("cpu"))
    assert adapted.address is not None
    x, before = torch.randn(6, num_in).to(dtype), torch.randn(6, num_out + 15).to(dtype)
    out, expected = before.clone(), before.clone()
    adapted.add_to(out, 1, "o", x)
    for adapter, rows in ((adapters[0], [1, 2, 5]), (adapters[1], [3])):
        for change in adapter.layers[1]["o"]:
            change.add_to(expected, torch.tensor(rows), x)
    assert torch.equal(out[[0, 4]], before[[0, 4]]) and not torch.equal(out, before)
    torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    adapted.add_to(out, 0, "o", x)  # a layer without changes
    adapted.add_to(out, 1, "down", x)
    torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_odd_inputs_and_fp32_are_left_to_torch() -> None:
    for dtype, num_in in ((torch.float32, 32), (torch.bfloat16, 40)):
        adapter = Adapter("", ({"o": (a_change(num_in, 8, 2, 0, dtype),)},), 0)
        assert AdaptedRows([(adapter, [0])], 1, torch.device("cpu")).address is None


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_whole_layers_with_adapters_equal_single_operations(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, tmp_path: Path, family: str
) -> None:
    """Decode steps of two adapters and the base are one call."""
    model = model_of(family, dtype="bfloat16")
    plain, whole, counted = instances(monkeypatch, built, model)
    folders = [make_adapter(tmp_path / f"{n}", model.reference, seed=n, rank=4 + n) for n in range(2)]
    assert_same_logits(plain, whole, 3, folders)
    assert counted.calls.count(whole.config.num_layers) >= 20
