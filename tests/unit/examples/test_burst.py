"""Timelines of the burst's calls."""

from __future__ import annotations

from examples.burst.run import Call, calls_of


def test_bar_shows_waiting_loading_loaded_and_first_token() -> None:
    assert Call(0.4, 1.0, 1.8).bar(20).plain == "··▒▒▒████●"
    assert Call(1.0, 0.5, 1.4).bar(20).plain == "·····██●", "it came to a loaded worker"
    assert Call(0.0, 9.0, 9.0).bar(3).plain == "▒▒▒", "cut at the width"


def test_times_are_those_of_the_last_attempt() -> None:
    def phase(name: str, begin_s: float, end_s: float) -> dict[str, object]:
        return {"name": name, "begin_unix_us": 10**6 * (100 + begin_s), "end_unix_us": 10**6 * (100 + end_s)}

    moved = [phase("prefill", 0.2, 0.9), phase("prefill", 1.0, 1.9), phase("last_layer", 0.1, 1.5)]
    later = [phase("prefill", 1.6, 1.7), phase("first_token", 1.6, 1.75)]
    calls = calls_of([[*moved, phase("first_token", 1.1, 2.0)], later], 100 * 10**6)
    assert calls == [Call(1.6, 1.5, 1.75), Call(1.0, 1.5, 2.0)]
