"""A scrape has our metrics under vLLM's names, too, with vLLM's label for the model."""

from __future__ import annotations

import subprocess
import sys

from tests.support.brokers import free_port

_PROGRAM = """
import sys, urllib.request
from collections import Counter
from opentelemetry import metrics
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.common.process.telemetry import Telemetry, observe_counts, observe_values, seconds_histogram

port = int(sys.argv[1])
Telemetry("gateway", ServiceSettings(metrics_port=port))
meter = metrics.get_meter("test")
tokens = Counter({("a/m", "prompt"): 7, ("a/m", "cached"): 3, ("a/m", "output"): 5})
observe_counts(meter, "torchrelay_gateway_tokens", "Tokens.", ("model", "kind"), tokens)
observe_values(meter, "torchrelay_worker_requests_running", "Requests.", ("model",), lambda: {("a/m",): 2})
duration = seconds_histogram(meter, "gen_ai.server.request.duration", "Duration.", (1.0,))
duration.record(0.5, {"gen_ai.request.model": "a/m"})
duration.record(0.5, {"gen_ai.request.model": "a/m", "error.type": "queue_full"})
as_prometheus = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=as_prometheus)
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""


def test_scrape_has_names_of_vllm() -> None:
    program = [sys.executable, "-c", _PROGRAM, str(free_port())]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    lines = {line for line in done.stdout.splitlines() if line.startswith("vllm:") and "_created" not in line}
    prompt = '{kind="prompt",model="a/m",model_name="a/m"}'
    request = 'error_type="",gen_ai_request_model="a/m"'
    assert lines == {
        f"vllm:prompt_tokens_total{prompt} 7.0",
        f"vllm:prefix_cache_queries_total{prompt} 7.0",
        'vllm:prefix_cache_hits_total{kind="cached",model="a/m",model_name="a/m"} 3.0',
        'vllm:generation_tokens_total{kind="output",model="a/m",model_name="a/m"} 5.0',
        'vllm:num_requests_running{model="a/m",model_name="a/m"} 2.0',
        f'vllm:e2e_request_latency_seconds_bucket{{{request},le="1.0",model_name="a/m"}} 1.0',
        f'vllm:e2e_request_latency_seconds_bucket{{{request},le="+Inf",model_name="a/m"}} 1.0',
        f'vllm:e2e_request_latency_seconds_count{{{request},model_name="a/m"}} 1.0',
        f'vllm:e2e_request_latency_seconds_sum{{{request},model_name="a/m"}} 0.5',
    }
    assert 'torchrelay_worker_requests_running{model="a/m"} 2.0' in done.stdout
    assert "otel_scope" not in done.stdout
