"""Loads a model into a worker of this process, which vLLM compiles, and prints what was compiled and what was loaded.

Arguments: the worker's settings as JSON, and the model's version as a message in hex.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from torch._dynamo.utils import counters

from tests.integration.roles_testbed import DECODE, PREFILL, RunningWorker
from tests.support.wait import eventually
from torchrelay.control.v1 import types_pb2
from torchrelay.worker.main import running_worker
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.slot import FREE, READY


async def start(settings: dict[str, Any], version: types_pb2.ModelVersion) -> dict[str, int]:
    async with running_worker(WorkerSettings(**settings)) as (worker, addresses):
        running = RunningWorker(worker, addresses["grpc"])
        await running.load(version, [PREFILL, DECODE])
        await eventually(lambda: worker.slot.state in (READY, FREE), "the end of the load", 500)
        assert worker.slot.state == READY, worker.slot.error
        assert worker.loader is not None and worker.loader._compiled is not None
        await worker.loader._compiled.keep()
        await running.unload()
        await running.until_free()
        await running.close()
    return {
        "misses": counters["aot_autograd"]["autograd_cache_miss"],
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
    }


def main() -> None:
    version = types_pb2.ModelVersion.FromString(bytes.fromhex(sys.argv[2]))
    print(json.dumps(asyncio.run(start(json.loads(sys.argv[1]), version))))


if __name__ == "__main__":
    main()
