"""Hosts with padded workers and one shaped link each, and a scheduler that follows a bench."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.calibration.padding import PADDED_WORKER, padding
from bench.streaming.open_load import open_job
from tests.lab import Lab
from tests.lab.child import Child
from tests.lab.cluster import TARGETS, Cluster
from tests.lab.host import Host
from tests.lab.operations import Operator
from torchrelay.cli.api.client import GatewayClient
from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.strategies import LoadingPrompts

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 300.0
_KV_POOL_BYTES = 64 << 20
DECODE_HOST = TARGETS[-1]  # the others play prefill
# The strategies that the benches compare, by their names there.
STRATEGIES = {"stop": LoadingPrompts.NONE, "overlap": LoadingPrompts.KEPT, "live": LoadingPrompts.MOVED}


class PaddedCluster(Cluster):
    """A cluster whose workers take the time that ``latency`` predicts, and whose scheduler uses loading instances as
    ``use`` says. ``num_workers``: of hosts with more than one worker.
    """

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        latency: LatencyModel,
        num_workers: Mapping[str, int] = MappingProxyType({}),
        **settings: str,
    ) -> None:
        self._latency, self._mode, self._num_workers = latency, folder / "loading_prompts", num_workers
        self.use(LoadingPrompts.MOVED)
        super().__init__(lab, folder, **settings)

    def use(self, mode: LoadingPrompts) -> None:
        """Sets what prompts a loading instance gets from now on."""
        fresh = self._mode.with_suffix(".new")
        fresh.write_text(mode.value)
        fresh.rename(self._mode)

    def _service(self, name: str, host: Host, env: dict[str, str], program: str = "") -> Child:
        child = super()._service(name, host, env, program)
        if name == "scheduler":
            child.command = ["python", str(Path(__file__).with_name("scheduler.py"))]
            child.env = {**child.env, "BENCH_LOADING_PROMPTS": str(self._mode)}
        return child

    def _workers(self, hosts: Sequence[Host]) -> list[Child]:
        return [self._worker(host, number) for host in hosts for number in range(self._num_workers.get(host.name, 1))]

    def _worker(self, host: Host, number: int = 0) -> Child:
        child = super()._worker(host, number)
        child.command = ["python", str(PADDED_WORKER)]
        child.env = {
            **child.env,
            "BENCH_LATENCY": padding(self._latency),
            "TORCHRELAY_TOKEN_BUDGET": str(self._latency.token_budget),
            "TORCHRELAY_KV_POOL_BYTES": str(_KV_POOL_BYTES),
            "TORCHRELAY_ROLES": "decode" if host.name == DECODE_HOST else "prefill",
        }
        return child


def send(
    cluster: Cluster, operator: Operator, folder: Path, requests: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Sends the requests from the control host, each when it is due; returns the answers.

    Raises ``RuntimeError`` unless all are complete.
    """
    job = open_job(cluster.http, operator.key, requests)
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "bench.streaming.open_load"]
    with (folder / "job.json").open("rb") as given, (folder / "answers.json").open("wb") as answers:
        process = cluster.control.spawn(command, stdin=given, stdout=answers, cwd=ROOT)
        if process.wait(_TIMEOUT_S):
            raise subprocess.CalledProcessError(process.returncode, command)
    tries: list[list[dict[str, Any]]] = json.loads((folder / "answers.json").read_text())
    last = [each[-1] for each in tries]
    for request, answer in zip(requests, last, strict=True):
        if answer["status"] != 200 or answer["num_events"] < request["body"]["max_tokens"]:
            raise RuntimeError(f"incomplete answer: {answer}")
    return last


def imported_layers(cluster: Cluster, operator: Operator, request_id: str) -> int:
    """Layers of a prompt that a loading worker computed, and another worker took over."""
    with cluster.control.inside(), GatewayClient(cluster.http, operator.key) as client:
        explained = client.call("GET", f"/v1/requests/{request_id}/explain")
    details = [phase["detail"] for phase in explained["phases"] if phase["name"] == "import"]
    return sum(int(detail.split()[0]) for detail in details if detail)
