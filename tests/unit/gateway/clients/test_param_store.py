"""A param-store that hangs during an upload, a commit or a read is named; a refusal keeps its cause."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from blake3 import blake3
from grpc.aio import AioRpcError, Metadata
from hypothesis import given
from hypothesis import strategies as st

from tests.support.echo_services import EchoStore
from tests.support.wait import HANG_S, eventually
from tests.unit.gateway.scripted_services import ScriptedScheduler, ScriptedStore, serving
from torchrelay.common.errors import DiskFull, InvalidRequest, NotFound, TorchrelayError, Unavailable
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.errors import status_of
from torchrelay.common.net.rpc.options import ACCEPTED
from torchrelay.control.v1 import param_store_pb2
from torchrelay.control.v1.param_store_pb2_grpc import (
    ParamStoreServicer,
    ParamStoreStub,
    add_ParamStoreServicer_to_server,
)
from torchrelay.gateway.clients.endpoint import param_store_endpoint
from torchrelay.gateway.clients.file_reader import StoreFileReader
from torchrelay.gateway.clients.param_store import StoreClient
from torchrelay.gateway.clients.rechunk import CHUNK_BYTES, rechunk
from torchrelay.gateway.clients.scheduler import SchedulerClient, Slots
from torchrelay.gateway.core import ModelShape

SILENT = r"the param-store at store:1 \(TORCHRELAY_STORE_ADDRESS\) does not answer"


class HungStore(ScriptedStore):
    """A store whose disk hangs: it reads nothing of an upload, and sends one step of a commit."""

    accepts = True  # an upload's opening

    async def PutFile(self, request_iterator: AsyncIterator[Any], context: Any) -> param_store_pb2.FileState:
        if self.accepts:
            await context.send_initial_metadata((ACCEPTED,))
        await asyncio.Event().wait()
        raise AssertionError

    async def Commit(self, request: Any, context: Any) -> AsyncIterator[param_store_pb2.CommitProgress]:
        yield param_store_pb2.CommitProgress(stage="wait")
        await asyncio.Event().wait()


def hung_store() -> HungStore:
    return HungStore()  # type: ignore[abstract]


async def pieces(num_bytes: int) -> AsyncIterator[bytes]:
    yield bytes(num_bytes)


@pytest.mark.parametrize(
    ("accepts", "num_bytes"), [(False, 10), (True, 10), (True, 16 << 20)], ids=["not accepted", "sent", "not taken"]
)
async def test_store_that_reads_no_bytes_is_named(accepts: bool, num_bytes: int) -> None:
    store = hung_store()
    store.accepts = accepts
    async with serving(store) as channel, asyncio.timeout(HANG_S):
        client = StoreClient(channel, "store:1", silence_s=0.5)
        with pytest.raises(Unavailable, match=SILENT):
            await client.put_file("u1", "w", 0, pieces(num_bytes))


async def test_cancelled_upload_stops_reading_the_body() -> None:
    reading, has_ended = asyncio.Event(), False

    async def body() -> AsyncIterator[bytes]:
        nonlocal has_ended
        reading.set()
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            has_ended = True

    async with serving(hung_store()) as channel, asyncio.timeout(HANG_S):
        sending = asyncio.ensure_future(StoreClient(channel, "store:1").put_file("u1", "w", 0, body()))
        await reading.wait()
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled() and has_ended


async def test_silent_commit_is_named() -> None:
    async with serving(hung_store()) as channel, asyncio.timeout(HANG_S):
        client, stages = StoreClient(channel, "store:1", silence_s=2.0), list[str]()
        with pytest.raises(Unavailable, match=SILENT):
            async for step in client.commit("u1", 0):
                stages.append(step.stage)
        assert stages == ["wait"]


class FullStore(ParamStoreServicer):
    """Refuses a file that has begun. It runs in threads of its own, so that the client's event loop can be busy."""

    def __init__(self) -> None:
        self.num_messages = 1  # that it reads first
        self.is_sending = threading.Event()  # then it waits until the client is in the middle of a write
        self.is_sending.set()
        self.has_refused = threading.Event()
        self.breaks_off_by: grpc.StatusCode | None = None  # as gRPC does it, instead
        self.accepts = True

    def PutFile(self, request_iterator: Any, context: Any) -> param_store_pb2.FileState:
        context.add_callback(self.has_refused.set)
        if self.accepts:
            context.send_initial_metadata((ACCEPTED,))
        for _ in range(self.num_messages):
            next(request_iterator)
        assert self.is_sending.wait(HANG_S)
        if self.breaks_off_by is not None:
            context.abort(self.breaks_off_by, "grpc's words")
        code, message, trailing = status_of(DiskFull("the disk is full"))
        context.set_trailing_metadata(trailing)
        context.abort(code, message)
        raise AssertionError


@contextmanager
def serving_full_store() -> Iterator[tuple[FullStore, str]]:
    store, server = FullStore(), grpc.server(ThreadPoolExecutor(1))  # type: ignore[abstract]
    add_ParamStoreServicer_to_server(store, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield store, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


async def assert_cause_is_told(address: str, body: AsyncIterator[bytes]) -> None:
    async with open_channel(address) as channel, asyncio.timeout(HANG_S):
        with pytest.raises(DiskFull, match="the disk is full"):
            await StoreClient(channel, "store:1").put_file("u1", "w", 0, body)


async def test_body_of_a_refused_opening_is_not_read() -> None:
    num_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_read
        num_read += 1
        yield b"x"

    with serving_full_store() as (store, address):
        store.accepts = False
        await assert_cause_is_told(address, body())
    assert num_read == 0


@pytest.mark.parametrize("then", ["ends", "writes", "is idle"])
async def test_late_refusal_keeps_its_cause(then: str) -> None:
    """The body ends, or goes on, while the event loop has not seen the refusal; or it is idle and waits for nothing."""
    with serving_full_store() as (store, address):
        store.num_messages = 2

        async def body() -> AsyncIterator[bytes]:
            yield bytes(CHUNK_BYTES)
            if then == "is idle":
                await asyncio.Event().wait()
            assert store.has_refused.wait(HANG_S)
            if then == "writes":
                yield bytes(CHUNK_BYTES)

        await assert_cause_is_told(address, body())


async def test_refusal_during_a_write_keeps_its_cause() -> None:
    """The store reads no further, so that a write waits for it."""
    with serving_full_store() as (store, address):
        store.is_sending.clear()
        asyncio.get_running_loop().call_later(0.2, store.is_sending.set)
        await assert_cause_is_told(address, pieces(16 << 20))


@pytest.mark.parametrize("num_messages", [1, 2, 3, 5, 8, 16, 30])
async def test_refusal_at_any_message_keeps_its_cause(num_messages: int) -> None:
    with serving_full_store() as (store, address):
        store.num_messages = num_messages
        await assert_cause_is_told(address, pieces(32 << 20))


async def test_broken_body_is_not_a_store_error() -> None:
    with serving_full_store() as (store, address):
        store.num_messages = 99

        async def body() -> AsyncIterator[bytes]:
            yield bytes(CHUNK_BYTES)
            raise asyncio.InvalidStateError("the body")

        async with open_channel(address) as channel, asyncio.timeout(HANG_S):
            with pytest.raises(asyncio.InvalidStateError, match="the body"):
                await StoreClient(channel, "store:1").put_file("u1", "w", 0, body())


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE])
async def test_broken_transfer_asks_to_resume(code: grpc.StatusCode) -> None:
    with serving_full_store() as (store, address):
        store.breaks_off_by = code
        async with open_channel(address) as channel, asyncio.timeout(HANG_S):
            with pytest.raises(Unavailable, match="; resume w at the offset in the upload's state") as caught:
                await StoreClient(channel, "store:1").put_file("u1", "w", 0, pieces(32 << 20))
    assert caught.value.field == "w" and "grpc's words" not in caught.value.message


async def _body(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@given(st.lists(st.binary(max_size=50), max_size=12), st.integers(1, 40))
async def test_body_is_cut_into_full_slices(pieces: list[bytes], slice_bytes: int) -> None:
    cut = [piece async for piece in rechunk(_body(pieces), slice_bytes)]
    assert b"".join(cut) == b"".join(pieces)
    assert all(len(piece) == slice_bytes for piece in cut[:-1])
    assert all(0 < len(piece) <= slice_bytes for piece in cut)


AWAY = "the param-store at 10.0.0.7:7103 (TORCHRELAY_STORE_ADDRESS) cannot be reached"


def failed(code: grpc.StatusCode, *trailing: tuple[str, str]) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(*trailing), details="its words")


def test_error_names_the_peer_or_the_endpoint() -> None:
    for error, kind, message in (
        (failed(grpc.StatusCode.UNAVAILABLE), Unavailable, AWAY),
        (failed(grpc.StatusCode.DEADLINE_EXCEEDED), Unavailable, AWAY),
        (failed(grpc.StatusCode.UNAVAILABLE, ("torchrelay-code", "unavailable")), Unavailable, "its words"),
        (failed(grpc.StatusCode.NOT_FOUND, ("torchrelay-code", "not_found")), NotFound, "its words"),
        (failed(grpc.StatusCode.INTERNAL), TorchrelayError, "its words"),
    ):
        made = param_store_endpoint("10.0.0.7:7103").error(error)
        assert (type(made), made.message) == (kind, message)


async def test_client_gets_slots_and_explanations() -> None:
    async with serving(ScriptedScheduler()) as channel:  # type: ignore[abstract]
        client = SchedulerClient(channel, "127.0.0.1:1")
        slots = await client.slots()
        assert slots == Slots(
            12345, frozenset({("torchrelay", frozenset(("gpu=l4", "zone=a")))}), largest_pool_bytes=1 << 30
        )
        for hosts in ((), ("zone=a",), ("zone=a", "gpu=l4")):
            slots.check_hosts(hosts)
        with pytest.raises(
            InvalidRequest, match=r"^no host has the labels zone=b; the hosts have gpu=l4, zone=a: start"
        ):
            slots.check_hosts(["zone=b"])
        mixed = replace(slots, kinds=slots.kinds | {("vllm", frozenset(("zone=b",)))})
        mixed.check_hosts(["zone=b"], "vllm")
        with pytest.raises(
            InvalidRequest,
            match=r"^no host with the engine vllm has the labels zone=a; the hosts with the engine vllm have zone=b: ",
        ):
            mixed.check_hosts(["zone=a"], "vllm")
        shape = ModelShape(32, 8, 128, 2, 4096, 1000)
        slots.check_kv_share(0.002, shape)
        with pytest.raises(InvalidRequest, match=r"^a share of 0.001 .* holds not even 16 tokens .* at least 0.01$"):
            slots.check_kv_share(0.001, shape)
        with pytest.raises(
            InvalidRequest, match=r"16 tokens of the model; give the workers more than its 1,000 bytes$"
        ):
            replace(slots, largest_pool_bytes=1000).check_kv_share(0.0005, shape)
        for engine in ("auto", "torchrelay"):
            slots.check_engine(engine)
        with pytest.raises(InvalidRequest, match=r"^no worker has the engine vllm; the workers have torchrelay$"):
            slots.check_engine("vllm")
        assert (await client.explain(request_id="req-1")).phases[0].name == "queue"
        with pytest.raises(NotFound):
            await client.explain(request_id="req-old")


async def test_no_slots_are_known_without_a_scheduler() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        client = SchedulerClient(channel, "127.0.0.1:1")
        slots = await client.slots(timeout_s=1)
        assert slots == Slots()
        slots.check_engine("vllm")
        slots.check_hosts(["zone=b"])
        with pytest.raises(Unavailable, match=r"the scheduler at 127.0.0.1:1 \(TORCHRELAY_SCHEDULER_ADDRESS\)"):
            await client.explain(request_id="req-1", timeout_s=1)


DATA = bytes(3 << 20)
DIGEST = blake3(DATA).hexdigest()


@pytest.fixture
async def store() -> AsyncIterator[EchoStore]:
    store = EchoStore({DIGEST: DATA})
    await store.start()
    yield store
    store.answers.set()
    await store.stop()


async def test_hung_store_is_named(store: EchoStore, tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with open_channel(store.address) as channel:
        stub = ParamStoreStub(channel)
        slow, quick = (StoreFileReader(stub, store.address, part_timeout_s) for part_timeout_s in (60.0, 0.2))
        for _ in range(2):
            assert await slow.save(DIGEST, "tokenizer.json", 4 << 20, path) == len(DATA)
            assert path.read_bytes() == DATA
            store.answers.clear()
            with pytest.raises(
                Unavailable, match=r"the param-store at .* \(TORCHRELAY_STORE_ADDRESS\) does not answer"
            ):
                await quick.save(DIGEST, "tokenizer.json", 4 << 20, path)
            store.answers.set()


async def test_read_waits_for_store_that_restarts(store: EchoStore, tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with open_channel(store.address) as channel:
        reader = StoreFileReader(ParamStoreStub(channel), store.address, restart_s=60.0)
        await store.stop()
        reading = asyncio.create_task(reader.save(DIGEST, "tokenizer.json", 4 << 20, path))
        await eventually(lambda: channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        assert not reading.done()
        await store.revive()
        assert await reading == len(DATA)
    assert path.read_bytes() == DATA


async def test_store_that_stays_away_is_named(store: EchoStore, tmp_path: Path) -> None:
    async with open_channel(store.address) as channel:
        reader = StoreFileReader(ParamStoreStub(channel), store.address, restart_s=0.2)
        await store.stop()
        with pytest.raises(Unavailable, match=r"\(TORCHRELAY_STORE_ADDRESS\) cannot be reached"):
            await reader.save(DIGEST, "tokenizer.json", 4 << 20, tmp_path / "file")
