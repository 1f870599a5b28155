"""A call of whole layers ends early, after a layer, when another process begins to compute beside it, or rests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from tests.unit.engine.cpu.whole import Counted, instances, logits_of
from tests.unit.engine.test_exactness import ModelOf
from torchrelay.engine.cores import ONE_CORE_BYTES, CoreShare
from torchrelay.engine.cpu.kernels import Kernels
from torchrelay.engine.neighbours import Neighbours


@pytest.mark.usefixtures("three_threads")
def test_a_call_ends_after_the_layer_in_which_a_neighbour_begins_or_rests(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, tmp_path: Path
) -> None:
    """The cores are then divided anew, and another call computes the rest; what comes out is the same."""
    plain, whole, _ = instances(monkeypatch, model_of("gemma3", dtype="bfloat16"), built)
    mine, theirs = (Neighbours(tmp_path / "cores") for _ in range(2))
    whole._cores = CoreShare(ONE_CORE_BYTES, mine)
    counted = whole._model.decoder._whole = Counted(built, whole._model, mine)
    turns: Iterator[Callable[[], object]] = cycle([theirs.count_computing, lambda: None, theirs.rest, lambda: None])

    def layers(*arguments: object) -> int:
        next(turns)()  # after this process counted
        num_done: int = built.layers(*arguments)
        return num_done

    counted._kernels = SimpleNamespace(layers=layers)  # type: ignore[assignment]
    expected, found = logits_of(plain, 5), logits_of(whole, 5)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    num_layers = whole.config.num_layers
    calls = [num_done for num_done in counted.calls if num_done]
    assert calls == [1, num_layers - 1] * (len(calls) // 2) and len(calls) > 20


@pytest.mark.usefixtures("three_threads")
def test_threads_that_are_called_back_in_the_midst_of_a_call_end_it_together(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, tmp_path: Path
) -> None:
    """Beside a neighbour that begins or rests while each is under way."""
    plain, whole, _ = instances(monkeypatch, model_of("gemma3", dtype="bfloat16"), built)
    mine, theirs = (Neighbours(tmp_path / "cores") for _ in range(2))
    whole._cores = CoreShare(ONE_CORE_BYTES, mine)
    counted = whole._model.decoder._whole = Counted(built, whole._model, mine)
    calls: SimpleQueue[bool] = SimpleQueue()

    def layers(*arguments: object) -> int:
        calls.put(True)
        num_done: int = built.layers(*arguments)
        return num_done

    def toggle() -> None:
        acts = cycle([theirs.count_computing, theirs.rest])
        while calls.get():
            next(acts)()

    counted._kernels = SimpleNamespace(layers=layers)  # type: ignore[assignment]
    expected, toggling = logits_of(plain, 5), Thread(target=toggle)
    toggling.start()
    try:
        for _ in range(20):  # one is enough nearly always
            found = logits_of(whole, 5)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            if 2 in counted.calls:
                break
    finally:
        calls.put(False)
        toggling.join()
    assert whole.config.num_layers == 3 and 2 in counted.calls
