"""The replicator with real stores, each a process: a used model gets its second copy, and a lost copy is rebuilt.

`torchrelay events` and `torchrelay top` show the relays.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.support.callers import every_token
from tests.support.wait import HANG_S, eventually
from tests.unit.scheduler.service.scripted_cluster import CLUSTER_KEY, GatewayClient, cluster
from torchrelay.cli.main import app
from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller, call_token
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import scheduler_pb2, types_pb2
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.scheduler.main import serving
from torchrelay.scheduler.settings import SchedulerSettings
from torchrelay.transfer.protocol.tickets import derive_node_key

STORE, GATEWAY, CLI = (
    Path(sys.executable).with_name(name) for name in ("torchrelay-param-store", "torchrelay-gateway", "torchrelay")
)
ADMIN_KEY = f"tra-{'0' * 32}"
DOMAINS = {"store-a": "rack-1", "store-b": "rack-1", "store-c": "rack-2"}


@dataclass
class StoreProcess:
    process: subprocess.Popen[bytes]
    ready: Path

    async def address(self) -> str:
        await eventually(self.ready.exists, "the store's ready file")
        address: str = json.loads(self.ready.read_text())["grpc"]
        return address


class Stores:
    """Three stores on one broker; only the first one's remote store has the model."""

    def __init__(self, folder: Path, remote: Path, nats_url: str) -> None:
        self._folder, self._remote = folder, remote
        self.prefix, self.nats_url = new_id("t"), nats_url
        self.running = {store_id: self._start(store_id) for store_id in DOMAINS}

    def _start(self, store_id: str) -> StoreProcess:
        ready = self._folder / f"{store_id}.json"
        remote = self._remote if store_id == "store-a" else self._folder / "nothing"
        settings = {
            "STORE_ID": store_id,
            "HOST_ID": f"host of {store_id}",
            "FAILURE_DOMAIN": DOMAINS[store_id],
            "NODE_KEY": derive_node_key(bytes.fromhex(CLUSTER_KEY), store_id).hex(),
            "ARENA_PATH": str(self._folder / f"{store_id}.arena"),
            "ARENA_BYTES": str(32 << 20),
            "DATA_DIR": str(self._folder / store_id),
            "REMOTE_URL": remote.as_uri(),
            "NATS_URL": self.nats_url,
            "NATS_PREFIX": self.prefix,
            "READY_FILE": str(ready),
        }
        environment = os.environ | {f"TORCHRELAY_{name}": value for name, value in settings.items()}
        with (self._folder / f"{store_id}.log").open("wb") as log:
            process = subprocess.Popen([str(STORE)], env=environment, stdout=log, stderr=log)
        return StoreProcess(process, ready)

    async def fill_first(self, pack_id: str, epoch: int = 0) -> None:
        """``epoch``: of the scheduler that the stores obey, if one runs."""
        request = pb.RelayRequest(epoch=epoch, pack_id=pack_id, sources=[types_pb2.Source(holder_id="remote")])
        token = every_token(bytes.fromhex(CLUSTER_KEY), "store-a")
        async with open_channel(await self.running["store-a"].address(), token=token) as channel:
            await ParamStoreStub(channel).Relay(request)

    def kill(self, store_id: str) -> None:
        self.running[store_id].process.send_signal(signal.SIGKILL)
        self.running.pop(store_id).process.wait(10)

    def stop(self) -> None:
        for store in self.running.values():
            store.process.terminate()
        for store in self.running.values():
            store.process.wait(20)


@asynccontextmanager
async def three_stores(folder: Path, remote: Path, nats_url: str) -> AsyncIterator[Stores]:
    stores = Stores(folder, remote, nats_url)
    try:
        for store in stores.running.values():
            await store.address()
        yield stores
    finally:
        stores.stop()


def retained_on(view: scheduler_pb2.ClusterView, pack_id: str) -> set[str]:
    """Stores that hold the whole pack and retain it."""
    return {
        store.store_id
        for store in view.stores
        for copy in store.copies
        if copy.pack_id == pack_id and copy.num_chunks_verified == copy.num_chunks > 0 and copy.retained
    }


async def said(*arguments: str) -> str:
    """The output of the program, run as a separate process."""
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@asynccontextmanager
async def gateway_url(folder: Path, scheduler: str, stores: Stores) -> AsyncIterator[str]:
    """The address of a gateway before the scheduler."""
    ready = folder / "gateway.json"
    settings = {
        "ADMIN_KEY": ADMIN_KEY,
        "DATABASE_URL": f"sqlite:///{folder}/ledger.db",
        "NATS_URL": stores.nats_url,
        "NATS_PREFIX": stores.prefix,
        "READY_FILE": str(ready),
        "SCHEDULER_ADDRESS": scheduler,
        "SCHEDULER_TOKEN": call_token(derive_node_key(bytes.fromhex(CLUSTER_KEY), SCHEDULER_NODE), Caller.GATEWAY),
        "STORE_ADDRESS": "127.0.0.1:1",
    }
    env = os.environ | {f"TORCHRELAY_{name}": value for name, value in settings.items()}
    process = await asyncio.create_subprocess_exec(GATEWAY, env=env)
    try:
        await eventually(ready.exists, "the gateway's ready file")
        yield json.loads(ready.read_text())["http"]
    finally:
        process.terminate()
        assert await process.wait() == 0


@asynccontextmanager
async def following(url: str) -> AsyncIterator[asyncio.StreamReader]:
    """Lines of `torchrelay events --follow`, a process that ends with the block as by Ctrl-C."""
    command = (str(CLI), "events", "--follow", "--json", "--kind", "relay", "--url", url, "--key", ADMIN_KEY)
    program = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert program.stdout is not None
    try:
        yield program.stdout
    finally:
        program.send_signal(signal.SIGINT)
        assert await program.wait() == 0


async def check_cli(url: str, gateway: GatewayClient, events: list[dict[str, Any]], pack_bytes: int) -> None:
    """Checks what the command line tells of the relay from store-a to store-c, whose ``events`` were followed."""
    at = ("--url", url, "--key", ADMIN_KEY)
    shown = await said("top", "--once", *at)
    assert "store-a -> store-c" in shown and "done in" in shown
    as_json = json.loads(await said("top", "--json", *at))
    assert as_json["relays"][-1]["sources"][0]["holder_id"] == "store-a"
    assert not as_json["relays"][-1]["urgent"]
    begun, finished = (event for event in events if event["store_id"] == "store-c")
    assert (begun["kind"], finished["kind"]) == ("relay.started", "relay.finished")
    assert begun["text"].startswith("store-a -> store-c, idle") and begun["cause"] == "replicate"
    assert finished["model"] == "acme/tiny" and finished["took_s"] > 0
    assert finished["brought"] == {"store-a": pack_bytes} and finished["num_repairs"] == 0
    lines = (await said("events", *at)).splitlines()
    kinds = [line.split()[1] for line in lines]
    assert {"relay.started", "relay.finished", "copy.replicate"} <= set(kinds)
    assert len({line.index(line.split()[1]) for line in lines}) == 1  # aligned
    only = await said("events", *at, "--kind", "copy", "--json")
    assert {json.loads(line)["kind"].split(".")[0] for line in only.splitlines()} == {"copy"}
    reply = await gateway.stub.Explain(scheduler_pb2.ExplainRequest(model="acme/tiny"))
    assert not any(decision.kind.startswith("relay") for decision in reply.decisions), "tenants read these"


async def test_used_model_keeps_copies_in_two_racks(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription], nats_url: str
) -> None:
    remote, description = published
    pack_id = description.pack_id
    version = types_pb2.ModelVersion(
        version_id=description.version_id,
        model="acme/tiny",
        pack_id=pack_id,
        pack_bytes=description.pack_bytes,
        shape=description.shape,
    )
    async with three_stores(tmp_path, remote, nats_url) as stores:
        settings = SchedulerSettings(nats_url=nats_url, nats_prefix=stores.prefix, cluster_key=CLUSTER_KEY)
        async with serving(settings) as addresses, GatewayClient(addresses["grpc"]) as gateway:
            address = addresses["grpc"]
            view = await cluster(address, lambda view: len(view.stores) == 3)
            async with gateway_url(tmp_path, address, stores) as url:
                async with following(url) as followed:
                    await stores.fill_first(pack_id, view.epoch)
                    await gateway.admit("r1", version=version)  # the model is used: it gets a second copy
                    events: list[dict[str, Any]] = []
                    while [event["kind"] for event in events].count("relay.finished") < 2:
                        events.append(json.loads(await asyncio.wait_for(followed.readline(), HANG_S)))
                view = await cluster(address, lambda view: len(retained_on(view, pack_id)) == 2, HANG_S)
                assert retained_on(view, pack_id) == {"store-a", "store-c"}
                sources = {store.store_id: store.copies[0].source for store in view.stores if store.copies}
                assert sources == {"store-a": "remote", "store-c": "store-a"}
                await check_cli(url, gateway, events, description.pack_bytes)

            stores.kill("store-c")
            await cluster(address, lambda view: retained_on(view, pack_id) >= {"store-a", "store-b"}, HANG_S)
            reply = await gateway.stub.Explain(scheduler_pb2.ExplainRequest(model="acme/tiny"))
            told = {decision.kind: decision.reason for decision in reply.decisions}
            assert "only on store-a" in told["replicate"] and "store-b from store-a" in told["rebuild"]

            stores.kill("store-a")  # store-b is now the last
            await cluster(address, lambda view: {store.store_id for store in view.stores} == {"store-b"}, HANG_S)
            view = await cluster(address, lambda view: bool(view.stores))
            assert retained_on(view, pack_id) == {"store-b"}
