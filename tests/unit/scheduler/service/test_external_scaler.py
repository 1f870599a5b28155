"""KEDA's service with a client that knows only its protocol, at a real scheduler, without and with TLS."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.certificates import Authority
from tests.support.wait import HANG_S, eventually
from tests.unit.scheduler.service.scripted_cluster import (
    SCHEDULER_TOKEN,
    GatewayClient,
    ScriptedCluster,
    cluster,
)
from torchrelay.cli.launchers.pool_driver import PoolDriver
from torchrelay.cli.up.ports import Ports
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.identity.callers import Caller
from torchrelay.common.identity.tls import Tls, TlsFiles
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.common.process.service import CannotStart, start_faults
from torchrelay.control.v1 import external_scaler_pb2 as pb
from torchrelay.control.v1 import external_scaler_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from torchrelay.scheduler.main import serving
from torchrelay.scheduler.policy import policy
from torchrelay.scheduler.policy.types import Pool, Role
from torchrelay.scheduler.service.external_scaler import MAX_STREAMS, selected_pool

POOL = {"scalerAddress": "demo-scheduler:7102", "numDevices": "1"}
FOLLOW: dict[str, Any] = {"pool_mode": "follow"}


def ref(**metadata: str) -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(name="demo-worker", namespace="models", scaler_metadata=metadata or POOL)


class Keda:
    """A client of KEDA's protocol, which resolves the address and verifies certificates as gRPC does by itself."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: Any = external_scaler_pb2_grpc.ExternalScalerStub(channel)

    async def is_active(self, **metadata: str) -> bool:
        return bool((await self.stub.IsActive(ref(**metadata), timeout=HANG_S)).result)

    async def metric(self, name: str = "slots-wanted", **metadata: str) -> int:
        request = pb.GetMetricsRequest(scaled_object_ref=ref(**metadata), metric_name=name)
        (value,) = (await self.stub.GetMetrics(request, timeout=HANG_S)).metric_values
        assert value.metric_name == name and value.metric_value_float == value.metric_value
        return int(value.metric_value)

    def stream(self, **metadata: str) -> Any:
        return self.stub.StreamIsActive(ref(**metadata))


async def read(stream: Any) -> bool:
    async with asyncio.timeout(HANG_S):
        message = await stream.read()
    assert isinstance(message, pb.IsActiveResponse), "the stream ended"
    return message.result


async def fault(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """The error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value


@asynccontextmanager
async def keda_of(port: int, credentials: grpc.ChannelCredentials | None = None) -> AsyncIterator[Keda]:
    address = f"localhost:{port}"
    secure, insecure = grpc.aio.secure_channel, grpc.aio.insecure_channel
    async with secure(address, credentials) if credentials else insecure(address) as channel:
        yield Keda(channel)


@asynccontextmanager
async def served(it: ScriptedCluster, **settings: Any) -> AsyncIterator[tuple[str, Keda]]:
    """The address of a scheduler that serves KEDA, and a client of KEDA's there."""
    with closing(Ports()) as ports:
        port = ports.free()
        async with it.scheduler(keda_port=port, **FOLLOW, **settings) as address, keda_of(port) as keda:
            yield address, keda


@pytest.fixture
def ports() -> Iterator[Ports]:
    with closing(Ports()) as ports:
        yield ports


class WaitingWorkers:
    """A launcher whose workers do not start."""

    def __init__(self) -> None:
        self.reasons = ["ImagePullBackOff"]

    def members(self) -> Collection[str]:
        return ["node-1"]

    def waiting(self) -> Mapping[str, str]:
        return dict(zip(self.members(), self.reasons, strict=False))

    def scale(self, num_slots: int) -> None: ...

    def retire(self, worker_id: str) -> None: ...


async def test_view_says_why_the_workers_of_a_launcher_wait(it: ScriptedCluster) -> None:
    launcher = WaitingWorkers()
    async with it.scheduler(**FOLLOW) as address, GatewayClient(address) as gateway:
        await gateway.admit("r1")
        driver = PoolDriver(address, None, SCHEDULER_TOKEN, launcher)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(driver.run())
            told = "; 1 worker waiting: ImagePullBackOff"
            await cluster(address, lambda view: any(pool.reason.endswith(told) for pool in view.pools))
            launcher.reasons.clear()
            await cluster(address, lambda view: any("waiting" not in pool.reason for pool in view.pools))
            running.cancel()


def pem_of(files: TlsFiles) -> tuple[bytes, bytes, bytes]:
    return files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()


async def test_request_at_zero_is_pushed_over_tls_to_the_clusters_own_alone(
    it: ScriptedCluster, ports: Ports, tmp_path: Path
) -> None:
    authority, port = Authority(tmp_path / "ca"), ports.free()
    names = ("torchrelay.internal", "scheduler.torchrelay.internal", "localhost")
    own: dict[str, Any] = {**authority.node("scheduler", dns=names).as_settings()}
    tls = Tls(authority.node("gateway", Caller.GATEWAY))
    ca, *of_keda = pem_of(authority.node("keda", dns=("keda",)))
    own_keda = grpc.ssl_channel_credentials(ca, *of_keda)
    async with it.scheduler(tls=tls, keda_port=port, **FOLLOW, **own) as address:
        async with GatewayClient(address, tls=tls) as gateway, keda_of(port, own_keda) as keda:
            (spec,) = (await keda.stub.GetMetricSpec(ref())).metric_specs
            assert (spec.metric_name, spec.target_size, spec.target_size_float) == ("slots-wanted", 1, 1.0)
            stream = keda.stream()
            assert not await read(stream)
            assert not await keda.is_active() and await keda.metric() == 0
            await gateway.admit("r1")
            assert await read(stream)
            assert await keda.is_active()
            view = await cluster(address, lambda view: bool(view.pools), tls=tls)
            assert [(pool.num_devices, pool.num_wanted) for pool in view.pools] == [(1, 1)]
            assert await keda.metric() == 1
            assert [await keda.metric(numDevices="1", role=role) for role in ("prefill", "decode")] == [1, 1]
            assert not await keda.is_active(numDevices="2")
            await gateway.send(withdraw=scheduler_pb2.Withdraw(key=types_pb2.AttemptKey(request_id="r1", attempt=1)))
            assert not await read(stream)
            assert not await keda.is_active() and await keda.metric() == 0
        _, *of_other = pem_of(Authority(tmp_path / "other").node("keda", dns=("keda",)))
        for credentials in (None, grpc.ssl_channel_credentials(ca), grpc.ssl_channel_credentials(ca, *of_other)):
            async with keda_of(port, credentials) as keda:
                assert (await fault(keda.is_active())).code() == grpc.StatusCode.UNAVAILABLE
        options = [("grpc.ssl_target_name_override", "localhost")]
        async with grpc.aio.secure_channel(address, own_keda, options=options) as control:
            stub: Any = scheduler_pb2_grpc.SchedulerStub(control)
            refused = await fault(stub.Explain(scheduler_pb2.ExplainRequest(model="acme/tiny")))
            assert refused.code() == grpc.StatusCode.PERMISSION_DENIED, "KEDA's certificate names no caller"


async def test_push_needs_no_round(it: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "ROUND_S", 3600.0)
    async with served(it) as (address, keda), GatewayClient(address) as gateway:
        stream = keda.stream()
        await gateway.admit("r1")
        assert await read(stream) and await keda.is_active()


async def test_nothing_is_said_before_targets_are_known(it: ScriptedCluster) -> None:
    async with served(it, settle_s=3600.0) as (_, keda):
        for call in (keda.is_active, keda.metric):
            early = await fault(call())
            assert early.code() == grpc.StatusCode.UNAVAILABLE
            assert "has just become active" in str(early.details())


async def test_bad_requests_are_refused_by_their_field(it: ScriptedCluster) -> None:
    async with served(it) as (_, keda):
        bad = {"numDevices": "two"}
        calls: list[Awaitable[Any]] = [
            keda.is_active(**bad),
            keda.metric(**bad),
            keda.stub.GetMetricSpec(ref(**bad)),
            keda.stream(**bad).read(),
        ]
        for call in calls:
            refused = await fault(call)
            assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert str(refused.details()).startswith("numDevices is 'two'; give the number")
            error = error_from_rpc(refused)
            assert isinstance(error, InvalidRequest) and error.field == "scalerMetadata.numDevices"
        refused = await fault(keda.metric("queue-length"))
        assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert refused.details() == "there is no metric 'queue-length'; ask for slots-wanted"


async def test_streams_are_bounded_and_closed_ones_make_room(it: ScriptedCluster) -> None:
    async with served(it) as (_, keda):
        streams = [keda.stream() for _ in range(MAX_STREAMS)]
        assert not any([await read(stream) for stream in streams])
        assert (await fault(keda.stream().read())).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        streams.pop().cancel()

        async def has_room() -> bool:
            stream = keda.stream()
            try:
                return not await read(stream)
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                return False

        await eventually(has_room)


async def test_streams_end_without_an_error_when_the_scheduler_leaves(it: ScriptedCluster, ports: Ports) -> None:
    """After an error KEDA waits longer and longer before it opens another."""
    port = ports.free()
    async with keda_of(port) as keda:
        async with it.scheduler(keda_port=port, **FOLLOW):
            stream = keda.stream()
            assert not await read(stream)
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() == grpc.StatusCode.OK


async def test_taken_port_is_named_by_its_setting(it: ScriptedCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CannotStart) as refused, start_faults():
        async with serving(it.settings(keda_port=taken.getsockname()[1], **FOLLOW)):
            pass
    assert str(refused.value).startswith("keda_port (TORCHRELAY_KEDA_PORT): cannot listen on 127.0.0.1:")


async def test_ports_serve_no_methods_of_each_other(it: ScriptedCluster) -> None:
    async with served(it) as (address, keda), keda_of(int(address.rpartition(":")[2])) as wrong:
        stub: Any = scheduler_pb2_grpc.SchedulerStub(keda.channel)
        for call in (wrong.is_active(), stub.Enroll(scheduler_pb2.EnrollRequest())):
            assert (await fault(call)).code() == grpc.StatusCode.UNIMPLEMENTED


def test_messages_have_the_fields_of_kedas_protocol() -> None:
    """By the names and numbers that KEDA publishes; in its protocol they are camelCase."""
    fields = {
        message.name: {field.json_name: field.number for field in message.fields}
        for message in pb.DESCRIPTOR.message_types_by_name.values()
    }
    assert pb.DESCRIPTOR.package == "externalscaler"
    assert fields == {
        "ScaledObjectRef": {"name": 1, "namespace": 2, "scalerMetadata": 3},
        "IsActiveResponse": {"result": 1},
        "GetMetricSpecResponse": {"metricSpecs": 1},
        "MetricSpec": {"metricName": 1, "targetSize": 2, "targetSizeFloat": 3},
        "GetMetricsRequest": {"scaledObjectRef": 1, "metricName": 2},
        "GetMetricsResponse": {"metricValues": 1},
        "MetricValue": {"metricName": 1, "metricValue": 2, "metricValueFloat": 3},
    }
    value = pb.MetricValue(metric_name="n", metric_value=3, metric_value_float=1.0)
    assert value.SerializeToString() == bytes.fromhex("0a016e 1003 19000000000000f03f"), "int64, and double"


OF_KEDA = {"scalerAddress": "demo-scheduler.models:7102", "enableTLS": "true", "unsafeSsl": "false"}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"numDevices": "1"}, Pool(1)),
        ({"numDevices": "8", "role": "both"}, Pool(8)),
        ({"numDevices": "1", "role": "prefill"}, Pool(1, Role.PREFILL)),
        ({"numDevices": "1", "role": "decode"}, Pool(1, Role.DECODE)),
    ],
)
def test_metadata_selects_a_pool(metadata: dict[str, str], expected: Pool) -> None:
    assert selected_pool(metadata) == selected_pool(metadata | OF_KEDA) == expected


@pytest.mark.parametrize(
    ("metadata", "key", "fault"),
    [
        ({}, "numDevices", "numDevices is missing; give the number of devices of each worker"),
        *(
            ({"numDevices": number}, "numDevices", f"numDevices is {number!r}; give the number")
            for number in ("", "0", "-1", "1.5", "two", "٣", "10000", " 1")
        ),
        ({"numDevices": "1", "role": "Decode"}, "role", "role is 'Decode'; .*: both, prefill, decode"),
        (
            {"numDevice": "1"},
            "numDevice",
            "'numDevice' is not a key of this scaler, whose keys are numDevices and role",
        ),
    ],
)
def test_bad_metadata_is_refused_by_its_key(metadata: dict[str, str], key: str, fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault) as refused:
        selected_pool(metadata)
    assert refused.value.field == f"scalerMetadata.{key}"
