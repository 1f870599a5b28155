"""What plans and reports tell of a relay, from its plan to its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.scene import NUM_CHUNKS, a_copy, a_model, a_store
from torchrelay.scheduler.core import Copy, Share, Store
from torchrelay.scheduler.courses import SHOWN_S, UNSEEN_S, Course, Courses, Told, Turn, given_up, joined
from torchrelay.scheduler.reasons import Reason
from torchrelay.scheduler.relay_events import happening

MODEL = a_model()
PACK = MODEL.pack_id
KEY = (PACK, "s2")


def a_course(**changes: object) -> Course:
    course = Course(
        PACK,
        "s2",
        MODEL.pack_bytes,
        100.0,
        (("s1", 5e6),),
        5e6,
        True,
        Reason("at_zero", "1 waiting", {"num_waiting": 1}),
    )
    return replace(course, **changes)  # type: ignore[arg-type]


def copy_with(num_verified: int, *shares: Share, **changes: object) -> Copy:
    copy = replace(a_copy(MODEL, num_verified), relay_begin_us=1_000_000, shares=shares)
    return replace(copy, **changes)  # type: ignore[arg-type]


def whole(*shares: Share, **changes: object) -> Copy:
    return copy_with(NUM_CHUNKS, *shares, relay_end_us=3_000_000, **changes)


def store(*copies: Copy) -> Store:
    return a_store("s2", "h2", copies)


class Reporting:
    """A store's reports, each with the one before it."""

    def __init__(self, courses: Courses) -> None:
        self.courses, self.before, self.now = courses, store(), 100.0

    def __call__(self, *copies: Copy) -> list[Told]:
        now = store(*copies)
        self.now += 0.1
        told = self.courses.observe(now, self.before, self.now)
        self.before = now
        return told


@pytest.fixture
def courses() -> Courses:
    return Courses()


@pytest.fixture
def report(courses: Courses) -> Reporting:
    return Reporting(courses)


def words(told: list[Told]) -> list[str]:
    return [happening(one, MODEL, 0.0).reason for one in told]


def test_a_relay_begins_and_ends(courses: Courses, report: Reporting) -> None:
    courses.drawn(a_course())
    assert report() == [] and report(copy_with(0, relay_begin_us=0)) == []  # its range is being reserved
    (begun,) = report(copy_with(1, Share("s1", 1, 2.0, True)))
    assert begun.turn is Turn.BEGUN and words([begun]) == ["s1 -> s2, urgent, 33.6 MB: 1 waiting"]
    fields = happening(begun, MODEL, 0.0).fields
    assert (fields["cause"], fields["num_waiting"], fields["sources"]) == ("at_zero", 1, "s1")
    assert report(copy_with(5, Share("s1", 5, 2.0, True))) == []
    (finished,) = report(whole(Share("s1", 32_000_000, 0.0)))
    assert finished.turn is Turn.FINISHED and words([finished]) == ["s1 -> s2: 32 MB in 2 s, 16 MB/s"]
    event = happening(finished, MODEL, 7.0)
    assert (event.event, event.subject, event.model) == ("relay.finished", "s2", MODEL.name)
    assert event.fields["took_s"] == 2.0 and event.fields["bytes_per_s"] == 16e6
    assert event.brought == {"s1": 32_000_000}
    assert report(whole()) == []


def test_one_over_between_two_reports_has_begun_and_finished(courses: Courses, report: Reporting) -> None:
    courses.drawn(a_course(urgent=False, reason=Reason()))
    told = report(whole(Share("s1", 3_000_000, 0.0), Share("remote", 1_000_000, 0.0), num_repairs=1))
    assert [one.turn for one in told] == [Turn.BEGUN, Turn.REPAIRED, Turn.FINISHED]
    assert words(told)[0] == "s1 -> s2, idle, 33.6 MB"
    assert words(told)[-1] == "s1 75% + remote 25% -> s2: 4 MB in 2 s, 2 MB/s, 1 repair"


def test_how_long_a_short_one_took_is_told_in_milliseconds(courses: Courses, report: Reporting) -> None:
    courses.drawn(a_course())
    (_, finished) = report(copy_with(NUM_CHUNKS, Share("s1", 3_620_000, 0.0), relay_end_us=1_012_700))
    assert words([finished]) == ["s1 -> s2: 3.62 MB in 12.7 ms, 285 MB/s"]


def test_a_repair_is_told_once_its_new_source_is_known(courses: Courses, report: Reporting) -> None:
    courses.drawn(a_course())
    report(copy_with(1, Share("s1", 1, 5e6, True)))
    gone = Share("s1", 1, 0.0, False, "reset by peer")
    assert report(copy_with(2, gone, num_repairs=1)) == []  # nobody is followed yet
    (repaired,) = report(copy_with(3, gone, Share("s3", 1, 1.0, True), num_repairs=2))
    assert words([repaired]) == ["s2 goes on from s3; given up: s1 (reset by peer)"]
    event = happening(repaired, MODEL, 0.0)
    assert (event.fields["joined"], event.fields["given_up"], event.fields["num_repairs"]) == ("s3", "s1", 2)
    assert report(copy_with(4, gone, Share("s3", 1, 1.0, True), num_repairs=2)) == []


def test_a_source_joined_beside_one_in_doubt_names_it(courses: Courses, report: Reporting) -> None:
    courses.drawn(a_course())
    report(copy_with(1, Share("s1", 1, 5e6, True)))
    told = report(copy_with(2, Share("s1", 1, 1e6, True), Share("s3", 0, 0.0, True), num_repairs=1))
    assert words(told) == ["s2 goes on from s3, beside s1, which brings 1 MB/s of 5 planned"]


def test_failures_name_their_cause(courses: Courses, report: Reporting) -> None:
    courses.drawn(a_course())
    told = report(copy_with(3, error="no source has the missing chunks"))
    assert words(told)[1] == "s2 ended with 3 of 8 chunks: no source has the missing chunks"
    courses.drawn(a_course(stale_begin_us=1_000_000, drawn_at=report.now))
    assert report(copy_with(3, error="no source")) == []  # what is left of the earlier run
    (begun,) = report(copy_with(3, relay_begin_us=2_000_000))
    assert begun.turn is Turn.BEGUN
    (failed,) = report()
    assert words([failed]) == ["s2 ended with 3 of 8 chunks: it was dropped"]
    courses.drawn(a_course())
    (refused,) = courses.refused(KEY, "arena full", 101.0)
    assert words([refused]) == ["s2 ended: arena full"]
    assert courses.refused(KEY, "arena full", 101.0) == []


def test_a_store_that_is_lost_or_never_begins_ends_its_relays(courses: Courses, report: Reporting) -> None:
    courses.drawn(a_course())
    report(copy_with(2))
    assert courses.refused(KEY, "another order", 101.0) == []  # it runs
    (lost,) = courses.lost("s2", "the store's process is gone", 101.0)
    assert words([lost]) == ["s2 ended with 2 of 8 chunks: the store's process is gone"]
    courses.drawn(a_course(drawn_at=report.now))
    report.now += UNSEEN_S
    assert words(report()) == ["s2 ended: its store has not begun it"]


def test_one_that_was_there_already_is_no_relay(courses: Courses, report: Reporting) -> None:
    courses.drawn(a_course(stale_begin_us=1_000_000))
    assert report(whole()) == [] and courses.shown(101.0) == []


def test_relays_that_others_ordered_are_known_by_reports(courses: Courses, report: Reporting) -> None:
    (begun,) = report(copy_with(1, Share("s7", 1, 1.0, True)))
    assert words([begun]) == ["s7 -> s2, urgent, 33.6 MB"]
    (finished,) = report(whole(Share("s7", 1, 0.0)))
    assert finished.turn is Turn.FINISHED
    told = report(copy_with(0, relay_begin_us=5_000_000))  # dropped and begun anew between two reports
    assert [one.turn for one in told] == [Turn.BEGUN] and words(told) == ["? -> s2, urgent, 33.6 MB"]
    told = report(copy_with(1, relay_begin_us=6_000_000))
    assert [one.turn for one in told] == [Turn.FAILED, Turn.BEGUN]


def test_a_new_scheduler_goes_on_with_what_runs_and_is_silent_on_what_was(courses: Courses) -> None:
    done = replace(whole(), pack_id="another pack")
    assert courses.observe(store(copy_with(3, Share("s1", 3, 1.0, True)), done), None, 100.0) == []
    assert [course.key for course in courses.shown(100.0)] == [KEY]
    told = courses.observe(store(whole(), done), store(copy_with(3), done), 101.0)
    assert [one.turn for one in told] == [Turn.FINISHED]


def test_what_has_ended_is_shown_for_a_while(courses: Courses, report: Reporting) -> None:
    courses.drawn(a_course())
    report(whole())
    (ended,) = courses.shown(report.now)
    assert ended.running_s(report.now) == 2.0 and not ended.error
    courses.drawn(a_course(drawn_at=102.0))
    (again,) = courses.shown(report.now)  # of one pack and target the last
    assert not again.ended_at
    courses.refused(KEY, "no room", report.now)
    assert courses.shown(report.now + SHOWN_S) == []


def test_new_sources_keep_the_relays_place(courses: Courses) -> None:
    courses.drawn(a_course())
    courses.redrawn(KEY, (("s3", 9e6),), 9e6)
    courses.redrawn(("unknown", "s2"), (), 0.0)
    course = courses.get(KEY)
    assert course is not None and course.feeds == (("s3", 9e6),) and course.num_replans == 1
    assert course.drawn_at == 100.0 and courses.get(("unknown", "s2")) is None


def test_who_joined_and_who_was_given_up() -> None:
    before = copy_with(1, Share("a", 1, 1.0, True), Share("b", 1, 1.0, False, "slow"))
    after = copy_with(2, Share("a", 1, 0.0, False, "gone"), Share("b", 1, 1.0, True, "slow"), Share("c", 0, 0.0, True))
    assert joined(before, after) == ("b", "c") and given_up(before, after) == {"a": "gone"}
    assert joined(None, before) == () and given_up(None, before) == {"b": "slow"}
