"""A transfer from its plan to its end: by plans, by the outcome of commands, by reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import NUM_CHUNKS, a_copy, a_model, a_store
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.relay.planning import TransferEdge
from torchrelay.scheduler.policy.relay.transfer_events import transfer_event
from torchrelay.scheduler.policy.relay.transfers import (
    START_TIMEOUT_S,
    TransferEvent,
    TransferEventKind,
    Transfers,
    TransferState,
)
from torchrelay.scheduler.policy.types import REMOTE, CopyCause, PackCopy, SourceShare, StoreStatus

MODEL = a_model()
PACK = MODEL.pack_id
KEY = (PACK, "s2")


EDGE = TransferEdge("s2", ("s1", REMOTE), bytes_per_s=5e6)
WHY = Reason("at_zero", "1 waiting", {"num_waiting": 1})


def plan(transfers: Transfers, now: float = 100.0, earlier: PackCopy | None = None, **demand: object) -> None:
    """Plans s1 -> s2. ``earlier``: what s2 holds of the pack."""
    stores = {"s2": store(earlier) if earlier else store()}
    transfers.plan(PACK, MODEL.pack_bytes, [EDGE], stores, now, **({"reason": WHY} | demand))  # type: ignore[arg-type]


def copy_with(num_verified: int, *shares: SourceShare, **changes: object) -> PackCopy:
    copy = replace(a_copy(MODEL, num_verified), relay_begin_us=1_000_000, shares=shares)
    return replace(copy, **changes)  # type: ignore[arg-type]


def whole(*shares: SourceShare, **changes: object) -> PackCopy:
    return copy_with(NUM_CHUNKS, *shares, relay_end_us=3_000_000, **changes)


def store(*copies: PackCopy) -> StoreStatus:
    return a_store("s2", "h2", copies)


class Reporting:
    """A store's reports, each with the one before it."""

    def __init__(self, transfers: Transfers) -> None:
        self.transfers, self.before, self.now = transfers, store(), 100.0

    def __call__(self, *copies: PackCopy) -> list[TransferEvent]:
        report = store(*copies)
        self.now += 0.1
        events = self.transfers.observe(report, self.before, self.now)
        self.before = report
        return events


@pytest.fixture
def transfers() -> Transfers:
    return Transfers()


@pytest.fixture
def report(transfers: Transfers) -> Reporting:
    return Reporting(transfers)


def words(events: list[TransferEvent]) -> list[str]:
    return [transfer_event(event, MODEL, 0.0).reason for event in events]


def kinds(events: list[TransferEvent]) -> list[TransferEventKind]:
    return [event.kind for event in events]


def state_of(transfers: Transfers) -> TransferState:
    transfer = transfers.get(KEY)
    assert transfer is not None
    return transfer.state


def test_relay_has_started_and_finished_events(transfers: Transfers, report: Reporting) -> None:
    plan(transfers)
    assert report() == [] and report(copy_with(0, relay_begin_us=0)) == []  # its range is being reserved
    (begun,) = report(copy_with(1, SourceShare("s1", 1, 2.0, True)))
    assert begun.kind is TransferEventKind.STARTED and words([begun]) == ["s1 -> s2, urgent, 33.6 MB: 1 waiting"]
    fields = transfer_event(begun, MODEL, 0.0).fields
    assert (fields["cause"], fields["num_waiting"], fields["sources"]) == ("at_zero", 1, "s1")
    assert report(copy_with(5, SourceShare("s1", 5, 2.0, True))) == []
    (finished,) = report(whole(SourceShare("s1", 32_000_000, 0.0)))
    assert finished.kind is TransferEventKind.FINISHED and words([finished]) == ["s1 -> s2: 32 MB in 2 s, 16 MB/s"]
    event = transfer_event(finished, MODEL, 7.0)
    assert (event.topic, event.subject, event.model) == ("relay.finished", "s2", MODEL.name)
    assert event.fields["took_s"] == 2.0 and event.fields["bytes_per_s"] == 16e6
    assert event.bytes_by_source == {"s1": 32_000_000}
    assert report(whole()) == []


def test_relay_between_two_reports_starts_and_finishes(transfers: Transfers, report: Reporting) -> None:
    plan(transfers, urgent=False, reason=Reason())
    events = report(whole(SourceShare("s1", 3_000_000, 0.0), SourceShare("remote", 1_000_000, 0.0), num_repairs=1))
    assert kinds(events) == [TransferEventKind.STARTED, TransferEventKind.REPAIRED, TransferEventKind.FINISHED]
    assert words(events)[0] == "s1 -> s2, idle, 33.6 MB"
    assert words(events)[-1] == "s1 75% + remote 25% -> s2: 4 MB in 2 s, 2 MB/s, 1 repair"


def test_repair_event_names_new_source(transfers: Transfers, report: Reporting) -> None:
    plan(transfers)
    report(copy_with(1, SourceShare("s1", 1, 5e6, True)))
    gone = SourceShare("s1", 1, 0.0, False, "reset by peer")
    assert report(copy_with(2, gone, num_repairs=1)) == []  # nobody is followed yet
    (repaired,) = report(copy_with(3, gone, SourceShare("s3", 1, 1.0, True), num_repairs=2))
    assert words([repaired]) == ["s2 goes on from s3; given up: s1 (reset by peer)"]
    event = transfer_event(repaired, MODEL, 0.0)
    assert (event.fields["joined"], event.fields["given_up"], event.fields["num_repairs"]) == ("s3", "s1", 2)
    assert report(copy_with(4, gone, SourceShare("s3", 1, 1.0, True), num_repairs=2)) == []


def test_join_event_names_lagging_source(transfers: Transfers, report: Reporting) -> None:
    plan(transfers)
    report(copy_with(1, SourceShare("s1", 1, 5e6, True)))
    events = report(copy_with(2, SourceShare("s1", 1, 1e6, True), SourceShare("s3", 0, 0.0, True), num_repairs=1))
    assert words(events) == ["s2 goes on from s3, beside s1, which brings 1 MB/s of 5 planned"]


def test_failures_name_their_cause(transfers: Transfers, report: Reporting) -> None:
    plan(transfers)
    events = report(copy_with(3, error="no source has the missing chunks"))
    assert words(events)[1] == "s2 ended with 3 of 8 chunks: no source has the missing chunks"
    plan(transfers, report.now, earlier=copy_with(3, error="no source"))
    assert report(copy_with(3, error="no source")) == []  # what is left of the earlier run
    (begun,) = report(copy_with(3, relay_begin_us=2_000_000))
    assert begun.kind is TransferEventKind.STARTED
    (failed,) = report()
    assert words([failed]) == ["s2 ended with 3 of 8 chunks: it was dropped"]
    plan(transfers)
    (refused,) = transfers.refused(KEY, "arena full", 101.0)
    assert words([refused]) == ["s2 ended: arena full"]
    assert transfers.refused(KEY, "arena full", 101.0) == []


def test_foreign_relays_are_known_by_reports(transfers: Transfers, report: Reporting) -> None:
    (begun,) = report(copy_with(1, SourceShare("s7", 1, 1.0, True)))
    assert words([begun]) == ["s7 -> s2, urgent, 33.6 MB"]
    (finished,) = report(whole(SourceShare("s7", 1, 0.0)))
    assert finished.kind is TransferEventKind.FINISHED
    events = report(copy_with(0, relay_begin_us=5_000_000))  # dropped and begun anew between two reports
    assert kinds(events) == [TransferEventKind.STARTED] and words(events) == ["? -> s2, urgent, 33.6 MB"]
    events = report(copy_with(1, relay_begin_us=6_000_000))
    assert kinds(events) == [TransferEventKind.FAILED, TransferEventKind.STARTED]


def test_new_scheduler_adopts_running_relays_silently(transfers: Transfers) -> None:
    done = replace(whole(), pack_id="another pack")
    assert transfers.observe(store(copy_with(3, SourceShare("s1", 3, 1.0, True)), done), None, 100.0) == []
    assert [transfer.key for transfer in transfers.shown(100.0)] == [KEY]
    events = transfers.observe(store(whole(), done), store(copy_with(3), done), 101.0)
    assert kinds(events) == [TransferEventKind.FINISHED]


# States


def test_wake_times_out_from_plan_and_order_from_acceptance(transfers: Transfers, report: Reporting) -> None:
    plan(transfers)
    report.now += START_TIMEOUT_S
    assert words(report()) == ["s2 ended: its store has not begun it"]
    plan(transfers, report.now, cause=CopyCause.KEEP)
    report.now += 6 * START_TIMEOUT_S  # its range may have to be faulted in: the command has a deadline of its own
    assert report() == []
    transfers.accepted(KEY, report.now)
    assert report() == []
    report.now += START_TIMEOUT_S
    assert words(report()) == ["s2 ended: the store does not report it"]


def test_error_before_begin_counts_unless_stale(transfers: Transfers, report: Reporting) -> None:
    plan(transfers)
    (failed,) = report(copy_with(0, relay_begin_us=0, error="no manifest"))
    assert failed.transfer.error == "no manifest"
    for left in (copy_with(3, error="its source died"), copy_with(3, relay_begin_us=0, error="its source died")):
        plan(transfers, report.now, left, cause=CopyCause.REPLICATE)
        transfers.accepted(KEY, report.now)
        report.now += 1.0
        assert report(left) == [] and transfers.with_rates()  # it still counts, as a source and on its links
        report.now += START_TIMEOUT_S
        assert words(report(left)) == ["s2 ended: the store does not report it"]


def test_older_report_keeps_plan_and_order(transfers: Transfers, report: Reporting) -> None:
    left = copy_with(3, relay_begin_us=500_000, error="its source died")
    plan(transfers, earlier=left, cause=CopyCause.REPLICATE)
    report(copy_with(1))
    assert report(left) == [] and state_of(transfers) is TransferState.RUNNING
    (dropped,) = report()
    assert words([dropped]) == ["s2 ended with 1 of 8 chunks: it was dropped"] and dropped.transfer.cause is None
    assert state_of(transfers) is TransferState.MISSING and transfers.ordered == (KEY,) and transfers.with_rates()
    (shown,) = transfers.shown(report.now)
    assert shown.state is TransferState.FAILED and not transfers.num_running
    assert kinds(report(copy_with(2))) == [TransferEventKind.STARTED] and state_of(transfers) is TransferState.RUNNING
    report.now += START_TIMEOUT_S
    (failed,) = report()
    assert failed.transfer.cause is CopyCause.REPLICATE and transfers.get(KEY) is None


# Planning


@pytest.mark.parametrize("clock_ahead_s", [-3600, 0, 3600])
def test_store_clock_does_not_change_order(transfers: Transfers, clock_ahead_s: int) -> None:
    def reported(name: str, begin_s: float) -> StoreStatus:
        copy = copy_with(3, relay_begin_us=int((begin_s + clock_ahead_s) * 1e6))
        return a_store(name, f"h{name}", [copy])

    first, late = reported("s8", 9_999.0), reported("s1", 10_002.0)
    reserving = a_store("s0", "h0", [copy_with(0, relay_begin_us=0)])
    transfers.observe(first, None, 10_000.0)
    transfers.plan(PACK, MODEL.pack_bytes, [EDGE], {}, 10_001.0)
    transfers.observe(late, a_store("s1", "hs1"), 10_002.1)
    assert transfers.receiving(PACK, [late, reserving, first]) == ["s8", "s2", "s1", "s0"]
