"""The token path's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from opentelemetry import metrics

from torchrelay.common.process.telemetry import observe_counts, observe_value, seconds_histogram
from torchrelay.gateway.inference.core import Usage


class InferenceMetrics:
    """The instruments. ``running`` and ``unsettled`` are called when metrics are collected."""

    def __init__(
        self, running: Callable[[], int], unsettled: Callable[[], int], meter: metrics.Meter | None = None
    ) -> None:
        meter = meter or metrics.get_meter("torchrelay.gateway")
        self._num_requests: Counter[str] = Counter()  # by outcome
        self._num_tokens: Counter[str] = Counter()  # by kind
        self._ttft = seconds_histogram(meter, "torchrelay_gateway_ttft", "From a request's start to its first token.")

        requests = "Ended requests by outcome: ok, client_left or an error's code."
        observe_counts(meter, "torchrelay_gateway_requests", requests, "outcome", self._num_requests)
        tokens = "Tokens of ended requests by kind: prompt, cached, output."
        observe_counts(meter, "torchrelay_gateway_tokens", tokens, "kind", self._num_tokens)
        observe_value(meter, "torchrelay_gateway_requests_running", "Requests being served.", running)
        observe_value(meter, "torchrelay_gateway_ledger_writes_pending", "Ledger writes not yet committed.", unsettled)

    def ended(self, outcome: str) -> None:
        self._num_requests[outcome] += 1

    def used(self, usage: Usage, ttft_s: float | None) -> None:
        """Counts a request's usage; nothing if it had no token."""
        if ttft_s is None:
            return
        self._ttft.record(ttft_s)
        self._num_tokens["prompt"] += usage.num_prompt_tokens
        self._num_tokens["cached"] += usage.num_cached_prompt_tokens
        self._num_tokens["output"] += usage.num_output_tokens
