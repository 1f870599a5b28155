"""Clients without credentials, and compromised services, against the brokers and control RPCs of a platform.

Each attack is refused and named. At the end the platform is the one it was: the same processes, the same answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from torchrelay.cli.up.plan import STORE_ID
from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller, MethodCallers, call_token
from torchrelay.common.identity.keys import broker_password, derive_node_key
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.load_reports import MAC_HEADER, report_mac
from torchrelay.common.net.nats_client import connect
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
from torchrelay.scheduler.policy.types import Peer
from torchrelay.scheduler.service.peer_channels import PeerChannels
from torchrelay.scheduler.service.servicer import CALLERS as SCHEDULER
from torchrelay.worker.servicer import CALLERS as WORKER

pytestmark = pytest.mark.e2e
PROMPT = [5, 6, 7, 8, 9, 10]
CHILDREN = ("gateway", "scheduler", "param-store", "prefill-0", "decode-0")
FUTURE = 1 << 62
# Each node with what it serves.
SERVED: dict[str, MethodCallers] = {
    SCHEDULER_NODE: SCHEDULER,
    STORE_ID: STORE,
    "prefill-0": {**WORKER, **PREFILL},
    "decode-0": DECODE,
}


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


@pytest.mark.parametrize("node", SERVED)
def test_call_needs_a_token_of_its_node(target: Target, node: str, subtests: pytest.Subtests) -> None:
    """A node cannot use the tokens of its callers at other nodes."""
    other = next(other for other in SERVED if other != node)
    for method in SERVED[node]:
        for token in ("", target.token(other, *Caller)):
            with subtests.test(f"{method}, token {token!r}"):
                assert target.call(node, method, token) is grpc.StatusCode.UNAUTHENTICATED
    unknown = target.call(node, "/torchrelay.control.v1.Worker/Explode", target.token(node, *Caller))
    assert unknown is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("node", SERVED)
def test_token_of_another_caller_is_refused(target: Target, node: str, subtests: pytest.Subtests) -> None:
    for method, allowed in SERVED[node].items():
        for caller in set(Caller) - set(allowed):
            with subtests.test(f"{method}, {caller}"):
                assert target.call(node, method, target.token(node, caller)) is grpc.StatusCode.PERMISSION_DENIED


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


async def test_brokers_have_the_users_of_the_platform(target: Target) -> None:
    """``unit/common/net`` has the permissions of each user, and other wrong credentials."""
    report, password = publication("relay.load.worker.prefill-0"), target.nats_password("decode-0")
    for user, guess in ((None, None), ("scheduler", "guess"), ("decode-1", password)):
        assert "Authorization Violation" in await refusal(target.nats_url, report, user, guess)
    for user, command in (
        ("decode-0", report),
        ("decode-0", subscription("relay.usage.*")),
        (STORE_ID, publication("relay.load.store.another")),
        ("gateway", publication("$JS.API.STREAM.PURGE.RELAY_HISTORY")),
        ("scheduler", subscription("relay.hint.key")),
    ):
        assert "Permissions Violation" in await refusal(target.nats_url, command, user, target.nats_password(user))
    redis: Any
    for user, password, error in (
        ("default", "", AuthenticationError),
        ("gateway", "guess", AuthenticationError),
        ("gateway", broker_password(target.cluster_key, "redis", "gateway"), NoPermissionError),
    ):
        async with Redis.from_url(target.redis_url(user, password)) as redis:
            with pytest.raises(error):
                await redis.execute_command("FLUSHALL")


ABOUT_ANOTHER = WorkerReport(worker_id="prefill-0", incarnation="forged", host_id="local", grpc_address="127.0.0.1:1")
ABOUT_NOBODY = WorkerReport()
ABOUT_A_STORE = StoreReport(store_id=STORE_ID, incarnation="forged", host_id="local", epoch=FUTURE)
OF_THE_FUTURE = WorkerReport(worker_id="decode-0", incarnation="forged", host_id="local", epoch=FUTURE)


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


async def test_only_own_reports_with_the_nodes_signature_count(target: Target) -> None:
    own = derive_node_key(target.cluster_key, "decode-0")
    others = (None, derive_node_key(bytes(32), "decode-0"), derive_node_key(target.cluster_key, "prefill-0"))
    for report in (ABOUT_ANOTHER, ABOUT_NOBODY, ABOUT_A_STORE):
        for key in (*others, own):
            await publish_as_decode_0(target, report, key)
    for key in others:
        await publish_as_decode_0(target, OF_THE_FUTURE, key)
    assert_unimpressed(target)


async def test_impostor_of_the_scheduler_learns_nothing(tmp_path: Path) -> None:
    """A worker that took over the scheduler's address."""
    ours, asked = Authority(tmp_path), []

    class Impostor(scheduler_pb2_grpc.SchedulerServicer):
        async def Explain(self, request: scheduler_pb2.ExplainRequest, context: Any) -> scheduler_pb2.ExplainReply:
            asked.append(request.request_id)
            return scheduler_pb2.ExplainReply()

    server = RpcServer("127.0.0.1", tls=Tls(ours.node("w-1", Caller.WORKER)))
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(Impostor(), server.server)  # type: ignore[abstract]
    await server.start()
    try:
        tls = Tls(ours.node("gateway", Caller.GATEWAY))
        async with open_channel(f"127.0.0.1:{server.port}", tls, "", Caller.SCHEDULER) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                request = scheduler_pb2.ExplainRequest(request_id="req-1")
                await scheduler_pb2_grpc.SchedulerStub(channel).Explain(request, timeout=5)
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
        peer = Peer("node-1", is_store=callee is Caller.STORE)
        stub = channels.stub(f"127.0.0.1:{server.port}", peer)
        call = stub.Drop(param_store_pb2.DropRequest()) if peer.is_store else stub.Unload(worker_pb2.UnloadRequest())
        with pytest.raises(grpc.aio.AioRpcError) as refused:  # the server has none of these services
            await call
        is_reached = refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert is_reached if role is callee else refused.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await channels.close()
        await server.stop(0)


async def test_platform_is_unchanged_after_the_attacks(target: Target) -> None:
    await publish_as_decode_0(target, ABOUT_ANOTHER, None)
    assert target.children() == target.pids
    assert target.chat() == target.answer
    log = (target.platform.home.logs / "scheduler.log").read_text().splitlines()
    reasons = [line["reason"] for line in map(json.loads, log) if line["event"] == "report_refused"]
    assert "it is not signed" in reasons
    assert len(reasons) == len(set(reasons))  # each offence once, however often it came
