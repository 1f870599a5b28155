"""A call of whole layers ends early, after a layer, when another process starts to compute, or rests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import pytest
import torch

from tests.unit.engine.harness import Model
from tests.unit.engine.kernels.cpu.counted_layers import Counted, instances, logits_of
from tests.unit.engine.test_exactness import ModelOf
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
    """As ``instances``; ``at_call`` gets another process of the host at each call of the one of whole layers."""
    mine, theirs = (ActiveProcesses(cores) for _ in range(2))

    def layers(*arguments: object) -> int:
        at_call(theirs)  # after this process counted
        num_done: int = built.layers(*arguments)
        return num_done

    return instances(monkeypatch, model, built, layers=layers, processes=mine)


@pytest.mark.usefixtures("three_threads")
def test_a_call_ends_after_the_layer_in_which_another_process_starts_or_rests(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, tmp_path: Path
) -> None:
    """The cores are then divided anew, and another call computes the rest; what comes out is the same."""
    acts: Iterator[Callable[[ActiveProcesses], object]] = cycle(
        [ActiveProcesses.count_computing, lambda _: None, ActiveProcesses.rest, lambda _: None]
    )
    model = model_of("gemma3", dtype="bfloat16")
    plain, whole, counted = beside(monkeypatch, model, built, tmp_path / "cores", lambda theirs: next(acts)(theirs))
    expected, found = logits_of(plain, 5), logits_of(whole, 5)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    num_layers = whole.config.num_layers
    calls = [num_done for num_done in counted.calls if num_done]
    assert calls == [1, num_layers - 1] * (len(calls) // 2) and len(calls) > 20


@pytest.mark.usefixtures("three_threads")
def test_threads_interrupted_within_a_call_end_it_together(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, tmp_path: Path
) -> None:
    """Another process starts or rests while each is running."""
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
        for _ in range(20):  # one is nearly always enough
            found = logits_of(whole, 5)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            if 2 in counted.calls:
                break
    finally:
        calls.put(None)
        toggling.join()
    assert whole.config.num_layers == 3 and 2 in counted.calls
