"""A worker's health check fails while its engine hangs, and not while it rests."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

from tests.integration.roles_testbed import running_test_worker
from tests.unit.param_store.running_store import running_store
from torchrelay.common.liveness import Liveness
from torchrelay.common.net.probes import GrpcProbe
from torchrelay.common.net.rpc.channels import open_channel


async def test_hung_engine_is_unhealthy_until_it_resumes(tmp_path: Path, nats_url: str) -> None:
    async with (
        running_store(tmp_path) as store,
        running_test_worker(nats_url, store) as worker,
        open_channel(worker.address) as channel,
    ):
        probe, engine = GrpcProbe(channel), worker.worker.engine
        assert await probe.ask() == ""
        has_begun, may_end = threading.Event(), threading.Event()
        engine.post(has_begun.set)
        engine.post(may_end.wait)
        try:
            assert await asyncio.to_thread(has_begun.wait, 20)
            assert await probe.ask() == ""
            # As if it had been so, and somebody had looked, an hour ago.
            an_hour_ago = time.monotonic() - 3600
            worker.worker.liveness = Liveness(an_hour_ago)
            worker.worker.liveness.observe(engine.progress(None), an_hour_ago)
            fault = await probe.ask()
            assert fault.startswith("cannot serve: the engine has work and has made no step for 36"), fault
        finally:
            may_end.set()
        await engine.call(lambda: None)
        assert await probe.ask() == ""
