"""What vLLM compiles for a model travels: on another host, its second start compiles nothing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration.roles_testbed import model_version
from tests.support.callers import every_token
from tests.support.checkpoints import make_checkpoint
from tests.unit.param_store.running_store import CLUSTER_KEY, REMOTE, RunningStore, publish, running_store
from torchrelay.common.identity.keys import derive_compiled_key, derive_node_key
from torchrelay.control.v1 import types_pb2


async def start(store: RunningStore, version: types_pb2.ModelVersion, nats_url: str, host: Path) -> Any:
    """Starts the model in a process of its own, whose temporary files are in ``host``, and counts compiled graphs."""
    name = host.name
    settings = {
        "worker_id": name,
        "node_key": derive_node_key(CLUSTER_KEY, name).hex(),
        "compiled_key": derive_compiled_key(CLUSTER_KEY).hex(),
        "store_address": (await store.report()).grpc_address,
        "store_token": every_token(CLUSTER_KEY, store.store_id),
        "nats_url": nats_url,
        "nats_prefix": name,
        "engine": "vllm",
        "vllm_graphs": True,
        "kv_pool_bytes": 8 << 20,
        "threads": 1,
    }
    arguments = [json.dumps(settings), version.SerializeToString().hex()]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.vllm.compiled_start", *arguments),
        env={**os.environ, "TMPDIR": str(host)},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return json.loads(output.splitlines()[-1])


def archives(folder: Path) -> dict[str, int]:
    """What is kept of compilers' output below a folder, and since when."""
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("compiled/*")}


async def test_the_second_start_on_another_host_compiles_nothing(tmp_path: Path, nats_url: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", head_dim=32)
    async with running_store(tmp_path) as store:
        description = await publish(store, checkpoint)
        await store.relay(description.pack_id, REMOTE)
        version = model_version(description)
        first, second = tmp_path / "first", tmp_path / "second"
        for host in (first, second):
            host.mkdir()
        assert await start(store, version, nats_url, first) == {"hits": 0, "misses": 1}
        kept = archives(tmp_path)
        assert len(kept) == 1
        assert await start(store, version, nats_url, second) == {"hits": 1, "misses": 0}
        # A kernel compiled in the second start would be a file more, and the archive another.
        assert archives(tmp_path) == kept
