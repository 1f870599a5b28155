"""The scheduler as a process: it needs little memory, writes its address, and ends on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.wait import HANG_S, eventually
from tests.unit.scheduler.service.scripted_cluster import CLUSTER_KEY, GatewayClient, ScriptedCluster, cluster
from torchrelay.control.v1 import scheduler_pb2

MAX_RSS_MB = 100


def resident_mb(pid: int) -> float:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match.group(1)) / 1024


async def test_process_serves_in_little_memory_and_ends_cleanly(
    it: ScriptedCluster, nats_url: str, tmp_path: Path
) -> None:
    ready = tmp_path / "scheduler.json"
    await it.host(1)
    environment = os.environ | {
        "TORCHRELAY_NATS_URL": nats_url,
        "TORCHRELAY_NATS_PREFIX": it.prefix,
        "TORCHRELAY_CLUSTER_KEY": CLUSTER_KEY,
        "TORCHRELAY_READY_FILE": str(ready),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from torchrelay.scheduler.main import main; main()",
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await eventually(ready.exists)
        address = json.loads(ready.read_text())["grpc"]
        await cluster(address, lambda view: len(view.workers) == 2)
        async with GatewayClient(address) as gateway:
            for number in range(500):
                await gateway.admit(f"r{number}")
            for _ in range(60):  # the others wait until these are computed
                placement = await gateway.placement()
                await gateway.send(first_token=scheduler_pb2.FirstToken(key=placement.key))
                await gateway.send(release=scheduler_pb2.Release(key=placement.key))
        assert resident_mb(process.pid) < MAX_RSS_MB
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG_S):
            _, log = await process.communicate()
    assert process.returncode == 0, log.decode()
    assert not ready.exists()
    assert b"Traceback" not in log
    events = [json.loads(line)["event"] for line in log.decode().splitlines() if line.startswith("{")]
    assert "load" in events and "stopping" in events


FOREIGN = ("torch", "numpy", "transformers", "fastapi", "sqlalchemy")
OTHERS = ("gateway", "param_store", "worker", "engine", "prefill", "decode")


def test_process_imports_no_torch_and_no_other_service() -> None:
    code = "import sys, torchrelay.scheduler.main; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    modules = set(done.stdout.split())
    assert not modules & {*FOREIGN, *(f"torchrelay.{name}" for name in OTHERS)}
    assert "torchrelay.scheduler.policy.policy" in modules
