"""Streams to workers: opened on demand, shared, closed when idle; a loss is reported."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.brokers import free_port
from tests.support.echo_worker import EchoModel, EchoWorker
from tests.unit.gateway.token_path_rig import until
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


def start(request_id: str, max_tokens: int = 5) -> pb.AttemptStart:
    return pb.AttemptStart(
        key=types_pb2.AttemptKey(request_id=request_id, attempt=1),
        prompt=[7, 8, 9],
        sampling=pb.Sampling(max_tokens=max_tokens),
        choices=[pb.ChoiceStart(choice=0)],
    )


async def test_requests_share_a_stream_and_each_hears_its_own(worker: EchoWorker) -> None:
    heard: dict[str, list[RequestEvent]] = {"a": [], "b": []}
    async with WorkerStreams("gw") as streams:
        for name, box in heard.items():
            for role in ("decode", "prefill"):
                streams.stream("decode" if role == "decode" else "prefill", worker.ref).start(start(name), box.append)
        await until(lambda: all(len(box) == 5 for box in heard.values()))
        assert streams.num_open == worker.num_streams == 2
        for name, box in heard.items():
            outputs = [one for one in box if isinstance(one, pb.ChoiceOutput)]
            assert {one.key.request_id for one in outputs} == {name}
            assert sorted(one.first_position for one in outputs) == [0, 1, 2, 3, 4]
    await until(lambda: worker.num_streams == 0)


async def test_an_unused_stream_closes_and_opens_again(worker: EchoWorker) -> None:
    heard: list[RequestEvent] = []
    async with WorkerStreams("gw", idle_s=0.1) as streams:
        for expected in (1, 2):
            stream = streams.stream("prefill", worker.ref)
            stream.start(start("r", max_tokens=1), heard.append)
            await until(lambda expected=expected: len(heard) == expected)  # type: ignore[misc]
            stream.forget(("r", 1))
            await until(lambda: streams.num_open == 0 and worker.num_streams == 0)
    assert not any(isinstance(one, WorkerLost) for one in heard)


async def test_an_idle_stream_with_an_attempt_on_it_stays(worker: EchoWorker) -> None:
    heard: list[RequestEvent] = []
    worker.pause_at = 0
    async with WorkerStreams("gw", idle_s=0.05) as streams:
        streams.stream("decode", worker.ref).start(start("r"), heard.append)
        await until(lambda: worker.num_running == 1)
        with pytest.raises(TimeoutError):
            await until(lambda: streams.num_open == 0, timeout_s=0.3)


async def test_everybody_on_a_broken_stream_is_told(worker: EchoWorker) -> None:
    heard: list[RequestEvent] = []
    worker.pause_at = 0
    async with WorkerStreams("gw") as streams:
        for name in "abc":
            streams.stream("decode", worker.ref).start(start(name), heard.append)
        await until(lambda: worker.num_running == 3)
        await worker.kill()
        await until(lambda: len(heard) == 3)
        assert heard == [WorkerLost(1, "w0")] * 3
        assert streams.num_open == 0


async def test_a_worker_that_is_not_there_is_lost_at_once() -> None:
    heard: list[RequestEvent] = []
    nowhere = types_pb2.WorkerRef(worker_id="w9", grpc_address=f"127.0.0.1:{free_port()}")
    async with WorkerStreams("gw") as streams:
        streams.stream("prefill", nowhere).start(start("r"), heard.append)
        await until(lambda: bool(heard))
    assert heard == [WorkerLost(1, "w9")]


async def test_a_cancelled_attempt_is_stopped_and_silent(worker: EchoWorker) -> None:
    heard: list[RequestEvent] = []
    worker.pause_at = 0
    async with WorkerStreams("gw") as streams:
        stream = streams.stream("decode", worker.ref)
        stream.start(start("r"), heard.append)
        await until(lambda: worker.num_running == 1)
        stream.cancel(("r", 1))
        stream.cancel(("r", 1))
        await until(lambda: worker.num_running == 0)
        await worker.kill()
        await until(lambda: streams.num_open == 0)
    assert heard == []
    assert worker.cancelled == [("decode", ("r", 1))]


async def test_a_worker_that_falls_silent_is_lost_and_what_it_still_runs_is_cancelled(worker: EchoWorker) -> None:
    heard: list[RequestEvent] = []
    worker.pause_at = 3
    async with WorkerStreams("gw") as streams:
        streams.stream("decode", worker.ref).start(start("r"), heard.append)
        streams.stream("prefill", worker.ref).start(start("r"), heard.append)
        await until(lambda: len(heard) == 3)
        worker.is_silent = True
        await until(lambda: len(heard) == 5, timeout_s=8)
        assert heard[3:] == [WorkerLost(1, "w0")] * 2
        await until(lambda: streams.num_open == worker.num_running == 0)
        worker.is_silent = False
        worker.resume()
        again: list[RequestEvent] = []  # a new stream: what the old one had is not heard again
        streams.stream("prefill", worker.ref).start(start("s", max_tokens=1), again.append)
        await until(lambda: bool(again))
        assert len(heard) == 5


async def test_a_worker_that_never_says_a_word_is_lost(worker: EchoWorker) -> None:
    """It hung before the stream was opened, over a connection that others keep."""
    heard: list[RequestEvent] = []
    async with open_channel(worker.ref.grpc_address) as channel:
        await channel.channel_ready()
        worker.is_silent = True
        async with WorkerStreams("gw") as streams:
            streams.stream("decode", worker.ref).start(start("r"), heard.append)
            await until(lambda: bool(heard), timeout_s=8)
            await until(lambda: not streams.num_open)
        assert heard == [WorkerLost(1, "w0")]


async def test_a_worker_that_beats_and_makes_no_step_is_lost(worker: EchoWorker) -> None:
    heard: list[RequestEvent] = []
    worker.pause_at = 0
    worker.progress = types_pb2.EngineProgress(num_advances=5, has_work=True)
    async with WorkerStreams("gw") as streams:
        streams.stream("decode", worker.ref).start(start("r"), heard.append)
        await until(lambda: bool(heard), timeout_s=8)
        await until(lambda: not streams.num_open)
    assert heard == [WorkerLost(1, "w0")]


async def test_who_waits_at_a_worker_that_works_for_others_or_rests_is_left_there(worker: EchoWorker) -> None:
    heard: list[RequestEvent] = []
    worker.pause_at = 0
    async with WorkerStreams("gw") as streams:
        streams.stream("decode", worker.ref).start(start("r"), heard.append)
        await until(lambda: worker.num_running == 1)
        for progress in (None, types_pb2.EngineProgress(num_advances=5, has_work=False)):
            worker.progress = progress
            with pytest.raises(TimeoutError):
                await until(lambda: bool(heard), timeout_s=1.2 * SILENT_S)
