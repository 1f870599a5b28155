"""Makes CPU workers take the times of a large model on an accelerator, and sets what loading workers compute.

Python imports this module first in each process that has this folder in its path (`examples/burst/run.py`).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

LAYER_S, LAYER_LOAD_S = 0.12, 0.6  # of a full step, and of a layer's way to the device


def slow_layers() -> None:
    """Makes each layer take its share of a step, and each segment of the weights its time to arrive."""
    from torchrelay.engine.model.decoder import Decoder
    from torchrelay.worker.slot.loader import Loader

    run_layers, advance = Decoder.run_layers, Loader._advance

    def run_slowly(self: Any, begin: int, end: int, hidden: Any, batch: Any) -> Any:
        begin_s = time.perf_counter()
        hidden, reached = run_layers(self, begin, end, hidden, batch)
        share = batch.plan.work.num_prefilled / int(os.environ["TORCHRELAY_TOKEN_BUDGET"])
        time.sleep(max(begin_s + (reached - begin) * LAYER_S * share - time.perf_counter(), 0.0))
        return hidden, reached

    async def advance_slowly(self: Any, num_ready: int, num_segments: int, begin_us: int) -> None:
        for number in range(self._next_segment + 1, num_ready + 1):
            await asyncio.sleep(LAYER_LOAD_S)
            await advance(self, number, num_segments, begin_us)

    Decoder.run_layers = run_slowly  # type: ignore[method-assign]
    Loader._advance = advance_slowly  # type: ignore[method-assign]


def compute_only_when_loaded() -> None:
    """Gives loading workers no prompts."""
    from torchrelay.scheduler.policy.policy import Policy
    from torchrelay.scheduler.policy.strategies import LoadingPrompts, Strategies

    make = Policy.__init__

    def make_waiting(self: Any, *args: Any) -> None:
        make(self, *args)
        self.state.strategies = Strategies(loading_prompts=LoadingPrompts.NONE)

    Policy.__init__ = make_waiting  # type: ignore[method-assign,assignment]


_program = next((each for each in sys.orig_argv if "torchrelay-" in each), "")
if _program.endswith("torchrelay-worker"):
    slow_layers()
elif _program.endswith("torchrelay-scheduler") and os.environ.get("BURST_WAITS_FOR_LOADS"):
    compute_only_when_loaded()
