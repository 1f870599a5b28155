"""A call of whole layers ends early, after a layer, when another process starts to compute, or rests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import pytest
import torch

from tests.support.wait import HANG_S
from tests.unit.engine.harness import Model, ModelOf
from tests.unit.engine.kernels.cpu.counted_layers import Counted, assert_same_logits, instances, logits_of
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kernels.cpu.library import Kernels


def beside(
    monkeypatch: pytest.MonkeyPatch,
    model: Model,
    built: Kernels,
    cores: Path,
    at_call: Callable[[ActiveProcesses], object],
) -> tuple[Instance, Instance, Counted]:
    """Makes ``instances``; ``at_call`` gets another process of the host at each call of whole layers."""
    mine, theirs = (ActiveProcesses(cores) for _ in range(2))

    def layers(*arguments: object) -> int:
        at_call(theirs)  # after this process counted
        num_done: int = built.layers(*arguments)
        return num_done

    return instances(monkeypatch, model, built, layers=layers, processes=mine)


@pytest.mark.usefixtures("three_threads")
def test_call_ends_after_layer_when_another_process_changes(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, tmp_path: Path
) -> None:
    """The cores are then divided again, and another call computes the rest with the same result."""
    acts: Iterator[Callable[[ActiveProcesses], object]] = cycle(
        [ActiveProcesses.count_computing, lambda _: None, ActiveProcesses.rest, lambda _: None]
    )
    model = model_of("gemma3", dtype="bfloat16")
    plain, whole, counted = beside(monkeypatch, model, built, tmp_path / "cores", lambda theirs: next(acts)(theirs))
    assert_same_logits(plain, whole, 5)
    num_layers = whole.config.num_layers
    calls = [num_done for num_done in counted.calls if num_done]
    assert calls == [1, num_layers - 1] * (len(calls) // 2) and len(calls) > 20


@pytest.mark.usefixtures("three_threads")
def test_threads_end_interrupted_call_together(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, tmp_path: Path
) -> None:
    """Another process starts or rests while each call is running."""
    calls: SimpleQueue[ActiveProcesses | None] = SimpleQueue()
    model = model_of("gemma3", dtype="bfloat16")
    plain, whole, counted = beside(monkeypatch, model, built, tmp_path / "cores", calls.put)

    def toggle() -> None:
        acts = cycle([ActiveProcesses.count_computing, ActiveProcesses.rest])
        while (theirs := calls.get()) is not None:
            next(acts)(theirs)

    expected, toggling = logits_of(plain, 5), Thread(target=toggle)
    toggling.start()
    try:
        began_s = time.monotonic()
        while (
            2 not in counted.calls and time.monotonic() - began_s < HANG_S
        ):  # the first steps are nearly always enough
            actual = logits_of(whole, 5)
            assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))
    finally:
        calls.put(None)
        toggling.join()
    assert whole.config.num_layers == 3 and 2 in counted.calls
