"""Drawings of relays in `top`, from views made by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.unit.cli.views.test_cluster import drawn
from torchrelay.cli.views.cluster import cluster_screen
from torchrelay.cli.views.relays import find_chains, progress_bar, relay_blocks, state_text
from torchrelay.control.v1.scheduler_pb2 import ClusterView, RelaySource, RelayView

PACK = "feed" * 16


def a_source(
    holder_id: str, num_bytes: int = 0, mb_per_s: float = 0.0, error: str = "", following: bool = True
) -> RelaySource:
    return RelaySource(
        holder_id=holder_id, num_bytes=num_bytes, bytes_per_s=mb_per_s * 1e6, following=following, error=error
    )


def a_relay(target: str, *sources: RelaySource, **changes: object) -> RelayView:
    fields: dict[str, object] = {
        "pack_id": PACK,
        "model": "acme/[red]tiny",
        "target": target,
        "state": RelayView.STATE_RUNNING,
        "urgent": True,
        "sources": sources,
        "pack_bytes": 31_830_016,
        "num_chunks": 122,
        "num_chunks_verified": 61,
        "left_s": 1.25,
    }
    return RelayView(**(fields | changes))  # type: ignore[arg-type]


def chain() -> list[RelayView]:
    hosts = ["store-source", "store-h1", "store-h2", "store-h3"]
    return [a_relay(target, a_source(source, 15_000_000, 23.4)) for source, target in pairwise(hosts)]


def lines(*relays: RelayView, width: int = 100) -> list[str]:
    return [line.rstrip() for line in drawn(relay_blocks(relays, width < 100), width).splitlines()]


def test_chain_is_drawn_in_order() -> None:
    shown = lines(*chain())
    assert shown[0] == "relay  acme/[red]tiny  31.8 MB, urgent"  # names are no markup
    assert shown[1] == "  store-source -> store-h1 -> store-h2 -> store-h3"
    (row,) = [line for line in shown if line.startswith(" store-h1 -> store-h2")]
    for part in ("23.4 MB", "████████░░░░░░░░", "61/122", "1.25 s left"):
        assert part in row
    assert not any("share" in line for line in shown)


@pytest.mark.parametrize("width", [80, 120])
def test_top_fits_terminal(width: int) -> None:
    sources = a_source("store-h3", 900_000, 0.5), a_source("store-source", 100_000, 123.4)
    relays = [*chain(), a_relay("store-h4", *sources, state=RelayView.STATE_SLOW, num_replans=2)]
    shown = drawn(cluster_screen(ClusterView(relays=relays), {}, "127.0.0.1:1"), width)
    assert all(len(line) <= width for line in shown.splitlines())
    for part in ("store-source -> store-h1 ", "61/122", "rep", "slow, 1.25 s", "left", "█", "90%"):
        assert part in shown
    assert "…" not in shown


def test_stripes_show_shares_and_target_once() -> None:
    shown = lines(a_relay("store-c", a_source("store-a", 6_000_000, 12), a_source("store-b", 4_000_000, 8)))
    assert shown[1:3] == ["  store-a -> store-c", "  store-b -> store-c"]
    first, second = (line for line in shown if " MB " in line and "->" in line)
    assert "60%" in first and "61/122" in first and "left" in first
    assert "40%" in second and "61/122" not in second and "8 MB" in second


def test_dropped_source_is_listed_outside_chain() -> None:
    gone = a_source("store-h1", 9_000_000, error="reset by peer", following=False)
    shown = lines(a_relay("store-h2", a_source("store-source", 3_000_000, 20), gone, num_repairs=2, num_replans=1))
    assert shown[1] == "  store-source -> store-h2" and "store-h1" not in "".join(shown[:2])
    assert "2  1.25 s left, re-planned" in shown[5]
    assert "store-h1 -> store-h2" in shown[6] and shown[6].endswith("dropped")
    assert shown[-1] == "  store-h1 -> store-h2 was dropped: reset by peer"


def test_standby_and_idle_sources_have_no_arrow() -> None:
    feeding = a_source("store-h1", 9_000_000, 20)
    standby = lines(a_relay("store-h2", feeding, a_source("store-h3", following=False)))
    assert not any("store-h3" in line for line in standby)
    rests = lines(a_relay("store-h2", feeding, a_source("store-h3", 1_000_000, following=False)))
    assert rests[1] == "  store-h1 -> store-h2" and rests[6].endswith("idle")
    slow = a_relay("store-h2", feeding, a_source("store-h3", 10_000))
    assert lines(slow)[1:3] == ["  store-h1 -> store-h2", ""] and "<1%" in lines(slow)[6]
    slow.state = RelayView.STATE_FINISHED
    assert lines(slow)[1:3] == ["  store-h1 -> store-h2", ""]


def test_ended_relays_show_duration_rate_or_error() -> None:
    done = a_relay(
        "store-b",
        a_source("store-a", 30_000_000, following=False),
        state=RelayView.STATE_FINISHED,
        running_s=1.5,
        num_chunks_verified=122,
    )
    failed = a_relay(
        "store-c", state=RelayView.STATE_FAILED, error="it was \x1b[2Jdropped", running_s=0.25, urgent=False
    )
    shown = lines(done, failed)
    assert shown[0].endswith("31.8 MB, urgent and idle")
    assert "20 MB" in shown[5] and "122/122" in shown[5] and "done in 1.5 s" in shown[5]
    assert shown[1:3] == ["  store-a -> store-b", ""]
    assert "? -> store-c" in shown[6] and "failed in 250 ms" in shown[6]
    assert "  store-c failed: it was [2Jdropped" in shown  # no control characters


def test_planned_relay_shows_arrow_without_rate() -> None:
    shown = lines(
        a_relay("store-b", RelaySource(holder_id="remote"), state=RelayView.STATE_PLANNED, num_chunks_verified=0)
    )
    assert shown[1] == "  remote -> store-b"
    assert " - " in shown[5] and "planned" in shown[5]
    assert state_text(a_relay("store-b", left_s=0)).plain == "running"


def test_packs_have_separate_blocks() -> None:
    other = a_relay("store-h1", a_source("remote"), pack_id="beef" * 16, model="acme/other", urgent=False)
    shown = lines(*chain(), other)
    assert [line for line in shown if line.startswith("relay")] == [
        "relay  acme/[red]tiny  31.8 MB, urgent",
        "relay  acme/other  31.8 MB, idle",
    ]


def test_paths_hold_each_arrow_once() -> None:
    assert find_chains([("s", "a"), ("a", "b"), ("b", "c")]) == [["s", "a", "b", "c"]]
    assert find_chains([("b", "c"), ("s", "a"), ("a", "b")]) == [["s", "a", "b", "c"]]
    assert find_chains([("s", "a"), ("a", "b"), ("a", "c"), ("s", "d")]) == [["s", "a", "b"], ["s", "d"], ["a", "c"]]
    assert find_chains([("a", "b"), ("b", "a")]) == [["a", "b", "a"]]  # both fell back on each other
    assert find_chains([("a", "c"), ("b", "c"), ("c", "d")]) == [["a", "c", "d"], ["b", "c"]]
    assert find_chains([]) == []


def test_bar_is_full_only_at_completion() -> None:
    bars = [progress_bar(255, 256), progress_bar(256, 256), progress_bar(0, 0, 2)]
    assert bars == ["███████░", "████████", "░░"]
