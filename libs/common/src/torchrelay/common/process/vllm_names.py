"""vLLM's names for our metrics, so that dashboards and autoscalers made for vLLM work on a scrape.

A scrape serves the same samples a second time; nothing is recorded twice. The table says where a definition differs.
https://docs.vllm.ai/en/latest/design/metrics/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

PREFIX = "vllm:"
_MODEL_LABELS = ("model", "gen_ai_request_model")


@dataclass(frozen=True, slots=True)
class VllmName:
    """A name without prefix and ``_total``; ``only``: labels of the samples that it covers."""

    name: str
    only: Mapping[str, str] = field(default_factory=dict)


_OK = {"error_type": ""}
# By our name in a scrape.
VLLM_NAMES: Mapping[str, tuple[VllmName, ...]] = {
    "gen_ai_server_request_duration_seconds": (VllmName("e2e_request_latency_seconds", _OK),),
    "gen_ai_server_time_to_first_token_seconds": (VllmName("time_to_first_token_seconds"),),
    # Each sample is the mean of a request; in vLLM those of ``inter_token_latency`` are single intervals.
    "gen_ai_server_time_per_output_token_seconds": (
        VllmName("request_time_per_output_token_seconds"),
        VllmName("inter_token_latency_seconds"),
        VllmName("time_per_output_token_seconds"),  # until vLLM 0.10
    ),
    "gen_ai_client_token_usage": (
        VllmName("request_prompt_tokens", {"gen_ai_token_type": "input"}),
        VllmName("request_generation_tokens", {"gen_ai_token_type": "output"}),
    ),
    # Tokens of ended requests; vLLM counts those of running requests, too.
    "torchrelay_gateway_tokens": (
        VllmName("prompt_tokens", {"kind": "prompt"}),
        VllmName("prefix_cache_queries", {"kind": "prompt"}),
        VllmName("prefix_cache_hits", {"kind": "cached"}),
        VllmName("generation_tokens", {"kind": "output"}),
    ),
    "torchrelay_gateway_choices": (VllmName("request_success"),),
    "torchrelay_scheduler_requests_waiting": (VllmName("num_requests_waiting"),),
    "torchrelay_scheduler_queue_wait_seconds": (VllmName("request_queue_time_seconds"),),
    "torchrelay_worker_requests_running": (VllmName("num_requests_running"),),
    "torchrelay_worker_kv_cache_usage": (
        VllmName("kv_cache_usage_perc"),
        VllmName("gpu_cache_usage_perc"),  # until vLLM 0.9
    ),
}


class RegistryWithVllmNames(CollectorRegistry):
    """The process's registry, and after each metric its copies under vLLM's names."""

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            yield metric
            for vllm_name in VLLM_NAMES.get(metric.name, ()):
                yield renamed(metric, vllm_name)


def renamed(metric: Metric, vllm_name: VllmName) -> Metric:
    """The samples of ``metric`` under vLLM's name, with the label ``model_name``."""
    copy = Metric(PREFIX + vllm_name.name, metric.documentation, metric.type)
    copy.samples = [
        sample._replace(
            name=copy.name + sample.name.removeprefix(metric.name),
            labels=_labels(sample),
        )
        for sample in metric.samples
        if all(sample.labels.get(label, "") == value for label, value in vllm_name.only.items())
    ]
    return copy


def _labels(sample: Sample) -> dict[str, str]:
    model = next((sample.labels[label] for label in _MODEL_LABELS if label in sample.labels), "")
    return {**sample.labels, "model_name": model}
