"""Streams to workers: opened on demand, shared, closed when idle; a loss is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.brokers import free_port
from tests.support.echo_worker import EchoModel, EchoWorker
from tests.support.wait import eventually
from torchrelay.common.liveness import SILENT_S
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.gateway.inference.core import RequestEvent, WorkerLost
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
    events: list[RequestEvent] = []
    worker.pause_at = 0
    async with WorkerStreams("gw", idle_s=0.05) as streams:
        streams.stream("decode", worker.ref).start(start("r"), events.append)
        await eventually(lambda: worker.num_running == 1)
        await asyncio.sleep(0.2)  # four times the limit on idle streams
        assert streams.num_open == 1


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


async def test_worker_silent_from_the_start_is_lost(worker: EchoWorker) -> None:
    """It hung before the stream was opened, over a connection that others keep."""
    events: list[RequestEvent] = []
    async with open_channel(worker.ref.grpc_address) as channel:
        await channel.channel_ready()
        worker.is_silent = True
        async with WorkerStreams("gw") as streams:
            streams.stream("decode", worker.ref).start(start("r"), events.append)
            await eventually(lambda: bool(events))
            await eventually(lambda: not streams.num_open)
        assert events == [WorkerLost(1, "w0")]


async def test_worker_that_beats_without_progress_is_lost(worker: EchoWorker) -> None:
    events: list[RequestEvent] = []
    worker.pause_at = 0
    worker.progress = types_pb2.EngineProgress(num_advances=5, has_work=True)
    async with WorkerStreams("gw") as streams:
        streams.stream("decode", worker.ref).start(start("r"), events.append)
        await eventually(lambda: bool(events))
        await eventually(lambda: not streams.num_open)
    assert events == [WorkerLost(1, "w0")]


async def test_attempt_waiting_at_a_live_worker_stays(worker: EchoWorker) -> None:
    events: list[RequestEvent] = []
    worker.pause_at = 0
    async with WorkerStreams("gw") as streams:
        streams.stream("decode", worker.ref).start(start("r"), events.append)
        await eventually(lambda: worker.num_running == 1)
        for progress in (None, types_pb2.EngineProgress(num_advances=5, has_work=False)):
            worker.progress = progress
            await asyncio.sleep(1.2 * SILENT_S)
            assert not events
