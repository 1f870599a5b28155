from __future__ import annotations

from torchrelay.common.cadence import LOOK_EVERY_S, STILL_S, Cadence


def test_what_changes_is_said_at_every_look_and_what_does_not_now_and_then() -> None:
    cadence = Cadence()
    looks = [(number * LOOK_EVERY_S, what) for number, what in enumerate("aaaaaaaaabcca")]
    said = [(round(now_s / LOOK_EVERY_S), what) for now_s, what in looks if cadence.is_due(what, now_s)]
    assert said == [(0, "a"), (5, "a"), (9, "b"), (10, "c"), (12, "a")]


def test_two_reports_of_what_stays_the_same_come_while_a_new_scheduler_settles() -> None:
    from torchrelay.scheduler.epoch import STARTUP_S
    from torchrelay.scheduler.rules import Rules

    late_s = STILL_S + LOOK_EVERY_S
    assert Rules().settle_s > 1.5 * late_s
    assert 1.5 * late_s < STARTUP_S
    assert Rules().stale_s > 4 * late_s
