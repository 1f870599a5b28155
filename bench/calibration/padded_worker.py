"""A worker whose layers take fixed times, so that three hosts can share two cores.

    BENCH_LATENCY='{"prefill": {...}, "decode": {...}}' python bench/calibration/padded_worker.py

Each layer takes an equal share of its step's time in this latency model. The results do not change.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.engine.execution.model_runner import ModelRunner
from torchrelay.engine.model.decoder import Decoder

_LAYERS_SHARE = 0.98  # of a step; the rest is for the head, which computes one row per sequence, and sampling


def pad_by_environment() -> None:
    pad(msgspec.json.decode(os.environ["BENCH_LATENCY"], type=LatencyModel))


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


def _sleep_until(at_s: float) -> None:
    time.sleep(max(at_s - time.perf_counter(), 0.0))


if __name__ == "__main__":
    from torchrelay.worker.main import main

    pad_by_environment()
    main()
