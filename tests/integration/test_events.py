"""A relay between real stores, as shown by `torchrelay events` and `torchrelay top`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.integration.test_replication import three_stores
from tests.unit.scheduler.service.scripted_cluster import CLUSTER_KEY, GatewayClient, cluster
from torchrelay.cli.main import app
from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller, call_token
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import scheduler_pb2, types_pb2
from torchrelay.scheduler.main import serving
from torchrelay.scheduler.settings import SchedulerSettings

PROGRAM = Path(sys.executable).with_name("torchrelay")


async def said(*arguments: str) -> str:
    """The output of the program, run as a separate process."""
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@asynccontextmanager
async def following(address: str) -> AsyncIterator[asyncio.StreamReader]:
    """Lines of `torchrelay events --follow`, a process that ends with the block as by Ctrl-C."""
    command = (str(PROGRAM), "events", "--follow", "--json", "--kind", "relay", "--scheduler", address)
    program = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert program.stdout is not None
    try:
        yield program.stdout
    finally:
        program.send_signal(signal.SIGINT)
        assert await program.wait() == 0


@pytest.mark.timeout(90)
async def test_relay_events_are_printed_by_the_cli(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription], nats_url: str, monkeypatch: pytest.MonkeyPatch
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
            scheduler_key = derive_node_key(bytes.fromhex(CLUSTER_KEY), SCHEDULER_NODE)
            monkeypatch.setenv("TORCHRELAY_SCHEDULER_TOKEN", call_token(scheduler_key, Caller.CLI))
            view = await cluster(address, lambda view: len(view.stores) == 3)
            async with following(address) as followed:
                await stores.fill_first(pack_id, view.epoch)
                await gateway.admit("r1", version=version)  # the model is used: it gets a second copy
                events: list[dict[str, Any]] = []
                while [event["kind"] for event in events].count("relay.finished") < 2:
                    events.append(json.loads(await asyncio.wait_for(followed.readline(), 20)))

            shown = await said("top", "--once", "--scheduler", address)
            assert "store-a -> store-c" in shown and "done in" in shown
            as_json = json.loads(await said("top", "--json", "--scheduler", address))
            assert as_json["relays"][-1]["sources"][0]["holder_id"] == "store-a"
            assert not as_json["relays"][-1]["urgent"]

            begun, finished = (event for event in events if event["store_id"] == "store-c")
            assert (begun["kind"], finished["kind"]) == ("relay.started", "relay.finished")
            assert begun["text"].startswith("store-a -> store-c, idle") and begun["cause"] == "replicate"
            assert finished["model"] == "acme/tiny" and finished["took_s"] > 0
            assert finished["brought"] == {"store-a": description.pack_bytes} and finished["num_repairs"] == 0

            lines = (await said("events", "--scheduler", address)).splitlines()
            kinds = [line.split()[1] for line in lines]
            assert {"relay.started", "relay.finished", "copy.replicate"} <= set(kinds)
            assert len({line.index(line.split()[1]) for line in lines}) == 1  # aligned
            reply = await gateway.stub.Explain(scheduler_pb2.ExplainRequest(model="acme/tiny"))
            assert not [
                decision.kind for decision in reply.decisions if decision.kind.startswith("relay")
            ]  # tenants read these
            only = await said("events", "--scheduler", address, "--kind", "copy", "--json")
            assert {json.loads(line)["kind"].split(".")[0] for line in only.splitlines()} == {"copy"}
