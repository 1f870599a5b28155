"""Clients without credentials, and compromised services, against the brokers and control RPCs of a platform.

Each attack is refused and named. At the end the platform is the one it was: the same processes, the same answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from tests.support.certificates import Authority
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.nats_wire import publication, refusal, subscription
from tests.support.platform import Platform, running_platform
from torchrelay.cli.api.scheduler_client import explain
from torchrelay.cli.errors import CliError
from torchrelay.cli.up.plan import STORE_ID
from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller, MethodCallers, call_token
from torchrelay.common.identity.keys import broker_password, derive_node_key
from torchrelay.common.identity.tls import Tls, TlsFiles
from torchrelay.common.net.load_reports import MAC_HEADER, report_mac
from torchrelay.common.net.nats_client import connect
from torchrelay.common.net.probes import GrpcProbe
from torchrelay.common.net.rpc.channels import open_channel, with_token
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.common.net.urls import with_credentials
from torchrelay.control.v1 import (
    param_store_pb2,
    param_store_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from torchrelay.control.v1.reports_pb2 import StoreReport, WorkerReport
from torchrelay.decode.role import CALLERS as DECODE
from torchrelay.param_store.grpc.servicer import CALLERS as STORE
from torchrelay.prefill.role import CALLERS as PREFILL
from torchrelay.scheduler.service.peer_channels import PeerChannels
from torchrelay.scheduler.service.servicer import CALLERS as SCHEDULER
from torchrelay.worker.servicer import CALLERS as WORKER

pytestmark = pytest.mark.e2e
PROMPT = [5, 6, 7, 8, 9, 10]
CHILDREN = ("gateway", "scheduler", "param-store", "prefill-0", "decode-0")
FUTURE = 1 << 62
# Each node with what it serves.
SERVED: dict[str, list[MethodCallers]] = {
    SCHEDULER_NODE: [SCHEDULER],
    STORE_ID: [STORE],
    "prefill-0": [WORKER, PREFILL],
    "decode-0": [DECODE],
}
CALLS = [(node, method) for node, served in SERVED.items() for methods in served for method in methods]
WRONG_CALLS = [
    (node, method, caller)
    for node, served in SERVED.items()
    for methods in served
    for method, allowed in methods.items()
    for caller in Caller
    if caller not in allowed
]


class Target:
    """A running platform, seen from outside and from within."""

    def __init__(self, platform: Platform, folder: Path) -> None:
        self.platform = platform
        self.cluster_key = bytes.fromhex(platform.home.cluster_key())
        self.key = platform.tenant("acme")
        self.model = platform.upload(self.key, make_checkpoint(folder, "llama"), "tiny")
        self.answer = self.chat()
        self.pids = self.children()

    def chat(self) -> list[int]:
        answer = complete(self.platform, self.key, self.model, PROMPT, max_tokens=8, ignore_eos=True)
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    def children(self) -> dict[str, int]:
        return {name: self.platform.pid(name) for name in CHILDREN}

    def address(self, node_id: str) -> str:
        name = {SCHEDULER_NODE: "scheduler", STORE_ID: "param-store"}.get(node_id, node_id)
        address: str = json.loads((self.platform.home.run / f"{name}.json").read_text())["grpc"]
        return address

    def token(self, node_id: str, *callers: Caller) -> str:
        return call_token(derive_node_key(self.cluster_key, node_id), *callers)

    def nats_password(self, user: str) -> str:
        return broker_password(self.cluster_key, "nats", user)

    def redis_url(self, user: str, password: str) -> str:
        return with_credentials(self.platform.endpoints["redis"].replace("gateway:***@", ""), user, password)

    @property
    def nats_url(self) -> str:
        return self.platform.endpoints["nats"]

    def call(self, node_id: str, method: str, token: str, message: bytes = b"") -> grpc.StatusCode:
        """The status of a call; its kind does not matter before it is authorised."""
        with grpc.insecure_channel(self.address(node_id)) as plain:
            channel = with_token(plain, token) if token else plain
            try:
                calls: Any = channel.stream_stream(method, lambda sent: sent, lambda received: received)
                for _ in calls(iter([message]), timeout=20):
                    break
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)
                return error.code()
        return grpc.StatusCode.OK


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    options = ("--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1", "--idle-timeout-s", "600")
    with running_platform(tmp_path_factory.mktemp("target"), options) as platform:
        yield Target(platform, tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.mark.parametrize(("node", "method"), CALLS)
def test_call_without_a_token_is_refused(target: Target, node: str, method: str) -> None:
    assert target.call(node, method, "") is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(("node", "method"), CALLS)
def test_token_of_another_node_is_refused(target: Target, node: str, method: str) -> None:
    """A node cannot use the tokens of its callers at other nodes."""
    others = [other for other in SERVED if other != node]
    stolen = ",".join(target.token(other, *Caller) for other in others[:1])
    assert target.call(node, method, stolen) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(("node", "method", "caller"), WRONG_CALLS)
def test_token_of_another_caller_is_refused(target: Target, node: str, method: str, caller: Caller) -> None:
    assert target.call(node, method, target.token(node, caller)) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("node", SERVED)
def test_undeclared_method_is_not_served(target: Target, node: str) -> None:
    known = target.call(node, "/torchrelay.control.v1.Worker/Explode", target.token(node, *Caller))
    assert known is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("epoch", [FUTURE, (1 << 64) - 1])
def test_epoch_of_the_future_is_refused(target: Target, epoch: int) -> None:
    """Even from one who holds the scheduler's tokens."""
    refusals = []
    with target.platform.channel(target.address("prefill-0"), "prefill-0") as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Unload(worker_pb2.UnloadRequest(epoch=epoch, instance_id="any"), timeout=20)
        refusals.append(caught.value)
    with target.platform.channel(target.address(STORE_ID), STORE_ID) as channel:
        store = param_store_pb2_grpc.ParamStoreStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            store.Drop(param_store_pb2.DropRequest(epoch=epoch, pack_id="f" * 64), timeout=20)
        refusals.append(caught.value)
    for refused in refusals:
        assert isinstance(refused, grpc.Call) and refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "ahead of this host's clock" in (refused.details() or "")


WRONG_CREDENTIALS = [
    (None, None),
    ("", ""),
    ("scheduler", ""),
    ("scheduler", "guess"),
    ("root", "root"),
    ("decode-1", "guess"),
]


@pytest.mark.parametrize(("user", "password"), WRONG_CREDENTIALS)
async def test_nats_refuses_wrong_credentials(target: Target, user: str | None, password: str | None) -> None:
    said = await refusal(target.nats_url, publication("relay.load.worker.prefill-0"), user, password)
    assert "Authorization Violation" in said


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("decode-0", publication("relay.load.worker.prefill-0")),
        ("decode-0", publication(f"relay.load.store.{STORE_ID}")),
        ("decode-0", publication("relay.hint.key")),
        ("decode-0", publication("relay.event.scale.up")),
        ("decode-0", publication("$JS.API.STREAM.DELETE.RELAY_USAGE")),
        ("decode-0", subscription("relay.usage.*")),
        ("decode-0", subscription("_INBOX.gateway.>")),
        (STORE_ID, publication("relay.load.store.another")),
        (STORE_ID, publication("relay.usage.gateway")),
        (STORE_ID, subscription(">")),
        ("gateway", publication("relay.load.worker.prefill-0")),
        ("gateway", publication("relay.usage.gateway")),
        ("gateway", publication("$JS.API.STREAM.PURGE.RELAY_HISTORY")),
        ("gateway", subscription("relay.load.>")),
        ("scheduler", publication("relay.load.worker.prefill-0")),
        ("scheduler", publication("$JS.API.STREAM.DELETE.RELAY_HISTORY")),
        ("scheduler", subscription("relay.hint.key")),
        ("scheduler", subscription("$JS.EVENT.>")),
    ],
)
async def test_nats_refuses_subjects_of_another_service(target: Target, user: str, command: str) -> None:
    said = await refusal(target.nats_url, command, user, target.nats_password(user))
    assert "Permissions Violation" in said


def about_another() -> WorkerReport:
    return WorkerReport(worker_id="prefill-0", incarnation="forged", host_id="local", grpc_address="127.0.0.1:1")


def of_the_future() -> WorkerReport:
    return WorkerReport(worker_id="decode-0", incarnation="forged", host_id="local", epoch=FUTURE)


def about_nobody() -> WorkerReport:
    return WorkerReport()


def about_a_store() -> StoreReport:
    return StoreReport(store_id=STORE_ID, incarnation="forged", host_id="local", epoch=FUTURE)


FORGERIES = [about_another, of_the_future, about_nobody, about_a_store]


async def publish_as_decode_0(target: Target, report: WorkerReport | StoreReport, key: bytes | None) -> None:
    """As a worker that turned: with its own password, on the only subject of reports that the broker lets it use."""
    client = await connect(with_credentials(target.nats_url, "decode-0", target.nats_password("decode-0")), "forger")
    try:
        subject, payload = "relay.load.worker.decode-0", report.SerializeToString()
        headers = {MAC_HEADER: report_mac(key, subject, payload)} if key else None
        for _ in range(3):
            await client.publish(subject, payload, headers=headers)
        await client.flush()
    finally:
        await client.close()


def assert_unimpressed(target: Target) -> None:
    view = next(target.platform.views())
    workers = {worker.worker_id: worker for worker in view.workers}
    assert set(workers) == {"prefill-0", "decode-0"}
    assert "forged" not in {worker.incarnation for worker in view.workers}
    assert "forged" not in {store.incarnation for store in view.stores}
    assert workers["prefill-0"].grpc_address == target.address("prefill-0")


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
@pytest.mark.parametrize("signer", ["nobody", "decode-0 of another cluster", "another node"])
async def test_report_not_signed_by_its_node_is_refused(
    target: Target, forge: Callable[[], WorkerReport | StoreReport], signer: str
) -> None:
    keys = {
        "nobody": None,
        "decode-0 of another cluster": derive_node_key(bytes(32), "decode-0"),
        "another node": derive_node_key(target.cluster_key, "prefill-0"),
    }
    await publish_as_decode_0(target, forge(), keys[signer])
    assert_unimpressed(target)


@pytest.mark.parametrize("forge", [about_another, about_nobody, about_a_store], ids=lambda forge: forge.__name__)
async def test_signed_report_about_another_node_is_refused(
    target: Target, forge: Callable[[], WorkerReport | StoreReport]
) -> None:
    await publish_as_decode_0(target, forge(), derive_node_key(target.cluster_key, "decode-0"))
    assert_unimpressed(target)


@pytest.mark.parametrize(("user", "password"), [("", ""), ("default", ""), ("gateway", "guess"), ("root", "root")])
@pytest.mark.parametrize("command", ["PING", "GET key", "FLUSHALL", "CONFIG GET *", "SHUTDOWN NOSAVE"])
async def test_redis_refuses_wrong_credentials(target: Target, user: str, password: str, command: str) -> None:
    url = target.redis_url(user, password) if user else target.redis_url("x", "x").replace("x:x@", "")
    redis: Any
    async with Redis.from_url(url) as redis:
        with pytest.raises(AuthenticationError):
            await redis.execute_command(*command.split())


@pytest.mark.parametrize(
    "command", ["FLUSHALL", "CONFIG SET maxmemory 1", "KEYS *", "ACL SETUSER x on", "CLIENT KILL TYPE normal"]
)
async def test_redis_refuses_administration(target: Target, command: str) -> None:
    password = broker_password(target.cluster_key, "redis", "gateway")
    redis: Any
    async with Redis.from_url(target.redis_url("gateway", password)) as redis:
        with pytest.raises(NoPermissionError):
            await redis.execute_command(*command.split())


def certificates(folder: Path) -> dict[str, TlsFiles]:
    """Certificates of another CA, and of every caller that may not load a model."""
    ours, theirs = Authority(folder / "ours"), Authority(folder / "theirs").node("theirs", Caller.SCHEDULER)
    wrong = {
        "of another CA": theirs,
        "of another CA, knowing ours": TlsFiles(ours.node("x").ca, theirs.cert, theirs.key),
        "expired": ours.expired(),
        "without a part": ours.node("nameless"),
        "of a node called scheduler": ours.node("scheduler", Caller.WORKER),
    }
    return wrong | {f"of a {caller}": ours.node(caller, caller) for caller in Caller if caller is not Caller.SCHEDULER}


KINDS = ["of another CA", "of another CA, knowing ours", "expired", "without a part", "of a node called scheduler"]
KINDS += [f"of a {caller}" for caller in Caller if caller is not Caller.SCHEDULER]


@pytest.mark.parametrize("kind", KINDS)
async def test_certificate_of_another_caller_loads_nothing(tmp_path: Path, kind: str) -> None:
    by_kind = certificates(tmp_path)
    loaded: list[str] = []

    class Slot(worker_pb2_grpc.WorkerServicer):
        async def Load(self, request: worker_pb2.LoadRequest, context: Any) -> worker_pb2.LoadReply:
            loaded.append(request.instance_id)
            return worker_pb2.LoadReply()

    server = RpcServer("127.0.0.1", tls=Tls(by_kind["of a worker"]), node_key=b"k" * 32)
    worker_pb2_grpc.add_WorkerServicer_to_server(Slot(), server.server)  # type: ignore[abstract]
    server.allow(WORKER)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{server.port}", Tls(by_kind[kind])) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await worker_pb2_grpc.WorkerStub(channel).Load(worker_pb2.LoadRequest(instance_id="i"), timeout=20)
    finally:
        await server.stop(0)
    is_foreign = kind in KINDS[:3]
    assert refused.value.code() is (grpc.StatusCode.UNAVAILABLE if is_foreign else grpc.StatusCode.PERMISSION_DENIED), (
        refused.value.details()
    )
    assert not loaded


@pytest.mark.parametrize("role", [Caller.WORKER, Caller.STORE, Caller.GATEWAY, Caller.CLI])
async def test_impostor_of_the_scheduler_learns_nothing(tmp_path: Path, role: Caller) -> None:
    """Another part of the cluster that took over the scheduler's address."""
    ours, asked = Authority(tmp_path), []

    class Impostor(scheduler_pb2_grpc.SchedulerServicer):
        async def Explain(self, request: scheduler_pb2.ExplainRequest, context: Any) -> scheduler_pb2.ExplainReply:
            asked.append(request.request_id)
            return scheduler_pb2.ExplainReply()

    server = RpcServer("127.0.0.1", tls=Tls(ours.node(role, role)))
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(Impostor(), server.server)  # type: ignore[abstract]
    await server.start()
    try:
        with pytest.raises(CliError):
            tls = Tls(ours.node("commands", Caller.CLI))
            await asyncio.to_thread(explain, f"127.0.0.1:{server.port}", "req-1", tls=tls)
    finally:
        await server.stop(0)
    assert not asked


@pytest.mark.parametrize("callee", [Caller.WORKER, Caller.STORE])
@pytest.mark.parametrize("role", [Caller.WORKER, Caller.STORE])
async def test_scheduler_checks_the_certificate_of_its_peer(tmp_path: Path, callee: Caller, role: Caller) -> None:
    ours = Authority(tmp_path)
    server = RpcServer("127.0.0.1", tls=Tls(ours.node(role, role)))
    await server.start()
    channels = PeerChannels(bytes(32), Tls(ours.node("scheduler", Caller.SCHEDULER)))
    try:
        fault = await GrpcProbe(channels.channel(f"127.0.0.1:{server.port}", "node-1", callee)).ask()
        assert fault == ("" if role is callee else "refuses connections")
    finally:
        await channels.close()
        await server.stop(0)


async def test_platform_is_unchanged_after_the_attacks(target: Target) -> None:
    await publish_as_decode_0(target, about_another(), None)
    assert target.children() == target.pids
    assert target.chat() == target.answer
    log = (target.platform.home.logs / "scheduler.log").read_text().splitlines()
    reasons = [line["reason"] for line in map(json.loads, log) if line["event"] == "report_refused"]
    assert "it is not signed" in reasons
    assert len(reasons) == len(set(reasons))  # each offence once, however often it came
