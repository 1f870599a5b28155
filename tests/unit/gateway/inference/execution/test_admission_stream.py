"""The streams to the scheduler and to workers: timeouts, late placements, notices, minimums; lost streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.support.brokers import free_port
from tests.support.echo_services import EchoScheduler
from tests.support.echo_worker import EchoModel, EchoWorker
from tests.support.gateway_ports import published_model
from tests.support.wait import eventually
from tests.unit.gateway.conftest import Clock
from torchrelay.common.errors import Unavailable
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import generation_pb2, types_pb2
from torchrelay.control.v1 import scheduler_pb2 as pb
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerStub
from torchrelay.gateway.background import background
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.inference.core import AdmissionFailed, RequestEvent, WorkerLost
from torchrelay.gateway.inference.execution.admission_stream import MAX_UNSENT, AdmissionStream
from torchrelay.gateway.inference.execution.load_notices import VALID_S, LoadNotices
from torchrelay.gateway.inference.execution.minimums import announce_minimums
from torchrelay.gateway.inference.execution.stream_watch import WATCH_EVERY_S
from torchrelay.gateway.inference.execution.worker_streams import WorkerStreams


def key(request_id: str, attempt: int = 1) -> types_pb2.AttemptKey:
    return types_pb2.AttemptKey(request_id=request_id, attempt=attempt)


@asynccontextmanager
async def admissions_to(
    address: str,
    unreachable_after_s: float = 10.0,
    max_unsent: int = MAX_UNSENT,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[AdmissionStream]:
    async with open_channel(address) as channel:
        admissions = AdmissionStream(SchedulerStub(channel), "gw", address, unreachable_after_s, max_unsent, clock)
        async with background(admissions.run()):
            yield admissions


@asynccontextmanager
async def scheduler() -> AsyncIterator[EchoScheduler]:
    worker = EchoWorker("w0", EchoModel())
    await worker.start()
    made = EchoScheduler([worker])
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
        await worker.stop()


def admit(admissions: AdmissionStream, name: str, **fields: Any) -> list[RequestEvent]:
    """The events of a new request, as they come."""
    events: list[RequestEvent] = []
    admissions.admit(pb.AdmitRequest(key=key(name), **fields), events.append)
    return events


def is_placed(events: Sequence[RequestEvent]) -> bool:
    return any(isinstance(event, pb.Placement) for event in events)


async def test_unreachable_scheduler_fails_waiting_requests() -> None:
    async with admissions_to(f"127.0.0.1:{free_port()}", unreachable_after_s=0.3) as admissions:
        events = admit(admissions, "r")
        await eventually(lambda: bool(events))
        failure = events[0]
        assert isinstance(failure, AdmissionFailed)
        assert failure.attempt == 1
        assert failure.error.message.startswith("the scheduler at 127.0.0.1:")
        assert "(TORCHRELAY_SCHEDULER_ADDRESS) cannot be reached" in failure.error.message
        assert admissions.num_open == 0


async def test_listener_may_release_other_attempts_on_failure() -> None:
    events: list[RequestEvent] = []
    async with admissions_to(f"127.0.0.1:{free_port()}", unreachable_after_s=0.3) as admissions:

        def end_all(event: RequestEvent) -> None:
            events.append(event)
            for attempt in (1, 2):
                admissions.release(pb.Release(key=key("r", attempt)))

        for attempt in (1, 2):
            admissions.admit(pb.AdmitRequest(key=key("r", attempt)), end_all)
        await eventually(lambda: bool(events))
        assert len(events) == 1 and admissions.num_open == 0
        later = admit(admissions, "later")
        await eventually(lambda: bool(later))


async def test_placement_that_crosses_a_withdrawal_is_released() -> None:
    async with scheduler() as there, admissions_to(there.address) as admissions:
        there.open_gate.clear()
        events = admit(admissions, "r")
        await eventually(lambda: len(there.admits) == 1)
        admissions.release(pb.Release(key=key("r")))
        there.open_gate.set()  # this scheduler places it all the same
        await eventually(lambda: len(there.releases) == 1)
        assert there.withdrawals[0].key == there.releases[0].key == key("r")
        assert not is_placed(events)


async def test_deferrable_commands_share_the_next_message() -> None:
    async with scheduler() as there, admissions_to(there.address) as admissions:
        both = admit(admissions, "a"), admit(admissions, "b")
        await eventually(lambda: all(map(is_placed, both)))
        admissions.first_token(key("a"))
        admissions.release(pb.Release(key=key("a")))
        admit(admissions, "c")
        await eventually(lambda: there.messages[-1] == ["first_token", "release", "admit"])
        admissions.release(pb.Release(key=key("b")))
        await eventually(lambda: there.messages[-1] == ["release"])


async def test_release_without_a_scheduler_arrives_later() -> None:
    async with scheduler() as there, admissions_to(there.address) as admissions:
        events = admit(admissions, "r")
        await eventually(lambda: is_placed(events))
        await there.kill()
        admissions.release(pb.Release(key=key("r"), num_output_tokens=3))
        admissions.release(pb.Release(key=key("r")))  # a second one changes nothing
        await there.revive()
        await eventually(lambda: len(there.releases) == 1)
        assert there.releases[0].num_output_tokens == 3
        assert len(there.hellos) == 2
        assert len(there.admits) == 1  # released attempts are not admitted again


async def test_flush_waits_for_unsent_commands_up_to_its_limit() -> None:
    async with scheduler() as there, admissions_to(there.address) as admissions:
        for name in "abc":
            admit(admissions, name)
        await admissions.flush(5)
        await eventually(lambda: len(there.admits) == 3)
        await there.kill()
        admit(admissions, "d")
        await admissions.flush(0.05)
        assert len(there.admits) == 3


async def test_too_many_unsent_commands_restart_the_stream() -> None:
    async with scheduler() as there, admissions_to(there.address, max_unsent=2) as admissions:
        all_six = [admit(admissions, name) for name in "abcdef"]
        await eventually(lambda: all(map(is_placed, all_six)))
        for name in "abcde":
            admissions.release(pb.Release(key=key(name)))
            if name in "ab":
                admissions.model_deleted("acme/m")
        await eventually(lambda: len(there.hellos) == 2 and len(there.admits) > 6)
        await eventually(lambda: there.deleted == ["acme/m"])
        assert [(admit.key, admit.HasField("current")) for admit in there.admits[6:]] == [(key("f"), True)]


async def test_readmission_of_long_prompts_fits_the_message_limit() -> None:
    """Their hashes alone take ten megabytes; a message may have eight."""
    async with scheduler() as there, admissions_to(there.address) as admissions:
        all_eight = [admit(admissions, f"r{number}", block_hashes=[bytes(16)] * 70_000) for number in range(8)]
        await eventually(lambda: all(all_eight))
        await there.kill()
        await there.revive()
        await eventually(lambda: len(there.admits) == 16)
        assert len(there.hellos) == 2


async def test_listeners_get_their_own_events() -> None:
    async with scheduler() as there, admissions_to(there.address) as admissions:
        there.refusals.append(pb.Refusal(reason=pb.Refusal.REASON_QUEUE_FULL))
        events = {name: admit(admissions, name) for name in "abcdef"}
        await eventually(lambda: all(events.values()))
        kinds = [type(box[0]) for box in events.values()]
        assert kinds.count(pb.Refusal) == 1 and kinds.count(pb.Placement) == 5
        for name, box in events.items():
            assert box[0].key.request_id == name  # type: ignore[union-attr]
        assert there.hellos == ["gw"]
        assert admissions.num_open == 5


async def test_resumed_scheduler_gets_open_admissions_again() -> None:
    clock = Clock()
    async with scheduler() as there, admissions_to(there.address, clock=clock) as admissions:
        await eventually(lambda: len(there.hellos) == 1)
        there.answers.clear()
        events = admit(admissions, "r", age_ms=5000)
        await eventually(lambda: len(there.admits) == 1)
        clock.now += 7.0
        await eventually(lambda: len(there.hellos) == 2)
        there.answers.set()
        await eventually(lambda: is_placed(events))
        assert [(admit.key.request_id, admit.age_ms) for admit in there.admits] == [("r", 5000), ("r", 12_000)]


async def test_new_scheduler_learns_of_placed_attempts_first() -> None:
    """One that waited before them was given their KV."""
    async with scheduler() as there, admissions_to(there.address) as admissions:
        there.open_gate.clear()
        admit(admissions, "waits")
        events = admit(admissions, "placed")
        await eventually(lambda: len(there.admits) == 2)
        await there.place(pb.Placement(key=key("placed")))
        await eventually(lambda: is_placed(events))
        await there.kill()
        await there.revive()
        await eventually(lambda: len(there.admits) == 4)
        assert [again.key.request_id for again in there.admits[2:]] == ["placed", "waits"]


async def test_hung_scheduler_fails_only_waiting_requests() -> None:
    async with scheduler() as there, admissions_to(there.address, unreachable_after_s=4.0) as admissions:
        running = admit(admissions, "running")
        await eventually(lambda: is_placed(running))
        there.answers.clear()
        events = admit(admissions, "waiting")
        await eventually(lambda: bool(events))
        failure = events[0]
        assert isinstance(failure, AdmissionFailed)
        assert failure.error.message.endswith("(TORCHRELAY_SCHEDULER_ADDRESS) does not answer")
        assert not any(isinstance(event, AdmissionFailed) for event in running)
        there.answers.set()
        await eventually(lambda: any(admit.HasField("current") for admit in there.admits))


async def test_deleted_model_is_sent_to_the_scheduler() -> None:
    async with scheduler() as made, admissions_to(made.address) as admissions:
        admissions.model_deleted("acme/m")
        await eventually(lambda: made.deleted == ["acme/m"])


LOADING: dict[str, Any] = {"has_slot": True, "num_layers_ready": 12, "num_layers": 32, "left_s": 3.0}


@pytest.mark.parametrize(
    ("after_s", "fields", "text"),
    [
        (0.0, LOADING, "loading acme/tiny, 12 of 32 layers, about 3.0 s left"),
        (1.5, LOADING, "loading acme/tiny, 12 of 32 layers, about 1.5 s left"),
        (1.0, {"has_slot": True, "left_s": 0.5}, "loading acme/tiny"),  # the predicted end has passed
        (1.0, {"left_s": 14.6}, "acme/tiny waits for a slot, and then about 15 s to load"),
        (VALID_S + 0.1, {"has_slot": True, "left_s": 60.0}, ""),  # it is not repeated
    ],
)
def test_notice_of_a_load_is_shown_while_it_is_confirmed(after_s: float, fields: dict[str, Any], text: str) -> None:
    notices = LoadNotices()
    notices.note(pb.Loading(version_id="v", **fields), 100.0)
    assert notices.text("v", "acme/tiny", 100.0 + after_s) == text
    assert notices.text("another", "acme/tiny", 100.0) == ""


async def test_schedule_sends_two_windows_and_skips_unknown_zones() -> None:
    noon = 1_795_608_000.0  # a Wednesday, in UTC
    entries = ("daily 08:00-18:00 UTC = 3", "mon 08:00-18:00 Atlantis/Poseidonis = 1")
    kept = [replace(published_model("acme/m", file_digests={}), schedule=entries)]

    async def with_minimum() -> Sequence[PublishedModel]:
        return kept

    async with (
        scheduler() as made,
        admissions_to(made.address) as admissions,
        background(announce_minimums(with_minimum, admissions, every_s=60.0, unix_s=lambda: noon)),
    ):
        await eventually(lambda: bool(made.minimums))
    (version,) = made.minimums[-1].versions
    told = [(each.begin_unix_s, each.end_unix_s, each.num_instances) for each in version.scaling.scheduled]
    begin, day_s = int(noon) - 4 * 3600, 24 * 3600
    assert told == [(begin, begin + 36_000, 3), (begin + day_s, begin + day_s + 36_000, 3)]
    assert {each.entry for each in version.scaling.scheduled} == {entries[0]}


async def test_minimums_are_sent_on_change_and_to_each_scheduler() -> None:
    kept, num_reads = [replace(published_model("acme/m", file_digests={}), min_instances=2)], 0

    async def with_minimum() -> Sequence[PublishedModel]:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 2:
            raise Unavailable("no database")
        return kept

    def told() -> list[list[tuple[str, int]]]:
        return [[(version.model, version.scaling.min_instances) for version in each.versions] for each in made.minimums]

    async with scheduler() as made, admissions_to(made.address) as admissions:
        async with background(announce_minimums(with_minimum, admissions, every_s=0.01)):
            await eventually(lambda: num_reads > 5)
            await eventually(lambda: bool(made.minimums))
            assert set(map(str, told())) == {"[('acme/m', 2)]"}, "by the hello, or after it"
            kept = []
            await eventually(lambda: told()[-1] == [])
        num_told = len(made.minimums)
        await made.kill()
        await made.revive()
        await eventually(lambda: len(made.minimums) > num_told)
        assert told()[-1] == []


@pytest.fixture
async def worker() -> AsyncIterator[EchoWorker]:
    worker = EchoWorker("w0", EchoModel())
    await worker.start()
    yield worker
    await worker.stop()


KEY = types_pb2.AttemptKey(request_id="r", attempt=1)


def start(request_id: str, max_tokens: int = 5) -> generation_pb2.AttemptStart:
    return generation_pb2.AttemptStart(
        key=types_pb2.AttemptKey(request_id=request_id, attempt=1),
        prompt=[7, 8, 9],
        sampling=generation_pb2.Sampling(max_tokens=max_tokens),
        choices=[generation_pb2.ChoiceStart(choice=0)],
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
            outputs = [output for output in box if isinstance(output, generation_pb2.ChoiceOutput)]
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
