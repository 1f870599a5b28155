"""The token path's metrics: what an operator asks first when tenants complain."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from torchrelay.common.telemetry import seconds_histogram
from torchrelay.gateway.inference.core import Usage


class Meters:
    """Instruments; ``running`` and ``unsettled`` are read when metrics are collected."""

    def __init__(self, running: Callable[[], int], unsettled: Callable[[], int]) -> None:
        meter = metrics.get_meter("torchrelay.gateway")
        self._requests = meter.create_counter(
            "torchrelay_gateway_requests", description="Ended requests by outcome: ok, client_left or an error's code."
        )
        self._tokens = meter.create_counter(
            "torchrelay_gateway_tokens", description="Tokens of ended requests by kind: prompt, cached, output."
        )
        self._ttft = seconds_histogram(meter, "torchrelay_gateway_ttft", "From the start of a request to its token.")

        def gauge(name: str, description: str, value: Callable[[], int]) -> None:
            def observe(_options: CallbackOptions) -> Iterable[Observation]:
                yield Observation(value())

            meter.create_observable_gauge(f"torchrelay_gateway_{name}", [observe], description=description)

        gauge("running", "Requests under way.", running)
        gauge("unsettled", "Writes to the ledger that wait for SQL.", unsettled)

    def ended(self, outcome: str) -> None:
        self._requests.add(1, {"outcome": outcome})

    def used(self, usage: Usage, ttft_s: float | None) -> None:
        """What a request used; nothing when it had no token."""
        if ttft_s is None:
            return
        self._ttft.record(ttft_s)
        self._tokens.add(usage.num_prompt_tokens, {"kind": "prompt"})
        self._tokens.add(usage.num_cached_prompt_tokens, {"kind": "cached"})
        self._tokens.add(usage.num_output_tokens, {"kind": "output"})
