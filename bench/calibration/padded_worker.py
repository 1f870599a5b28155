"""A worker whose layers take fixed times, so that three hosts can share two cores.

    BENCH_LATENCY='{"prefill": {...}, "decode": {...}}' python bench/calibration/padded_worker.py

Each layer takes an equal share of its step's time in this latency model. If BENCH_LAYER_LOAD_S is set, each layer also
takes that time to load, as if it was copied to a device. The results do not change.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgspec

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.engine.execution.model_runner import ModelRunner
from torchrelay.engine.model.decoder import Decoder
from torchrelay.worker.slot.loader import Loader

_LAYERS_SHARE = 0.98  # of a step; the rest is for the head, which computes one row per sequence, and sampling


def pad_by_environment() -> None:
    pad(msgspec.json.decode(os.environ["BENCH_LATENCY"], type=LatencyModel))
    if layer_load_s := float(os.environ.get("BENCH_LAYER_LOAD_S", 0)):
        pad_loads(layer_load_s)


def pad(latency: LatencyModel) -> None:
    """Pads all later steps in this process."""
    compute_layers, compute = Decoder.run_layers, ModelRunner.run

    def run_layers(self: Any, begin: int, end: int, hidden: Any, batch: Any) -> Any:
        begin_s = time.perf_counter()
        hidden, reached = compute_layers(self, begin, end, hidden, batch)
        share = _LAYERS_SHARE * (reached - begin) / self._config.num_layers
        _sleep_until(begin_s + share * (latency.step_s(batch.plan.work) or 0.0))
        return hidden, reached

    def run(self: Any, plan: Any) -> Any:
        begin_s = time.perf_counter()
        share = 1 - _LAYERS_SHARE * plan.layer / self._num_layers  # of a prompt that continues at a layer
        computed = compute(self, plan)
        _sleep_until(begin_s + share * (latency.step_s(plan.work) or 0.0))
        return computed

    Decoder.run_layers = run_layers  # type: ignore[method-assign]
    ModelRunner.run = run  # type: ignore[method-assign]


def pad_loads(layer_load_s: float) -> None:
    """Pads all later loads in this process: opens one segment after the other, each after this time."""
    advance = Loader._advance

    async def advance_slowly(self: Any, num_ready: int, num_segments: int, begin_us: int) -> None:
        for number in range(self._next_segment + 1, num_ready + 1):
            await asyncio.sleep(layer_load_s)
            await advance(self, number, num_segments, begin_us)

    Loader._advance = advance_slowly  # type: ignore[method-assign]


def _sleep_until(at_s: float) -> None:
    time.sleep(max(at_s - time.perf_counter(), 0.0))


if __name__ == "__main__":
    from torchrelay.worker.main import main

    pad_by_environment()
    main()
