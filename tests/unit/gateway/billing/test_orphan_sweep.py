from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from sqlalchemy import select

from tests.support.wait import eventually
from tests.unit.gateway.conftest import AccountingRig, Clock
from torchrelay.common.errors import Unavailable
from torchrelay.common.net.nats_client import Subjects, connect, ensure_streams
from torchrelay.control.v1 import generation_pb2
from torchrelay.gateway.background import background
from torchrelay.gateway.billing.heartbeat import (
    NO_ROW,
    BeatObservation,
    Heartbeat,
    delete_gateway,
    observe_beats,
    stale_gateways,
)
from torchrelay.gateway.billing.ledger import Ledger
from torchrelay.gateway.billing.orphan_sweep import MAX_REQUESTS_PER_ROUND, OrphanSweep, RegisterSource
from torchrelay.gateway.billing.reconciliation import reconcile
from torchrelay.gateway.billing.usage_query import UsageFilter, usage_sums
from torchrelay.gateway.billing.usage_register import UsageRegister
from torchrelay.gateway.billing.usage_register_reader import RegistersByRequest, UsageRegisterReader
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.gateway.sql.tables import ledger


class Registers:
    """The same registers, or fault, at each read."""

    def __init__(self, registers: RegistersByRequest | Unavailable | None = None) -> None:
        self._registers = registers or {}

    async def read(self, gateway_id: str, request_ids: Collection[str]) -> RegistersByRequest:
        if isinstance(self._registers, Unavailable):
            raise self._registers
        return self._registers


@pytest.fixture
async def nats_client(nats_url: str) -> AsyncIterator[Client]:
    client = await connect(nats_url, "test")
    yield client
    await client.close()


@pytest.fixture
async def subjects(nats_client: Client) -> Subjects:
    made = Subjects(f"t{secrets.token_hex(4)}")
    await ensure_streams(nats_client.jetstream(), made)
    return made


async def report(client: Client, subjects: Subjects, request_id: str, position: int, choice: int = 0) -> None:
    register = generation_pb2.UsageRegister(
        request_id=request_id,
        choice=choice,
        attempt=1,
        num_prompt_tokens=10,
        num_cached_prompt_tokens=4,
        output_position=position,
        gateway_id="gw-dead",
    )
    await client.jetstream().publish(subjects.usage("gw-dead"), register.SerializeToString())


def sweep_of(
    parts: AccountingRig,
    registers: RegisterSource | None,
    clock: Clock,
    *,
    ledger_: Ledger | None = None,
    heartbeat: Heartbeat | None = None,
    every_s: float = 60,
) -> OrphanSweep:
    return OrphanSweep(
        parts.database,
        ledger_ or parts.ledger,
        heartbeat or Heartbeat(parts.database, "gw-live"),
        lambda: registers,
        every_s=every_s,
        after_s=10,
        clock=clock,
    )


async def round_of(sweep: OrphanSweep) -> int:
    """Observes and settles once; returns the number of settled requests."""
    await sweep.observe()
    return await sweep.settle()


async def sweep_twice(parts: AccountingRig, registers: RegisterSource | None, ledger_: Ledger | None = None) -> int:
    """The number of requests a new sweep settles after every gateway's beat has stopped long enough."""
    clock = Clock()
    sweep = sweep_of(parts, registers, clock, ledger_=ledger_)
    assert await round_of(sweep) == 0
    clock.now += 10
    return await round_of(sweep)


async def outputs(parts: AccountingRig) -> dict[tuple[str, int], tuple[int, int, str]]:
    async with parts.database.read() as connection:
        rows = (await connection.execute(select(ledger))).all()
    return {(row.request_id, row.choice): (row.num_prompt_tokens, row.num_output_tokens, row.cause) for row in rows}


async def test_registers_in_any_order_are_merged_by_maximum(nats_client: Client, subjects: Subjects) -> None:
    for position in (1, 7, 3, 7, 2):
        await report(nats_client, subjects, "req-1", position)
    await report(nats_client, subjects, "req-1", 5, choice=1)
    await report(nats_client, subjects, "req-other", 9)
    await nats_client.jetstream().publish(subjects.usage("gw-dead"), b"\xff\xff not a register")
    registers = UsageRegisterReader(nats_client, subjects)
    assert await registers.read("gw-dead", {"req-1"}) == {
        "req-1": {0: UsageRegister(10, 4, 7), 1: UsageRegister(10, 4, 5)}
    }
    assert await registers.read("gw-silent", {"req-1"}) == {}
    await nats_client.jetstream().delete_stream(subjects.usage_stream)
    assert await registers.read("gw-dead", {"req-1"}) == {}, "a lost stream has no registers"


async def test_registers_beyond_one_fetch_are_all_read(nats_client: Client, subjects: Subjects) -> None:
    js = nats_client.jetstream()
    register = generation_pb2.UsageRegister(request_id="req-1", output_position=1)
    for position in range(1, 1201):
        register.output_position = position
        await nats_client.publish(subjects.usage("gw-dead"), register.SerializeToString())
    await nats_client.flush()

    async def are_stored() -> bool:  # after the server has them
        return (await js.stream_info(subjects.usage_stream)).state.messages == 1200

    await eventually(are_stored, "the registers in the stream")
    merged = await UsageRegisterReader(nats_client, subjects).read("gw-dead", {"req-1"})
    assert merged["req-1"][0].output_position == 1200


async def test_requests_of_a_gone_gateway_are_settled(
    parts: AccountingRig, nats_client: Client, subjects: Subjects
) -> None:
    await Heartbeat(parts.database, "gw-dead").beat()
    await Heartbeat(parts.database, "gw-live").beat()
    for request in (
        parts.request("req-reported", gateway_id="gw-dead", num_choices=2),
        parts.request("req-silent", gateway_id="gw-dead"),
        parts.request("req-live", gateway_id="gw-live"),
    ):
        await parts.ledger.open(request)
    for position in (1, 30, 12):
        await report(nats_client, subjects, "req-reported", position)
    clock = Clock()
    sweep = sweep_of(parts, UsageRegisterReader(nats_client, subjects), clock)
    assert await round_of(sweep) == 0  # it may be alive: its beat has only just been seen
    clock.now = 10.0
    assert await round_of(sweep) == 2
    assert await outputs(parts) == {
        ("req-reported", 0): (10, 30, "gateway_lost"),
        ("req-reported", 1): (0, 0, "gateway_lost"),
        ("req-silent", 0): (0, 0, "gateway_lost"),
    }
    assert await round_of(sweep) == 0
    assert "gw-dead" not in await Heartbeat(parts.database, "gw-live").beats()
    books = await reconcile(parts.database, UsageRegisterReader(nats_client, subjects))
    assert (books.faults, books.num_in_registers) == ((), 1)
    assert (await reconcile(parts.database)).num_in_registers is None


async def test_books_find_what_the_sweep_billed_beyond_the_registers(parts: AccountingRig) -> None:
    await parts.ledger.open(parts.request("req-1", gateway_id="gw-left"))
    assert await sweep_twice(parts, Registers({"req-1": {0: UsageRegister(10, 0, 5)}})) == 1
    for position, faults in ((5, 0), (7, 0), (4, 1)):
        books = await reconcile(parts.database, Registers({"req-1": {0: UsageRegister(10, 0, position)}}))
        assert len(books.faults) == faults
    assert books.faults == ("request req-1: 5 output tokens billed by the sweep, 4 in the registers",)
    away = await reconcile(parts.database, Registers(Unavailable("NATS is away")))
    assert away.faults == ("NATS is away",)


class Reported:
    """Registers of every request: 10 prompt tokens and 5 of output."""

    async def read(self, gateway_id: str, request_ids: Collection[str]) -> RegistersByRequest:
        return {request_id: {0: UsageRegister(10, 4, 5)} for request_id in request_ids}


@pytest.mark.parametrize(("num_accepted", "num_billed"), [(4, 5), (5, 5), (6, 6), (30, 30)])
async def test_stalled_gateway_supplements_the_swept_rows(
    parts: AccountingRig, num_accepted: int, num_billed: int
) -> None:
    await parts.ledger.open(parts.request("req-1", gateway_id="gw-stalled"))
    assert await sweep_twice(parts, Reported()) == 1
    accepted = [ChoiceUsage("req-1", 0, 10, 4, num_accepted, FinishCause.STOP)]
    cost = 6 * 100 + 4 * 25 + num_billed * 400
    for _ in range(2):  # the answer to the first may be lost
        assert await parts.ledger.settle("req-1", accepted) == cost
    assert await sweep_twice(parts, Reported()) == 0
    books = await reconcile(parts.database)
    assert (books.cost_nano, books.num_settled, books.faults) == (cost, 1, ())
    usage = await usage_sums(parts.database, UsageFilter(), None)
    assert (usage[0].prompt_tokens, usage[0].completion_tokens, usage[0].requests) == (10, num_billed, 1)


async def test_dead_gateway_bills_the_computed_prompt_until_it_says_more(parts: AccountingRig) -> None:
    await parts.ledger.open(parts.request("req-1", gateway_id="gw-left"))
    await parts.ledger.open(parts.request("req-2", gateway_id="gw-left", num_choices=2))  # it waited for a cold model
    assert await sweep_twice(parts, Registers({"req-1": {0: UsageRegister(7, 4, 0)}})) == 2
    unknown = (0, 0, "gateway_lost")
    assert await outputs(parts) == {("req-1", 0): (7, 0, "gateway_lost"), ("req-2", 0): unknown, ("req-2", 1): unknown}
    assert (await reconcile(parts.database)).cost_nano == 3 * 100 + 4 * 25
    accepted = [ChoiceUsage("req-2", choice, 10, 4, 2 + choice, FinishCause.STOP) for choice in range(2)]
    assert await parts.ledger.settle("req-2", accepted) == 6 * 100 + 4 * 25 + 5 * 400
    assert (await reconcile(parts.database)).faults == ()


class SlowSource:
    """Registers that take until ``released`` to read."""

    def __init__(self) -> None:
        self.reading, self.released = asyncio.Event(), asyncio.Event()
        self.is_broken_off = False

    async def read(self, gateway_id: str, request_ids: Collection[str]) -> RegistersByRequest:
        self.reading.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.is_broken_off = True
            raise
        return await Reported().read(gateway_id, request_ids)


async def test_gateway_beats_during_a_long_sweep(parts: AccountingRig) -> None:
    """A sweep of many rows, with registers read slowly; another gateway watches the one that sweeps."""
    await asyncio.gather(*(parts.ledger.open(parts.request(f"req-{n}", gateway_id="gw-dead")) for n in range(1500)))
    await parts.ledger.open(parts.request("req-live", gateway_id="gw-sweeping"))
    heartbeat, slow = Heartbeat(parts.database, "gw-sweeping"), SlowSource()
    sweep = OrphanSweep(parts.database, parts.ledger, heartbeat, lambda: slow, every_s=0.5, after_s=0.1)
    watching = sweep_of(parts, Registers(), Clock(), heartbeat=Heartbeat(parts.database, "gw-watching"))
    await heartbeat.beat()
    async with asyncio.timeout(60), background(heartbeat.run(0.02, timeout_s=10), sweep.run()):
        await slow.reading.wait()
        beats = (await heartbeat.beats())["gw-sweeping"]
        await eventually(
            lambda: is_beaten(heartbeat, "gw-sweeping", beats + 3)
        )  # while the sweep waits for the registers
        assert not slow.is_broken_off, "the sweep held the database until its time limit"
        await watching.observe()
        slow.released.set()

        async def is_settled() -> bool:
            return (await reconcile(parts.database)).num_settled >= 1500

        await eventually(is_settled)
    books = await reconcile(parts.database)
    assert (books.num_settled, books.faults) == (1500, ())  # gw-sweeping's own request is left to it


async def test_round_settles_a_bounded_number(parts: AccountingRig) -> None:
    requests = (parts.request(f"req-{n}", gateway_id=f"gw-dead-{n % 2}") for n in range(MAX_REQUESTS_PER_ROUND + 10))
    await asyncio.gather(*map(parts.ledger.open, requests))
    clock = Clock()
    sweep = sweep_of(parts, Reported(), clock)
    assert await round_of(sweep) == 0
    clock.now += 10
    assert await round_of(sweep) == MAX_REQUESTS_PER_ROUND
    assert await round_of(sweep) == 10


async def test_returning_gateway_keeps_its_requests(parts: AccountingRig) -> None:
    stalled = Heartbeat(parts.database, "gw-stalled")
    await stalled.beat()
    await parts.ledger.open(parts.request("req-1", gateway_id="gw-stalled"))
    clock, slow = Clock(), SlowSource()
    sweep = sweep_of(parts, slow, clock)
    await sweep.observe()
    clock.now += 10
    await sweep.observe()
    settling = asyncio.ensure_future(sweep.settle())
    await slow.reading.wait()
    await stalled.beat()
    slow.released.set()
    assert await settling == 0
    assert await outputs(parts) == {}


async def test_unreadable_registers_settle_nothing(parts: AccountingRig) -> None:
    await parts.ledger.open(parts.request("req-1", gateway_id="gw-left"))
    with pytest.raises(Unavailable):
        await sweep_twice(parts, Registers(Unavailable("JetStream is away")))
    assert await sweep_twice(parts, None) == 0
    assert await outputs(parts) == {}


async def test_racing_gateways_settle_exactly_once(
    parts: AccountingRig, nats_client: Client, subjects: Subjects
) -> None:
    for index in range(20):
        await parts.ledger.open(parts.request(f"req-{index}", gateway_id="gw-dead"))
        await report(nats_client, subjects, f"req-{index}", index + 1)
    registers = UsageRegisterReader(nats_client, subjects)
    async with Ledger(parts.database) as second, Ledger(parts.database) as third:
        await asyncio.gather(*(sweep_twice(parts, registers, each) for each in (parts.ledger, second, third)))
    books = await reconcile(parts.database)
    assert (books.num_settled, books.num_ledger_rows, books.faults) == (20, 20, ())
    assert books.cost_nano == sum(6 * 100 + 4 * 25 + (index + 1) * 400 for index in range(20))


async def test_missed_observations_restart_the_wait(parts: AccountingRig) -> None:
    """SQL was away and nobody could beat: the first gateway back must not settle what others still stream."""
    await Heartbeat(parts.database, "gw-slow").beat()
    await parts.ledger.open(parts.request("req-1", gateway_id="gw-slow"))
    clock = Clock()
    sweep = sweep_of(parts, Registers(), clock, every_s=2)
    assert await round_of(sweep) == 0
    clock.now = 60.0
    assert await round_of(sweep) == 0
    for clock.now in (62.0, 65.0, 69.9):
        assert await round_of(sweep) == 0
    clock.now = 70.0
    assert await round_of(sweep) == 1


async def test_gateway_that_starts_during_a_sweep_is_not_gone(parts: AccountingRig) -> None:
    class Arriving(Heartbeat):
        """Another gateway begins, and opens a request, between the two looks of a round."""

        async def beats(self) -> dict[str, int]:
            await Heartbeat(parts.database, "gw-new").beat()
            await parts.ledger.open(parts.request("req-new", gateway_id="gw-new"))
            return await super().beats()

    clock = Clock()
    sweep = sweep_of(parts, Reported(), clock, heartbeat=Arriving(parts.database, "gw-live"))
    assert await round_of(sweep) == 0
    clock.now += 10
    assert await round_of(sweep) == 0  # it beats with each look
    assert await outputs(parts) == {}


async def test_failed_round_is_followed_by_another(parts: AccountingRig) -> None:
    class Faulty(Reported):
        faults: ClassVar[list[Exception]] = [Unavailable("JetStream is away"), RuntimeError("deadlock detected")]

        async def read(self, gateway_id: str, request_ids: Collection[str]) -> RegistersByRequest:
            if self.faults:
                raise self.faults.pop()
            return await super().read(gateway_id, request_ids)

    await parts.ledger.open(parts.request("req-1", gateway_id="gw-left"))
    heartbeat, source = Heartbeat(parts.database, "gw-live"), Faulty()
    sweep = OrphanSweep(parts.database, parts.ledger, heartbeat, lambda: source, every_s=0.2, after_s=0.1)
    async with background(sweep.run()):
        await eventually(lambda: outputs(parts))
    assert source.faults == []


def test_unchanged_count_and_missing_row_are_stale_after_the_limit() -> None:
    seen = observe_beats({}, {"a": 5, "b": 5, "c": NO_ROW, "d": NO_ROW}, now=0.0)
    seen = observe_beats(seen, {"a": 6, "b": 5, "c": 1, "d": NO_ROW}, now=8.0)
    assert stale_gateways(seen, 9.9, after_s=10) == set()
    assert stale_gateways(seen, 10.0, after_s=10) == {"b", "d"}


@given(st.lists(st.integers(0, 3), min_size=1), st.floats(0.5, 5))
def test_rising_count_is_never_stale(steps: list[int], after_s: float) -> None:
    seen: dict[str, BeatObservation] = {}
    for beat, _ in enumerate(steps):
        now = beat * after_s * 0.9
        seen = observe_beats(seen, {"a": beat}, now)
        assert stale_gateways(seen, now, after_s) == set()


async def test_beats_count_up_and_leave_deletes_the_row(parts: AccountingRig) -> None:
    here, there = Heartbeat(parts.database, "here"), Heartbeat(parts.database, "there")
    await here.beat()
    await here.beat()
    await there.beat()
    assert await here.beats() == {"here": 2, "there": 1}
    await here.leave()
    assert await there.beats() == {"there": 1}


async def is_beaten(heartbeat: Heartbeat, gateway_id: str, times: int) -> bool:
    return (await heartbeat.beats()).get(gateway_id, 0) >= times


async def test_deleted_gateway_registers_again_and_counts_the_loss(parts: AccountingRig) -> None:
    here, there = Heartbeat(parts.database, "here"), Heartbeat(parts.database, "there")
    await here.beat()
    await here.beat()
    await delete_gateway(parts.database, "here", beat=1)  # seen before the second beat: it is alive
    assert await there.beats() == {"here": 2}
    await delete_gateway(parts.database, "here", beat=2)
    assert await there.beats() == {}
    assert here.num_lost == 0
    await here.beat()
    assert (await there.beats(), here.num_lost) == ({"here": 1}, 1)


async def test_beats_continue_after_failures(parts: AccountingRig) -> None:
    class Faulty(Heartbeat):
        num_faults = 0

        async def beat(self) -> None:
            faults = (Unavailable("SQL is away"), RuntimeError("deadlock detected"), None)
            if self.num_faults < len(faults):
                self.num_faults += 1
                if fault := faults[self.num_faults - 1]:
                    raise fault
                await asyncio.Event().wait()  # it hangs
            await super().beat()

    heartbeat = Faulty(parts.database, "here")
    async with background(heartbeat.run(0.01, timeout_s=1.0)):
        await eventually(lambda: is_beaten(heartbeat, "here", 2))
    assert (heartbeat.num_faults, heartbeat.num_lost) == (3, 0)
