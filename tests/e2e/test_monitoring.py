"""A Prometheus scrapes a loaded platform: all expressions of the dashboards have series, all metrics of rules exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.tenants import SMALL
from tests.support.brokers import free_port, free_port_range
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.http import http
from tests.support.platform import running_platform
from tests.support.wait import wait_until

pytestmark = pytest.mark.e2e
FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
NUM_SERVICES = 5  # param-store, scheduler, two workers, gateway
NUM_REQUESTS = 8
VARIABLES = {"$__rate_interval": "20s", "$model": ".*"}
VLLM = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_sum",
)
# The exporter needs a GPU; this is what it serves for one.
DCGM = """\
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="here"} 42
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",UUID="GPU-1",Hostname="here"} 0.1
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-1",Hostname="here"} 120.5
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1",Hostname="here"} 1024
DCGM_FI_PROF_DRAM_ACTIVE{gpu="0",UUID="GPU-1",Hostname="here"} 0.7
DCGM_FI_PROF_SM_OCCUPANCY{gpu="0",UUID="GPU-1",Hostname="here"} 0.3
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-1",Hostname="here"} 0
"""


class DcgmHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(DCGM.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def dcgm_exporter() -> Iterator[int]:
    """The port of an exporter on this host."""
    with ThreadingHTTPServer(("127.0.0.1", 0), DcgmHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = http.get(f"{self.url}/api/v1/query", params={"query": expression})
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return result

    def is_ready(self) -> bool:
        try:
            return http.get(f"{self.url}/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def prometheus(folder: Path, targets: dict[str, list[str]]) -> Iterator[Prometheus]:
    """Starts Prometheus with the configuration in deploy/, other targets and shorter intervals."""
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
    folder.mkdir()
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(FOLDER / "rules.yaml", folder)
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            wait_until(server.is_ready, "Prometheus")
            yield server
        finally:
            process.terminate()


def expressions() -> dict[str, str]:
    """The expressions of all dashboards, by dashboard, panel and legend."""
    found = {}
    for path in sorted((FOLDER / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"]
                for variable, value in VARIABLES.items():
                    expression = expression.replace(variable, value)
                found[f"{path.stem}: {panel['title']}: {target['legendFormat']}"] = expression
    return found


def metrics_of_rules() -> set[str]:
    """The metrics that a platform without GPUs has, beside an exporter."""
    rules = yaml.safe_load((FOLDER / "rules.yaml").read_text())
    text = " ".join(rule["expr"] for group in rules["groups"] for rule in group["rules"])
    return {name for name in re.findall(r"\b(?:torchrelay_\w+|DCGM_\w+)", text) if "_worker_gpu_" not in name}


def test_every_expression_of_the_dashboards_has_series(tmp_path: Path) -> None:
    port = free_port_range(NUM_SERVICES)  # `up` takes all
    own = [f"127.0.0.1:{port + number}" for number in range(NUM_SERVICES)]
    options = (*SMALL, "--pool-mode", "advise")
    with (
        dcgm_exporter() as dcgm_port,
        running_platform(tmp_path / "home", options, {"TORCHRELAY_METRICS_PORT": str(port)}) as platform,
        prometheus(tmp_path / "prometheus", {"torchrelay": own, "dcgm": [f"127.0.0.1:{dcgm_port}"]}) as server,
    ):
        key = platform.tenant("acme")
        model = platform.upload(key, make_checkpoint(tmp_path / "llama", "llama"), "llama")
        missing = dict.fromkeys(expressions())

        def call(number: int) -> None:
            complete(platform, key, model, list(range(30 + number, 60 + number)), max_tokens=8, ignore_eos=True)

        def all_have_series() -> bool:
            """Under load: a rate needs samples from before and after a request."""
            call(0)
            for panel in list(missing):
                if server.query(expressions()[panel]):
                    del missing[panel]
            return not missing

        for number in range(NUM_REQUESTS):
            call(number)
        try:
            wait_until(all_have_series, "series of every panel")
        except AssertionError as error:
            raise AssertionError(f"no series: {[*missing]}") from error
        assert [series["value"][1] for series in server.query('up{job="torchrelay"}')] == ["1"] * NUM_SERVICES
        for name in (*VLLM, *metrics_of_rules()):
            labels = '{model_name="acme/llama"}' if name.startswith("vllm:") else ""
            assert server.query(name + labels), f"no series {name}{labels}"
        met = server.query('sum(torchrelay_scheduler_target_requests_total{model="acme/llama", result="met"})')
        assert float(met[0]["value"][1]) > 0

        span = next(span for span in platform.spans() if span["name"] == "gateway.request")["attributes"]
        assert span["gen_ai.operation.name"] == "text_completion"
        assert span["gen_ai.request.model"] == span["gen_ai.response.model"] == model
        assert (span["gen_ai.usage.input_tokens"], span["gen_ai.usage.output_tokens"]) == (30, 8)
        assert span["gen_ai.response.finish_reasons"] == ["length"]
