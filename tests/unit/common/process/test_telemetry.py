"""Every line of a log names its service, a full disk costs lines, never the process; scrapes of metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tests.support.brokers import free_port
from tests.support.small_disk import small_disk
from torchrelay.common.process.telemetry import SpanFile

_PROGRAM = """
from threading import Thread
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.common.process.telemetry import _set_up_logs, get_logger

_set_up_logs("decode", ServiceSettings())
log = get_logger("somewhere")
log.info("first", request_id="r")
thread = Thread(target=lambda: log.info("second"))
thread.start()
thread.join()
"""


def test_blocks_of_threads_return_to_system() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert (first["service"], first["event"], first["request_id"]) == ("decode", "first", "r")
    assert (second["service"], second["event"], second["module"]) == ("decode", "second", "somewhere")


def test_full_disk_drops_log_lines() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", f"{_PROGRAM}\nprint('alive')"], stdout=subprocess.PIPE, stderr=full
        )
    assert done.stdout == b"alive\n"


@pytest.mark.lab
def test_spans_are_dropped_on_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        file = disk.folder / "traces.jsonl"
        spans = SpanFile(file, "test")
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(spans))

        def record(count: int) -> None:
            for _ in range(count):
                tracers.get_tracer("test").start_span("x" * 200).end()

        record(1)
        disk.fill()
        record(100)  # the last page takes some of them, and a part of one
        num_before = len(file.read_bytes().splitlines())
        disk.free()
        record(1)
        lines = file.read_bytes().splitlines()
        assert len(lines) == num_before + 1
        assert json.loads(lines[0])["service"] == json.loads(lines[-1])["service"] == "test"
        tracers.shutdown()


_METRICS = """
import sys, urllib.error, urllib.request
from collections import Counter
from opentelemetry import metrics
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.common.process.telemetry import Telemetry, observe_counts, observe_values, seconds_histogram

port = int(sys.argv[1])
Telemetry("gateway", ServiceSettings(host="0.0.0.0", metrics_port=port))
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
try:
    urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=10)
except urllib.error.URLError as error:
    print(type(error.reason).__name__)
"""


def test_metrics_are_served_on_loopback_also_under_names_of_vllm() -> None:
    """With vLLM's label for the model. 127.0.0.2 stands for any other address of the machine."""
    program = [sys.executable, "-c", _METRICS, str(free_port())]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("\nConnectionRefusedError\n")
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
    (target,) = (line for line in done.stdout.splitlines() if line.startswith("target_info{"))
    assert 'service_name="gateway"' in target, "an alert misses a service by this name"
