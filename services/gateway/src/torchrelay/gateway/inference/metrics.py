"""The token path's metrics: what an operator asks first when tenants complain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from torchrelay.common.process.telemetry import seconds_histogram
from torchrelay.gateway.inference.core import Usage


class InferenceMetrics:
    """Instruments; ``running`` and ``unsettled``, like the counts, are read when metrics are collected."""

    def __init__(
        self, running: Callable[[], int], unsettled: Callable[[], int], meter: metrics.Meter | None = None
    ) -> None:
        meter = meter or metrics.get_meter("torchrelay.gateway")
        self._num_requests: Counter[str] = Counter()  # by outcome
        self._num_tokens: Counter[str] = Counter()  # by kind
        self._ttft = seconds_histogram(meter, "torchrelay_gateway_ttft", "From the start of a request to its token.")

        def counter(name: str, description: str, attribute: str, counts: Counter[str]) -> None:
            def observe(_options: CallbackOptions) -> Iterable[Observation]:
                # Copied at once: a thread of the exporter reads while requests end.
                return [Observation(count, {attribute: key}) for key, count in list(counts.items())]

            meter.create_observable_counter(f"torchrelay_gateway_{name}", [observe], description=description)

        def gauge(name: str, description: str, value: Callable[[], int]) -> None:
            def observe(_options: CallbackOptions) -> Iterable[Observation]:
                yield Observation(value())

            meter.create_observable_gauge(f"torchrelay_gateway_{name}", [observe], description=description)

        requests = "Ended requests by outcome: ok, client_left or an error's code."
        counter("requests", requests, "outcome", self._num_requests)
        counter("tokens", "Tokens of ended requests by kind: prompt, cached, output.", "kind", self._num_tokens)
        gauge("requests_running", "Requests being served.", running)
        gauge("ledger_writes_pending", "Writes to the ledger that wait for SQL.", unsettled)

    def ended(self, outcome: str) -> None:
        self._num_requests[outcome] += 1

    def used(self, usage: Usage, ttft_s: float | None) -> None:
        """What a request used; nothing when it had no token."""
        if ttft_s is None:
            return
        self._ttft.record(ttft_s)
        self._num_tokens["prompt"] += usage.num_prompt_tokens
        self._num_tokens["cached"] += usage.num_cached_prompt_tokens
        self._num_tokens["output"] += usage.num_output_tokens
