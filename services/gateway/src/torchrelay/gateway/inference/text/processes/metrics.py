"""Metrics of prompts on their way through the text processes."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from opentelemetry import metrics

from torchrelay.common.process.telemetry import observe_counts, observe_value, seconds_histogram


class TextMetrics:
    """The instruments. ``num_processes`` is called when metrics are collected."""

    def __init__(self, num_processes: Callable[[], int], meter: metrics.Meter | None = None) -> None:
        meter = meter or metrics.get_meter("torchrelay.gateway")
        self._num_prompts: Counter[str] = Counter()  # by outcome
        self._num_kills: Counter[str] = Counter()  # by signal
        self._wait = seconds_histogram(
            meter, "torchrelay_gateway_prompt_wait", "How long prompts waited for a text process."
        )
        outcomes = "Prompts by outcome: ok, refused, killed, expired, queue_full, failed."
        observe_counts(meter, "torchrelay_gateway_prompts", outcomes, "outcome", self._num_prompts)
        kills = "Text processes that ended over a prompt, by signal: SIGPROF and SIGVTALRM are their CPU limits."
        observe_counts(meter, "torchrelay_gateway_text_process_kills", kills, "signal", self._num_kills)
        observe_value(meter, "torchrelay_gateway_text_processes", "Text processes that take prompts.", num_processes)

    def ended(self, outcome: str) -> None:
        self._num_prompts[outcome] += 1

    def waited(self, wait_s: float) -> None:
        self._wait.record(wait_s)

    def killed(self, status: int) -> None:
        name = str(status)
        with suppress(ValueError):
            name = signal.Signals(-status).name
        self._num_kills[name] += 1
