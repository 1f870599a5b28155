"""The stream to the scheduler: timeouts, late placements, queued releases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.brokers import free_port
from tests.support.echo_services import EchoScheduler
from tests.support.echo_worker import EchoModel, EchoWorker
from tests.support.wait import eventually
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import scheduler_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerStub
from torchrelay.gateway.background import background
from torchrelay.gateway.inference.core import AdmissionFailed, RequestEvent
from torchrelay.gateway.inference.execution.admission_stream import MAX_UNSENT, AdmissionStream


def key(request_id: str, attempt: int = 1) -> types_pb2.AttemptKey:
    return types_pb2.AttemptKey(request_id=request_id, attempt=attempt)


@asynccontextmanager
async def admissions_to(
    address: str, unreachable_after_s: float = 10.0, max_unsent: int = MAX_UNSENT
) -> AsyncIterator[AdmissionStream]:
    async with open_channel(address) as channel:
        admissions = AdmissionStream(SchedulerStub(channel), "gw", address, unreachable_after_s, max_unsent)
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


async def test_unreachable_scheduler_fails_waiting_requests() -> None:
    events: list[RequestEvent] = []
    async with admissions_to(f"127.0.0.1:{free_port()}", unreachable_after_s=0.3) as admissions:
        admissions.admit(pb.AdmitRequest(key=key("r")), events.append)
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
        later: list[RequestEvent] = []
        admissions.admit(pb.AdmitRequest(key=key("later")), later.append)
        await eventually(lambda: bool(later))


async def test_placement_that_crosses_a_withdrawal_is_released() -> None:
    events: list[RequestEvent] = []
    async with scheduler() as there, admissions_to(there.address) as admissions:
        there.open_gate.clear()
        admissions.admit(pb.AdmitRequest(key=key("r")), events.append)
        await eventually(lambda: len(there.admits) == 1)
        admissions.release(pb.Release(key=key("r")))
        there.open_gate.set()  # this scheduler places it all the same
        await eventually(lambda: len(there.releases) == 1)
        assert there.withdrawals[0].key == there.releases[0].key == key("r")
        assert not any(isinstance(event, pb.Placement) for event in events)


async def test_deferrable_commands_share_the_next_message() -> None:
    events: list[RequestEvent] = []
    async with scheduler() as there, admissions_to(there.address) as admissions:
        for name in ("a", "b"):
            admissions.admit(pb.AdmitRequest(key=key(name)), events.append)
        await eventually(lambda: sum(isinstance(event, pb.Placement) for event in events) == 2)
        admissions.first_token(key("a"))
        admissions.release(pb.Release(key=key("a")))
        admissions.admit(pb.AdmitRequest(key=key("c")), events.append)
        await eventually(lambda: there.messages[-1] == ["first_token", "release", "admit"])
        admissions.release(pb.Release(key=key("b")))
        await eventually(lambda: there.messages[-1] == ["release"])


async def test_release_without_a_scheduler_arrives_later() -> None:
    events: list[RequestEvent] = []
    async with scheduler() as there, admissions_to(there.address) as admissions:
        admissions.admit(pb.AdmitRequest(key=key("r")), events.append)
        await eventually(lambda: any(isinstance(event, pb.Placement) for event in events))
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
            admissions.admit(pb.AdmitRequest(key=key(name)), lambda _: None)
        await admissions.flush(5)
        await eventually(lambda: len(there.admits) == 3)
        await there.kill()
        admissions.admit(pb.AdmitRequest(key=key("d")), lambda _: None)
        await admissions.flush(0.05)
        assert len(there.admits) == 3


async def test_too_many_unsent_commands_restart_the_stream() -> None:
    events: list[RequestEvent] = []
    async with scheduler() as there, admissions_to(there.address, max_unsent=2) as admissions:
        for name in "abcdef":
            admissions.admit(pb.AdmitRequest(key=key(name)), events.append)
        await eventually(lambda: sum(isinstance(event, pb.Placement) for event in events) == 6)
        for name in "abcde":
            admissions.release(pb.Release(key=key(name)))
        await eventually(lambda: len(there.hellos) == 2 and len(there.admits) > 6)
        assert [(admit.key, admit.HasField("current")) for admit in there.admits[6:]] == [(key("f"), True)]


async def test_readmission_of_long_prompts_fits_the_message_limit() -> None:
    """Their hashes alone take ten megabytes; a message may have eight."""
    events: list[RequestEvent] = []
    async with scheduler() as there, admissions_to(there.address) as admissions:
        for number in range(8):
            hashes = [bytes(16)] * 70_000
            admissions.admit(pb.AdmitRequest(key=key(f"r{number}"), block_hashes=hashes), events.append)
        await eventually(lambda: len(events) == 8)
        await there.kill()
        await there.revive()
        await eventually(lambda: len(there.admits) == 16)
        assert len(there.hellos) == 2


async def test_listeners_get_their_own_events() -> None:
    events: dict[str, list[RequestEvent]] = {name: [] for name in "abcdef"}
    async with scheduler() as there, admissions_to(there.address) as admissions:
        there.refusals.append(pb.Refusal(reason=pb.Refusal.REASON_QUEUE_FULL))
        for name, box in events.items():
            admissions.admit(pb.AdmitRequest(key=key(name)), box.append)
        await eventually(lambda: all(events.values()))
        kinds = [type(box[0]) for box in events.values()]
        assert kinds.count(pb.Refusal) == 1 and kinds.count(pb.Placement) == 5
        for name, box in events.items():
            assert box[0].key.request_id == name  # type: ignore[union-attr]
        assert there.hellos == ["gw"]
        assert admissions.num_open == 5


async def test_resumed_scheduler_gets_open_admissions_again() -> None:
    events: list[RequestEvent] = []
    async with scheduler() as there, admissions_to(there.address) as admissions:
        await eventually(lambda: len(there.hellos) == 1)
        there.answers.clear()
        admissions.admit(pb.AdmitRequest(key=key("r"), age_ms=5000), events.append)
        await eventually(lambda: len(there.hellos) == 2)
        there.answers.set()
        await eventually(lambda: any(isinstance(event, pb.Placement) for event in events))
        # Its age is that of the moment, also on the first stream if that has only begun.
        assert 5000 <= there.admits[0].age_ms < there.admits[-1].age_ms
        assert [admit.key.request_id for admit in there.admits] == ["r"] * len(there.admits)


async def test_hung_scheduler_fails_only_waiting_requests() -> None:
    running: list[RequestEvent] = []
    events: list[RequestEvent] = []
    async with scheduler() as there, admissions_to(there.address, unreachable_after_s=4.0) as admissions:
        admissions.admit(pb.AdmitRequest(key=key("running")), running.append)
        await eventually(lambda: any(isinstance(event, pb.Placement) for event in running))
        there.answers.clear()
        admissions.admit(pb.AdmitRequest(key=key("waiting")), events.append)
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
