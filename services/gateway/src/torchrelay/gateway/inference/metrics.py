"""The token path's metrics and the attributes of its span, by the names of OpenTelemetry's conventions for GenAI.

https://github.com/open-telemetry/semantic-conventions-genai, as of 2026; the buckets are those that it recommends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum

from opentelemetry import metrics
from opentelemetry.trace import Span

from torchrelay.common.process.telemetry import observe_counts, observe_value, seconds_histogram
from torchrelay.gateway.inference.execution.running_request import RunningRequest
from torchrelay.gateway.inference.model_labels import ModelLabels

_PROVIDER = "torchrelay"
_DURATION_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TBT_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKEN_BUCKETS = tuple(4**power for power in range(14))


class Operation(StrEnum):
    """``gen_ai.operation.name``."""

    CHAT = "chat"
    COMPLETION = "text_completion"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"


class InferenceMetrics:
    """The instruments. ``running`` and ``unsettled`` are called when metrics are collected.

    ``billed_nano``: nano-dollars by label of a model. A name that no model has is no label, so callers cannot invent
    series.
    """

    def __init__(
        self,
        running: Callable[[], int],
        unsettled: Callable[[], int],
        billed_nano: Mapping[str, int],
        labels: ModelLabels,
        meter: metrics.Meter | None = None,
    ) -> None:
        meter = meter or metrics.get_meter("torchrelay.gateway")
        self._labels = labels
        self._num_requests: Counter[tuple[str, str]] = Counter()  # by model and outcome
        self._num_tokens: Counter[tuple[str, str]] = Counter()  # by model and kind
        self._num_wasted: Counter[tuple[str, str]] = Counter()  # tokens, by model and cause
        self._num_choices: Counter[tuple[str, str]] = Counter()  # by model and cause of the end
        duration, ttft = "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token"
        self._duration = seconds_histogram(meter, duration, "From a request's start to its end.", _DURATION_BUCKETS_S)
        self._ttft = seconds_histogram(meter, ttft, "From a request's arrival to its first token.", _TTFT_BUCKETS_S)
        self._tbt = seconds_histogram(
            meter,
            "gen_ai.server.time_per_output_token",
            "Mean time of a request's tokens after the first.",
            _TBT_BUCKETS_S,
        )
        self._usage = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens that a request is billed for.",
            explicit_bucket_boundaries_advisory=_TOKEN_BUCKETS,
        )

        requests = "Ended requests by outcome: ok, client_left or an error's code. No model: it is not known."
        observe_counts(meter, "torchrelay_gateway_requests", requests, ("model", "outcome"), self._num_requests)
        tokens = "Tokens of ended requests by kind: prompt, cached, output."
        observe_counts(meter, "torchrelay_gateway_tokens", tokens, ("model", "kind"), self._num_tokens)
        wasted = "Tokens computed in vain, by cause: lost, moved (computed again elsewhere), cancelled (not delivered)."
        observe_counts(meter, "torchrelay_gateway_wasted_tokens", wasted, ("model", "cause"), self._num_wasted)
        choices = "Choices that ended with their request's success, by cause: stop, length."
        observe_counts(meter, "torchrelay_gateway_choices", choices, ("model", "finished_reason"), self._num_choices)
        observe_value(meter, "torchrelay_gateway_requests_running", "Requests being served.", running)
        observe_value(meter, "torchrelay_gateway_ledger_writes_pending", "Ledger writes not yet committed.", unsettled)

        def billed(_options: metrics.CallbackOptions) -> list[metrics.Observation]:
            return [metrics.Observation(nano / 1e9, {"model": model}) for model, nano in list(billed_nano.items())]

        description = "Dollars billed for requests that this gateway settled."
        meter.create_observable_counter("torchrelay_gateway_billed_dollars", [billed], description=description)

    def ended(
        self, operation: Operation, request: RunningRequest | None, outcome: str, duration_s: float, span: Span
    ) -> None:
        """Counts an ended request, and describes it on its span. ``request``: None for a request that never ran."""
        model = self._labels.of(request.resolved.model.name) if request is not None else ""
        self._num_requests[model, outcome] += 1
        attributes = {"gen_ai.operation.name": operation.value, "gen_ai.provider.name": _PROVIDER}
        if model:
            attributes["gen_ai.request.model"] = model
        ending = attributes if outcome == "ok" else {**attributes, "error.type": outcome}
        self._duration.record(duration_s, ending)
        span.set_attributes(ending)
        if request is not None and request.ttft_s is not None:
            self._used(request, model, request.ttft_s, attributes)
            for cause, number in request.num_recomputed.items():
                self._num_wasted[model, cause] += number
            if outcome == "ok":
                for cause in request.causes:
                    self._num_choices[model, cause] += 1
            else:
                self._num_wasted[model, "cancelled"] += request.num_undelivered
            _describe(request, span)

    def _used(self, request: RunningRequest, model: str, ttft_s: float, attributes: Mapping[str, str]) -> None:
        usage = request.usage
        self._ttft.record(ttft_s, attributes)
        if request.tbt_s is not None:
            self._tbt.record(request.tbt_s, attributes)
        self._usage.record(usage.num_prompt_tokens, {**attributes, "gen_ai.token.type": "input"})
        self._usage.record(usage.num_output_tokens, {**attributes, "gen_ai.token.type": "output"})
        self._num_tokens[model, "prompt"] += usage.num_prompt_tokens
        self._num_tokens[model, "cached"] += usage.num_cached_prompt_tokens
        self._num_tokens[model, "output"] += usage.num_output_tokens


def _describe(request: RunningRequest, span: Span) -> None:
    if not span.is_recording():
        return
    usage, sampling = request.usage, request.resolved.sampling
    span.set_attributes(
        {
            "gen_ai.response.id": request.resolved.request_id,
            "gen_ai.response.model": request.resolved.model.name,
            "gen_ai.response.finish_reasons": request.causes,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.choice.count": request.resolved.num_choices,
            "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.num_cached_prompt_tokens,
            "gen_ai.usage.output_tokens": usage.num_output_tokens,
        }
    )
