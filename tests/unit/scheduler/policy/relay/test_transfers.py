"""A transfer from its plan to its end: by plans, by the outcome of commands, by reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import NUM_CHUNKS, a_copy, a_model, a_store
from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.relay.planning import Node, TransferEdge
from torchrelay.scheduler.policy.relay.transfer_events import transfer_event
from torchrelay.scheduler.policy.relay.transfers import (
    REPLAN_COOLDOWN_S,
    SLOW_AFTER_S,
    START_TIMEOUT_S,
    Transfer,
    TransferEvent,
    TransferEventKind,
    Transfers,
    sources_dropped,
    sources_joined,
)
from torchrelay.scheduler.policy.types import REMOTE, CopyCause, PackCopy, SourceShare, StoreStatus

MODEL = a_model()
PACK = MODEL.pack_id
KEY = (PACK, "s2")


EDGE = TransferEdge("s2", ("s1", REMOTE), bytes_per_s=5e6)
WHY = Reason("at_zero", "1 waiting", {"num_waiting": 1})


def plan(transfers: ReportedTransfers, now: float = 100.0, earlier: PackCopy | None = None, **demand: object) -> None:
    """Plans s1 -> s2. ``earlier``: what s2 holds of the pack."""
    transfers.stores.accept_store(store(earlier) if earlier else store())
    transfers.plan(PACK, MODEL.pack_bytes, [EDGE], now, **({"reason": WHY} | demand))  # type: ignore[arg-type]


def copy_with(num_verified: int, *shares: SourceShare, **changes: object) -> PackCopy:
    copy = replace(a_copy(MODEL, num_verified), relay_begin_us=1_000_000, shares=shares)
    return replace(copy, **changes)  # type: ignore[arg-type]


def whole(*shares: SourceShare, **changes: object) -> PackCopy:
    return copy_with(NUM_CHUNKS, *shares, relay_end_us=3_000_000, **changes)


def store(*copies: PackCopy) -> StoreStatus:
    return a_store("s2", "h2", copies)


class ReportedTransfers(Transfers):
    """Transfers between stores that tests report."""

    def __init__(self) -> None:
        self.stores = Membership(fence_s=1.0)
        super().__init__(self.stores)


class Reporting:
    """A store's reports, each with the one before it."""

    def __init__(self, transfers: ReportedTransfers) -> None:
        self.transfers, self.before, self.now = transfers, store(), 100.0

    def __call__(self, *copies: PackCopy) -> list[TransferEvent]:
        report = store(*copies)
        self.now += 0.1
        events = self.transfers.observe(report, self.before, self.now)
        self.before = report
        return events


@pytest.fixture
def transfers() -> ReportedTransfers:
    return ReportedTransfers()


@pytest.fixture
def report(transfers: ReportedTransfers) -> Reporting:
    return Reporting(transfers)


def words(events: list[TransferEvent]) -> list[str]:
    return [transfer_event(event, MODEL, 0.0).reason for event in events]


def kinds(events: list[TransferEvent]) -> list[TransferEventKind]:
    return [event.kind for event in events]


def the_transfer(transfers: ReportedTransfers) -> Transfer:
    transfer = transfers.get(KEY)
    assert transfer is not None
    return transfer


def test_relay_has_started_and_finished_events(transfers: ReportedTransfers, report: Reporting) -> None:
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


def test_relay_between_two_reports_starts_and_finishes(transfers: ReportedTransfers, report: Reporting) -> None:
    plan(transfers, urgent=False, reason=Reason())
    events = report(whole(SourceShare("s1", 3_000_000, 0.0), SourceShare("remote", 1_000_000, 0.0), num_repairs=1))
    assert kinds(events) == [TransferEventKind.STARTED, TransferEventKind.REPAIRED, TransferEventKind.FINISHED]
    assert words(events)[0] == "s1 -> s2, idle, 33.6 MB"
    assert words(events)[-1] == "s1 75% + remote 25% -> s2: 4 MB in 2 s, 2 MB/s, 1 repair"


def test_repair_event_names_new_source(transfers: ReportedTransfers, report: Reporting) -> None:
    plan(transfers)
    report(copy_with(1, SourceShare("s1", 1, 5e6, True)))
    gone = SourceShare("s1", 1, 0.0, False, "reset by peer")
    assert report(copy_with(2, gone, num_repairs=1)) == []  # nobody is followed yet
    (repaired,) = report(copy_with(3, gone, SourceShare("s3", 1, 1.0, True), num_repairs=2))
    assert words([repaired]) == ["s2 goes on from s3; given up: s1 (reset by peer)"]
    event = transfer_event(repaired, MODEL, 0.0)
    assert (event.fields["joined"], event.fields["given_up"], event.fields["num_repairs"]) == ("s3", "s1", 2)
    assert report(copy_with(4, gone, SourceShare("s3", 1, 1.0, True), num_repairs=2)) == []


def test_join_event_names_lagging_source(transfers: ReportedTransfers, report: Reporting) -> None:
    plan(transfers)
    report(copy_with(1, SourceShare("s1", 1, 5e6, True)))
    events = report(copy_with(2, SourceShare("s1", 1, 1e6, True), SourceShare("s3", 0, 0.0, True), num_repairs=1))
    assert words(events) == ["s2 goes on from s3, beside s1, which brings 1 MB/s of 5 planned"]


def test_failures_name_their_cause(transfers: ReportedTransfers, report: Reporting) -> None:
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


def test_foreign_relays_are_known_by_reports(transfers: ReportedTransfers, report: Reporting) -> None:
    (begun,) = report(copy_with(1, SourceShare("s7", 1, 1.0, True)))
    assert words([begun]) == ["s7 -> s2, urgent, 33.6 MB"]
    (finished,) = report(whole(SourceShare("s7", 1, 0.0)))
    assert finished.kind is TransferEventKind.FINISHED
    events = report(copy_with(0, relay_begin_us=5_000_000))  # dropped and begun anew between two reports
    assert kinds(events) == [TransferEventKind.STARTED] and words(events) == ["? -> s2, urgent, 33.6 MB"]
    events = report(copy_with(1, relay_begin_us=6_000_000))
    assert kinds(events) == [TransferEventKind.FAILED, TransferEventKind.STARTED]


def test_new_scheduler_adopts_running_relays_silently(transfers: ReportedTransfers) -> None:
    done = replace(whole(), pack_id="another pack")
    assert transfers.observe(store(copy_with(3, SourceShare("s1", 3, 1.0, True)), done), None, 100.0) == []
    assert [transfer.key for transfer in transfers.shown(100.0)] == [KEY]
    events = transfers.observe(store(whole(), done), store(copy_with(3), done), 101.0)
    assert kinds(events) == [TransferEventKind.FINISHED]


# States


def test_wake_times_out_from_plan_and_order_from_acceptance(transfers: ReportedTransfers, report: Reporting) -> None:
    plan(transfers)
    report.now += START_TIMEOUT_S
    assert words(report()) == ["s2 ended: its store has not begun it"]
    plan(transfers, report.now, cause=CopyCause.REPLICATE)
    report.now += 6 * START_TIMEOUT_S  # its range may have to be faulted in: the command has a deadline of its own
    assert report() == []
    transfers.accepted(KEY, report.now)
    assert report() == []
    report.now += START_TIMEOUT_S
    assert words(report()) == ["s2 ended: the store does not report it"]


def test_error_before_begin_counts_unless_stale(transfers: ReportedTransfers, report: Reporting) -> None:
    plan(transfers)
    (failed,) = report(copy_with(0, relay_begin_us=0, error="no manifest"))
    assert failed.transfer.error == "no manifest"
    for left in (copy_with(3, error="its source died"), copy_with(3, relay_begin_us=0, error="its source died")):
        plan(transfers, report.now, left, cause=CopyCause.REPLICATE)
        transfers.accepted(KEY, report.now)
        report.now += 1.0
        assert report(left) == [] and transfers.touching(["s1"])  # it still counts, as a source and on its links
        report.now += START_TIMEOUT_S
        assert words(report(left)) == ["s2 ended: the store does not report it"]


def test_older_report_keeps_plan_and_order(transfers: ReportedTransfers, report: Reporting) -> None:
    left = copy_with(3, relay_begin_us=500_000, error="its source died")
    plan(transfers, earlier=left, cause=CopyCause.REPLICATE)
    report(copy_with(1))
    assert report(left) == [] and the_transfer(transfers).begun_at
    (dropped,) = report()
    assert words([dropped]) == ["s2 ended with 1 of 8 chunks: it was dropped"] and dropped.transfer.cause is None
    assert the_transfer(transfers).missing and transfers.ordered == (KEY,) and transfers.touching(["s1"])
    (shown,) = transfers.shown(report.now)
    assert shown is dropped.transfer and shown.error and not transfers.num_running
    assert kinds(report(copy_with(2))) == [TransferEventKind.STARTED] and not the_transfer(transfers).missing
    report.now += START_TIMEOUT_S
    (failed,) = report()
    assert failed.transfer.cause is CopyCause.REPLICATE and transfers.get(KEY) is None


# Planning


@pytest.mark.parametrize("clock_ahead_s", [-3600, 0, 3600])
def test_store_clock_does_not_change_order(transfers: ReportedTransfers, clock_ahead_s: int) -> None:
    def reported(name: str, begin_s: float) -> StoreStatus:
        copy = copy_with(3, relay_begin_us=int((begin_s + clock_ahead_s) * 1e6))
        return a_store(name, f"h{name}", [copy])

    first, late = reported("s8", 9_999.0), reported("s1", 10_002.0)
    reserving = a_store("s0", "h0", [copy_with(0, relay_begin_us=0)])
    for status in (late, reserving, first, store()):
        transfers.stores.accept_store(status)
    transfers.observe(first, None, 10_000.0)
    transfers.plan(PACK, MODEL.pack_bytes, [EDGE], 10_001.0)
    transfers.observe(late, a_store("s1", "hs1"), 10_002.1)
    assert [*transfers.arriving(PACK)] == ["s8", "s2", "s1", "s0"]


# Slow transfers


def planned(transfers: ReportedTransfers, **reported: PackCopy) -> Transfer:
    """The transfer s1 -> s2, planned at 5 MB/s. ``reported``: copies of other stores."""
    for name, copy in reported.items():
        transfers.stores.accept_store(a_store(name, f"h{name}", [copy]))
    plan(transfers)
    return the_transfer(transfers)


def test_half_the_planned_rate_is_not_slow(transfers: ReportedTransfers) -> None:
    transfer = planned(transfers, s1=whole())
    for bytes_per_s, now, slow_since in ((2.5e6, 20.0, 0.0), (2.4e6, 20.0, 20.0), (1e6, 21.0, 20.0), (4e6, 22.0, 0.0)):
        transfers.note_rate(transfer, bytes_per_s, now)
        assert transfer.slow_since == slow_since


def test_replan_is_due_after_delay_then_cools_down(transfers: ReportedTransfers) -> None:
    transfer = planned(transfers, s1=whole())
    assert not transfer.is_replan_due(30.0)
    transfers.note_rate(transfer, 1e6, 20.0)
    assert not transfer.is_replan_due(20.0) and transfer.is_replan_due(20.0 + SLOW_AFTER_S)
    transfers.replan(transfer, None, 21.0)
    transfers.note_rate(transfer, 1e6, 22.0)
    assert transfer.is_slow(22.0) and not transfer.is_replan_due(21.0 + REPLAN_COOLDOWN_S - 0.1)
    assert transfer.is_replan_due(21.0 + REPLAN_COOLDOWN_S)


@pytest.mark.parametrize(
    ("num_verified", "source_mb_per_s", "is_slow"), [(4, 2.1, False), (4, 9, True), (8, 2.1, True)]
)
def test_follower_of_slow_copy_is_not_slow(
    transfers: ReportedTransfers, num_verified: int, source_mb_per_s: float, is_slow: bool
) -> None:
    transfer = planned(transfers, s1=copy_with(num_verified, SourceShare("s0", 1, source_mb_per_s * 1e6, True)))
    transfers.note_rate(transfer, 2e6, 20.0)
    assert bool(transfer.slow_since) is is_slow


def test_replan_names_better_source_before_target(transfers: ReportedTransfers) -> None:
    transfers.observe(a_store("s1", "hs1", [copy_with(3)]), None, 99.0)
    transfer = planned(transfers, s0=whole(), s1=copy_with(3), s3=copy_with(3))
    transfers.observe(a_store("s3", "hs3", [copy_with(3)]), None, 101.0)
    nodes = {"s0": Node(9e6), "s1": Node(1e6), "s3": Node(1e9), "s2": Node(residual_in=1e7)}
    slow = copy_with(2, SourceShare("s1", 1, 1e6, True))
    edge = transfers.better_edge(transfer, slow, nodes)
    assert edge is not None and edge.target == "s2"
    assert edge.striped == ("s0", "s1") and "s3" not in edge.sources
    assert edge.bytes_per_s == 1e7
    transfers.replan(transfer, edge, 102.0)
    assert transfer.sources == {"s0": 9e6, "s1": 1e6} and transfer.num_replans == 1
    assert transfers.better_edge(transfer, slow, nodes) is None, "they are the same"


def test_joined_and_dropped_sources() -> None:
    before = copy_with(1, SourceShare("a", 1, 1.0, True), SourceShare("b", 1, 1.0, False, "slow"))
    after = copy_with(
        2,
        SourceShare("a", 1, 0.0, False, "gone"),
        SourceShare("b", 1, 1.0, True, "slow"),
        SourceShare("c", 0, 0.0, True),
    )
    assert sources_joined(before, after) == ("b", "c") and sources_dropped(before, after) == {"a": "gone"}
    assert sources_joined(None, before) == () and sources_dropped(None, before) == {"b": "slow"}
