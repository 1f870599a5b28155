"""Streams to workers: opened on demand, shared, closed when idle; a loss is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.support.brokers import free_port
from tests.support.echo_worker import EchoModel, EchoWorker
from tests.support.wait import eventually
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.gateway.inference.core import RequestEvent, WorkerLost
from torchrelay.gateway.inference.execution.stream_watch import WATCH_EVERY_S
from torchrelay.gateway.inference.execution.worker_streams import WorkerStreams


@pytest.fixture
async def worker() -> AsyncIterator[EchoWorker]:
    worker = EchoWorker("w0", EchoModel())
    await worker.start()
    yield worker
    await worker.stop()


KEY = types_pb2.AttemptKey(request_id="r", attempt=1)


def start(request_id: str, max_tokens: int = 5) -> pb.AttemptStart:
    return pb.AttemptStart(
        key=types_pb2.AttemptKey(request_id=request_id, attempt=1),
        prompt=[7, 8, 9],
        sampling=pb.Sampling(max_tokens=max_tokens),
        choices=[pb.ChoiceStart(choice=0)],
    )


async def test_requests_share_a_stream_and_get_their_own_outputs(worker: EchoWorker) -> None:
    events: dict[str, list[RequestEvent]] = {"a": [], "b": []}
    async with WorkerStreams("gw") as streams:
        for name, box in events.items():
            for role in ("decode", "prefill"):
                streams.stream("decode" if role == "decode" else "prefill", worker.ref).start(start(name), box.append)
        await eventually(lambda: all(len(box) == 5 for box in events.values()))
        assert streams.num_open == worker.num_streams == 2
        for name, box in events.items():
            outputs = [output for output in box if isinstance(output, pb.ChoiceOutput)]
            assert {output.key.request_id for output in outputs} == {name}
            assert sorted(output.first_position for output in outputs) == [0, 1, 2, 3, 4]
    await eventually(lambda: worker.num_streams == 0)


async def test_unused_stream_closes_and_opens_again(worker: EchoWorker) -> None:
    events: list[RequestEvent] = []
    async with WorkerStreams("gw", idle_s=0.1) as streams:
        for expected in (1, 2):
            stream = streams.stream("prefill", worker.ref)
            stream.start(start("r", max_tokens=1), events.append)
            await eventually(lambda expected=expected: len(events) == expected)  # type: ignore[misc]
            stream.forget(KEY)
            await eventually(lambda: streams.num_open == 0 and worker.num_streams == 0)
    assert not any(isinstance(event, WorkerLost) for event in events)


async def test_idle_stream_with_an_attempt_stays_open(worker: EchoWorker) -> None:
    worker.pause_at = 0
    async with WorkerStreams("gw", idle_s=0.05) as streams:
        busy = streams.stream("decode", worker.ref)
        busy.start(start("r"), lambda _: None)
        await eventually(lambda: worker.num_running == 1)
        for _ in range(2):  # another stream, opened later, closes for its idleness meanwhile
            streams.stream("prefill", worker.ref)
            await eventually(lambda: streams.num_open == 1)
        assert streams.stream("decode", worker.ref) is busy


async def test_broken_stream_reports_the_loss_to_every_attempt(worker: EchoWorker) -> None:
    events: list[RequestEvent] = []
    worker.pause_at = 0
    async with WorkerStreams("gw") as streams:
        for name in "abc":
            streams.stream("decode", worker.ref).start(start(name), events.append)
        await eventually(lambda: worker.num_running == 3)
        await worker.kill()
        await eventually(lambda: len(events) == 3)
        assert events == [WorkerLost(1, "w0")] * 3
        assert streams.num_open == 0


async def test_unreachable_worker_is_lost_at_once() -> None:
    events: list[RequestEvent] = []
    nowhere = types_pb2.WorkerRef(worker_id="w9", grpc_address=f"127.0.0.1:{free_port()}")
    async with WorkerStreams("gw") as streams:
        streams.stream("prefill", nowhere).start(start("r"), events.append)
        await eventually(lambda: bool(events))
    assert events == [WorkerLost(1, "w9")]


async def test_cancelled_attempt_stops_and_gets_no_events(worker: EchoWorker) -> None:
    events: list[RequestEvent] = []
    worker.pause_at = 0
    async with WorkerStreams("gw") as streams:
        stream = streams.stream("decode", worker.ref)
        stream.start(start("r"), events.append)
        await eventually(lambda: worker.num_running == 1)
        stream.cancel(KEY)
        stream.cancel(KEY)
        await eventually(lambda: worker.num_running == 0)
        await worker.kill()
        await eventually(lambda: streams.num_open == 0)
    assert events == []
    assert worker.cancelled == [("decode", ("r", 1))]


async def test_silent_worker_is_lost_and_its_attempts_cancelled(worker: EchoWorker) -> None:
    events: list[RequestEvent] = []
    worker.pause_at = 3
    async with WorkerStreams("gw") as streams:
        streams.stream("decode", worker.ref).start(start("r"), events.append)
        streams.stream("prefill", worker.ref).start(start("r"), events.append)
        await eventually(lambda: len(events) == 3)
        worker.is_silent = True
        await eventually(lambda: len(events) == 5)
        assert events[3:] == [WorkerLost(1, "w0")] * 2
        await eventually(lambda: streams.num_open == worker.num_running == 0)
        worker.is_silent = False
        worker.resume()
        again: list[RequestEvent] = []  # a new stream does not repeat the events of the old one
        streams.stream("prefill", worker.ref).start(start("s", max_tokens=1), again.append)
        await eventually(lambda: bool(again))
        assert len(events) == 5


async def test_only_hung_workers_lose_their_attempts() -> None:
    """At once, as each takes as long as a worker may be silent."""
    engines = {
        "reports no engine": None,
        "has no work": types_pb2.EngineProgress(num_advances=5, has_work=False),
        "makes no step": types_pb2.EngineProgress(num_advances=5, has_work=True),
        "hangs": None,  # before the stream is opened, over a connection that others keep
    }
    events: dict[str, list[RequestEvent]] = {name: [] for name in engines}
    async with AsyncExitStack() as stack:
        workers = [EchoWorker(name, EchoModel()) for name in engines]
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
            channel = await stack.enter_async_context(open_channel(worker.ref.grpc_address))
            await channel.channel_ready()
            worker.pause_at, worker.progress = 0, engines[worker.worker_id]
            worker.is_silent = worker.worker_id == "hangs"
        streams = await stack.enter_async_context(WorkerStreams("gw"))
        for worker in workers:
            streams.stream("decode", worker.ref).start(start("r"), events[worker.worker_id].append)
        await eventually(lambda: streams.num_open == 2)
        await asyncio.sleep(WATCH_EVERY_S)  # until the watches of the others have looked as well
        lost = {name: [WorkerLost(1, name)] if name in ("makes no step", "hangs") else [] for name in engines}
        assert events == lost
