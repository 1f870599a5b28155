"""What plans and reports tell of a relay, from its plan to its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import NUM_CHUNKS, a_copy, a_model, a_store
from torchrelay.scheduler.policy.core import PackCopy, SourceShare, StoreStatus
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.relay.transfer_events import transfer_event
from torchrelay.scheduler.policy.relay.transfers import (
    ENDED_SHOWN_S,
    START_TIMEOUT_S,
    TransferEvent,
    TransferEventKind,
    Transfers,
    TransferStatus,
    sources_dropped,
    sources_joined,
)

MODEL = a_model()
PACK = MODEL.pack_id
KEY = (PACK, "s2")


def a_course(**changes: object) -> TransferStatus:
    transfer = TransferStatus(
        PACK,
        "s2",
        MODEL.pack_bytes,
        100.0,
        (("s1", 5e6),),
        5e6,
        True,
        Reason("at_zero", "1 waiting", {"num_waiting": 1}),
    )
    return replace(transfer, **changes)  # type: ignore[arg-type]


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
        now = store(*copies)
        self.now += 0.1
        told = self.transfers.observe(now, self.before, self.now)
        self.before = now
        return told


@pytest.fixture
def transfers() -> Transfers:
    return Transfers()


@pytest.fixture
def report(transfers: Transfers) -> Reporting:
    return Reporting(transfers)


def words(told: list[TransferEvent]) -> list[str]:
    return [transfer_event(one, MODEL, 0.0).reason for one in told]


def test_a_relay_begins_and_ends(transfers: Transfers, report: Reporting) -> None:
    transfers.drawn(a_course())
    assert report() == [] and report(copy_with(0, relay_begin_us=0)) == []  # its range is being reserved
    (begun,) = report(copy_with(1, SourceShare("s1", 1, 2.0, True)))
    assert begun.kind is TransferEventKind.BEGUN and words([begun]) == ["s1 -> s2, urgent, 33.6 MB: 1 waiting"]
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


def test_one_over_between_two_reports_has_begun_and_finished(transfers: Transfers, report: Reporting) -> None:
    transfers.drawn(a_course(urgent=False, reason=Reason()))
    told = report(whole(SourceShare("s1", 3_000_000, 0.0), SourceShare("remote", 1_000_000, 0.0), num_repairs=1))
    assert [one.kind for one in told] == [
        TransferEventKind.BEGUN,
        TransferEventKind.REPAIRED,
        TransferEventKind.FINISHED,
    ]
    assert words(told)[0] == "s1 -> s2, idle, 33.6 MB"
    assert words(told)[-1] == "s1 75% + remote 25% -> s2: 4 MB in 2 s, 2 MB/s, 1 repair"


def test_how_long_a_short_one_took_is_told_in_milliseconds(transfers: Transfers, report: Reporting) -> None:
    transfers.drawn(a_course())
    (_, finished) = report(copy_with(NUM_CHUNKS, SourceShare("s1", 3_620_000, 0.0), relay_end_us=1_012_700))
    assert words([finished]) == ["s1 -> s2: 3.62 MB in 12.7 ms, 285 MB/s"]


def test_a_repair_is_told_once_its_new_source_is_known(transfers: Transfers, report: Reporting) -> None:
    transfers.drawn(a_course())
    report(copy_with(1, SourceShare("s1", 1, 5e6, True)))
    gone = SourceShare("s1", 1, 0.0, False, "reset by peer")
    assert report(copy_with(2, gone, num_repairs=1)) == []  # nobody is followed yet
    (repaired,) = report(copy_with(3, gone, SourceShare("s3", 1, 1.0, True), num_repairs=2))
    assert words([repaired]) == ["s2 goes on from s3; given up: s1 (reset by peer)"]
    event = transfer_event(repaired, MODEL, 0.0)
    assert (event.fields["joined"], event.fields["given_up"], event.fields["num_repairs"]) == ("s3", "s1", 2)
    assert report(copy_with(4, gone, SourceShare("s3", 1, 1.0, True), num_repairs=2)) == []


def test_a_source_joined_beside_one_in_doubt_names_it(transfers: Transfers, report: Reporting) -> None:
    transfers.drawn(a_course())
    report(copy_with(1, SourceShare("s1", 1, 5e6, True)))
    told = report(copy_with(2, SourceShare("s1", 1, 1e6, True), SourceShare("s3", 0, 0.0, True), num_repairs=1))
    assert words(told) == ["s2 goes on from s3, beside s1, which brings 1 MB/s of 5 planned"]


def test_failures_name_their_cause(transfers: Transfers, report: Reporting) -> None:
    transfers.drawn(a_course())
    told = report(copy_with(3, error="no source has the missing chunks"))
    assert words(told)[1] == "s2 ended with 3 of 8 chunks: no source has the missing chunks"
    transfers.drawn(a_course(stale_begin_us=1_000_000, planned_at=report.now))
    assert report(copy_with(3, error="no source")) == []  # what is left of the earlier run
    (begun,) = report(copy_with(3, relay_begin_us=2_000_000))
    assert begun.kind is TransferEventKind.BEGUN
    (failed,) = report()
    assert words([failed]) == ["s2 ended with 3 of 8 chunks: it was dropped"]
    transfers.drawn(a_course())
    (refused,) = transfers.refused(KEY, "arena full", 101.0)
    assert words([refused]) == ["s2 ended: arena full"]
    assert transfers.refused(KEY, "arena full", 101.0) == []


def test_a_store_that_is_lost_or_never_begins_ends_its_relays(transfers: Transfers, report: Reporting) -> None:
    transfers.drawn(a_course())
    report(copy_with(2))
    assert transfers.refused(KEY, "another order", 101.0) == []  # it runs
    (lost,) = transfers.lost("s2", "the store's process is gone", 101.0)
    assert words([lost]) == ["s2 ended with 2 of 8 chunks: the store's process is gone"]
    transfers.drawn(a_course(planned_at=report.now))
    report.now += START_TIMEOUT_S
    assert words(report()) == ["s2 ended: its store has not begun it"]


def test_one_that_was_there_already_is_no_relay(transfers: Transfers, report: Reporting) -> None:
    transfers.drawn(a_course(stale_begin_us=1_000_000))
    assert report(whole()) == [] and transfers.shown(101.0) == []


def test_relays_that_others_ordered_are_known_by_reports(transfers: Transfers, report: Reporting) -> None:
    (begun,) = report(copy_with(1, SourceShare("s7", 1, 1.0, True)))
    assert words([begun]) == ["s7 -> s2, urgent, 33.6 MB"]
    (finished,) = report(whole(SourceShare("s7", 1, 0.0)))
    assert finished.kind is TransferEventKind.FINISHED
    told = report(copy_with(0, relay_begin_us=5_000_000))  # dropped and begun anew between two reports
    assert [one.kind for one in told] == [TransferEventKind.BEGUN] and words(told) == ["? -> s2, urgent, 33.6 MB"]
    told = report(copy_with(1, relay_begin_us=6_000_000))
    assert [one.kind for one in told] == [TransferEventKind.FAILED, TransferEventKind.BEGUN]


def test_a_new_scheduler_goes_on_with_what_runs_and_is_silent_on_what_was(transfers: Transfers) -> None:
    done = replace(whole(), pack_id="another pack")
    assert transfers.observe(store(copy_with(3, SourceShare("s1", 3, 1.0, True)), done), None, 100.0) == []
    assert [transfer.key for transfer in transfers.shown(100.0)] == [KEY]
    told = transfers.observe(store(whole(), done), store(copy_with(3), done), 101.0)
    assert [one.kind for one in told] == [TransferEventKind.FINISHED]


def test_what_has_ended_is_shown_for_a_while(transfers: Transfers, report: Reporting) -> None:
    transfers.drawn(a_course())
    report(whole())
    (ended,) = transfers.shown(report.now)
    assert ended.running_s(report.now) == 2.0 and not ended.error
    transfers.drawn(a_course(planned_at=102.0))
    (again,) = transfers.shown(report.now)  # of one pack and target the last
    assert not again.ended_at
    transfers.refused(KEY, "no room", report.now)
    assert transfers.shown(report.now + ENDED_SHOWN_S) == []


def test_new_sources_keep_the_relays_place(transfers: Transfers) -> None:
    transfers.drawn(a_course())
    transfers.redrawn(KEY, (("s3", 9e6),), 9e6)
    transfers.redrawn(("unknown", "s2"), (), 0.0)
    transfer = transfers.get(KEY)
    assert transfer is not None and transfer.feeds == (("s3", 9e6),) and transfer.num_replans == 1
    assert transfer.planned_at == 100.0 and transfers.get(("unknown", "s2")) is None


def test_who_joined_and_who_was_given_up() -> None:
    before = copy_with(1, SourceShare("a", 1, 1.0, True), SourceShare("b", 1, 1.0, False, "slow"))
    after = copy_with(
        2,
        SourceShare("a", 1, 0.0, False, "gone"),
        SourceShare("b", 1, 1.0, True, "slow"),
        SourceShare("c", 0, 0.0, True),
    )
    assert sources_joined(before, after) == ("b", "c") and sources_dropped(before, after) == {"a": "gone"}
    assert sources_joined(None, before) == () and sources_dropped(None, before) == {"b": "slow"}
