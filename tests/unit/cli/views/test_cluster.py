"""Drawings of `top`, of relays and of `explain`, from views made by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from rich.console import Console, RenderableType

from tests.unit.cli.fake_gateway import MODEL
from torchrelay.cli.commands.models import models_table
from torchrelay.cli.views.cluster import LiveScreen, Sample, cluster_screen, counters_of, pools_table, rates_of
from torchrelay.cli.views.console import fair_shares, printable, shorten_ids
from torchrelay.cli.views.packs import join_names
from torchrelay.cli.views.relays import find_chains, progress_bar, relay_blocks, state_text
from torchrelay.cli.views.timeline import bar, explanation
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.control.v1.scheduler_pb2 import ClusterView, RelaySource, RelayView

OF_SLICE = {"kind": "time_slice", "subject": "inst-aaaaaaaaaaaaaaaaaaaa", "reason": "held for 12 s"}
DECISION = {"at_unix_us": 1_000_000, **OF_SLICE}
WORTH = [
    {"label": "bid", "text": "a slot for a time slice of 10 s saves 4.5 late requests [1 waiting]: 272 device seconds"},
    {"label": "why", "text": "the time slice of that slot ends in 779 ms"},
]


def drawn(what: RenderableType, width: int = 180) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def view(bytes_received: int = 0, *, is_cold: bool = False) -> scheduler_pb2.ClusterView:
    slot = reports_pb2.SlotState(state=reports_pb2.SlotState.STATE_FREE)
    if not is_cold:
        slot = reports_pb2.SlotState(
            state=reports_pb2.SlotState.STATE_LOADING,
            model="acme/[red]tiny",
            num_layers=24,
            num_layers_ready=7,
            roles=[types_pb2.ROLE_PREFILL],
        )
    worker = reports_pb2.WorkerReport(
        worker_id="prefill-0", incarnation="a", slot=slot, kv_pool_bytes=200, kv_free_bytes=50, num_running=3
    )
    copy = reports_pb2.PackCopy(
        pack_id="feed" * 16, pack_bytes=583_000_000, num_chunks=256, num_chunks_verified=128, source="store-b"
    )
    store = reports_pb2.StoreReport(
        store_id="store-a", incarnation="b", arena_bytes=10**9, bytes_received=bytes_received, copies=[copy]
    )
    made = scheduler_pb2.ClusterView(epoch=7, workers=[worker], stores=[store])
    if not is_cold:
        instance = scheduler_pb2.InstanceView(
            instance_id="inst-njqw24sn06qb3e1mmcv9-000007",
            model="acme/[red]tiny",
            pack_id="feed" * 16,
            worker_id="prefill-0",
            state="loading",
        )
        made.instances.append(instance)
        made.demand.append(scheduler_pb2.ModelDemand(model="acme/[red]tiny", num_waiting=2))
        made.demand.append(scheduler_pb2.ModelDemand(model="acme/other", num_waiting=5))
    return made


def test_top_shows_workers_copies_instances_and_demand() -> None:
    shown = drawn(cluster_screen(view(), {"store-a.b.in": 2.5e9}, "127.0.0.1:1"))
    for part in ("prefill-0", "loading", "7/24", "25%", "583 MB", "128/256", "store-b", "2.5 GB", "inst-njqw24-000007"):
        assert part in shown
    assert "████░░░░" in shown
    assert "acme/[red]tiny" in shown  # names are no markup
    assert "acme/other" in shown  # waits without an instance
    assert "0 running, 7 waiting" in shown


@pytest.mark.parametrize("width", [80, 120])
def test_top_shows_what_holds_workers_back(width: int) -> None:
    shown = view()
    assert "bottleneck" not in drawn(cluster_screen(shown, {}, "127.0.0.1:1"), width)
    shown.workers[0].profile.CopyFrom(reports_pb2.EngineProfile(compute=0.3, memory=0.7, bottleneck="memory"))
    lines = drawn(cluster_screen(shown, {}, "127.0.0.1:1"), width).splitlines()
    (line,) = [line for line in lines if "70%" in line]
    assert line.split()[:6] == ["prefill-0", "memory", "70%", "Decode", "steps", "take"]


def test_top_shows_role_changes_and_moved_prompts() -> None:
    changed = view()
    plain = drawn(cluster_screen(changed, {}, "127.0.0.1:1"))
    assert "roles changed" not in plain and "began while loading" not in plain
    changed.instances[0].roles[:] = [types_pb2.ROLE_DECODE]
    changed.instances[0].roles_reason, changed.instances[0].roles_s = "decode needs this instance more", 12.0
    changed.instances[0].moves.add(worker_id="prefill-1", num_prompts=10, saved_s=3.2)
    shown = drawn(cluster_screen(changed, {}, "127.0.0.1:1")).splitlines()
    (line,) = [line for line in shown if "needs this instance" in line]
    assert line.split()[:4] == ["prefill-0", "decode", "12", "s"]
    (line,) = [line for line in shown if "prefill-1" in line]
    assert line.split() == ["prefill-0", "prefill-1", "10", "3.2", "s"]


def test_names_are_whole_at_100_columns() -> None:
    """A view of a cluster with wide numbers and workers of both roles."""
    full = view(10**9)
    for copy in full.stores[0].copies:
        copy.num_chunks_verified, copy.source = 256, "store-local"
    full.stores[0].store_id, full.stores[0].host_id = "store-local", "local"
    for named in (full.workers[0].slot, full.instances[0]):
        named.model = "acme/glossary-large"
        named.roles[:] = [types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE]
    worker = full.workers[0]
    worker.host_id, worker.kv_free_bytes, worker.slot.num_layers_ready = "local", 200, 24
    rates = {"prefill-0.a.prefilled": 12_345.0, "prefill-0.a.decoded": 1234.0, "store-local.b.in": 123_456_789.0}
    shown = drawn(cluster_screen(full, rates, "127.0.0.1:1"), 100)
    assert shown.count("acme/glossary-large") == 3
    assert shown.count("store-local") == 3
    assert "…" not in shown
    assert "12,345" in shown and "both" in shown
    assert "epoch" not in shown


@pytest.mark.parametrize("width", [80, 120])
def test_names_are_whole_at_any_width(width: int) -> None:
    full = view(10**9)
    full.stores[0].store_id = "store-local"
    for named in (full.workers[0].slot, full.instances[0]):
        named.model = "acme/glossary-large"
    shown = drawn(cluster_screen(full, {}, "127.0.0.1:1"), width)
    assert shown.count("acme/glossary-large") == 3
    assert (shown.count("prefill-0"), shown.count("store-local")) == (2, 2)
    assert ("layers" in shown) == (width == 120)
    assert all(len(line) <= width for line in shown.splitlines())
    listed = drawn(models_table([MODEL | {"id": "acme/glossary-large"}]), width)
    assert "acme/glossary-large" in listed and "computed" in listed
    assert ("LlamaForCausalLM" in listed) == (width == 120)


def test_narrow_explanation_omits_bars_and_shortens_ids() -> None:
    phase = {"name": "first_token", "begin_unix_us": 1_000_000, "end_unix_us": 1_012_300}
    where = {"where": "gateway-y0v00qv5b0vwzprhncf0", "detail": "3.62 MB from remote, first chunk after 2.6 ms"}
    decisions = [{"at_unix_us": 1, "kind": "load", "subject": "inst-njqw24sn06qb3e1mmcv9", "reason": "1 waiting"}]
    narrow, wide = (drawn(explanation([phase | where], decisions), width) for width in (80, 120))
    assert "█" not in narrow and "█" in wide
    for shown in (narrow, wide):
        assert "gateway-y0v00q " in shown and "inst-njqw24 " in shown and "…" not in shown
    assert "3.62 MB from remote" in wide
    assert shorten_ids("store-local and req-1") == "store-local and req-1"


def test_empty_cluster_is_stated() -> None:
    cold = view(is_cold=True)
    shown = drawn(cluster_screen(cold, {}, "127.0.0.1:1"))
    assert "every model is at zero" in shown and "not called" in shown
    cold.versions.add(version_id="v", pack_id="feed" * 16, models=["acme/tiny"])
    for num_verified, words in ((128, "at zero, no host copies"), (256, "at zero, 1 host copy")):
        cold.stores[0].copies[0].num_chunks_verified = num_verified
        shown = drawn(cluster_screen(cold, {}, "127.0.0.1:1"))
        assert words in shown and "every model is at zero" in shown
    assert shown.count("acme/tiny") == 2 and "█" not in shown


@pytest.mark.parametrize("width", [80, 180])
def test_models_with_same_pack_share_row(width: int) -> None:
    shared = view()
    shared.instances[0].version_id = "v"
    shared.instances[0].model = "birch/words"
    shared.versions.add(version_id="v", pack_id="feed" * 16, models=["acme/tiny", "birch/words"])
    shared.demand.add(model="acme/tiny", num_waiting=3)
    shared.workers[0].slot.version_id, shared.workers[0].slot.model = "v", "birch/words"
    shown = drawn(cluster_screen(shared, {}, "127.0.0.1:1"), width).splitlines()
    of_worker, line = (line for line in shown if "birch/words, acme/tiny" in line)
    assert "loading" in of_worker
    assert line.split()[-1] == "3"  # those of both
    assert any("acme/tiny, birch/words" in line and "store-a" in line for line in shown)
    assert not any(line.strip().startswith("acme/tiny ") for line in shown)  # it is served: no line of its own
    assert join_names(["a/m", "b/m", "c/m", "d/m"], 12) == "a/m, b/m +2"
    assert join_names(["a/m", "b/m", "c/m", "d/m"], 10) == "a/m +3"
    assert join_names(["acme/a-long-name-8b"], 14) == "acme/a-…ame-8b"
    assert join_names(["acme/glossary-chat-8b", "birch/words"], 25) == "acme/g…at-8b, birch/words"
    assert join_names(["acme/glossary-chat-8b", "birch/glossary-chat"], 25) == "acme/…at-8b, birch/…-chat"


def busy_view(num_models: int) -> scheduler_pb2.ClusterView:
    """A view of models with a pack each; each tenth has an instance, each later instance more requests."""
    made = scheduler_pb2.ClusterView()
    store = made.stores.add(store_id="store-a", incarnation="b")
    for number in range(num_models):
        name, pack_id = f"acme/a-model-with-a-name-that-fills-the-width-of-a-screen-{number:03}", f"{number:012}"
        store.copies.add(pack_id=pack_id, pack_bytes=10**9, num_chunks=256, num_chunks_verified=256)
        made.versions.add(version_id=f"v{number}", pack_id=pack_id, models=[name])
        if number % 10 == 0:
            made.workers.add(worker_id=f"worker-{number:03}", incarnation="a")
            made.instances.add(model=name, version_id=f"v{number}", worker_id=f"worker-{number:03}", state="ready")
            made.demand.add(model=name, num_running=number)
    return made


@pytest.mark.parametrize("height", [24, 60])
def test_top_of_200_models_fits_the_screen(height: int) -> None:
    console = Console(width=80, height=height, force_terminal=False)
    screen = cluster_screen(busy_view(200), {}, "127.0.0.1:1", is_cut=True)
    lines = ["".join(part.text for part in line).rstrip() for line in console.render_lines(screen, pad=False)]
    assert height - 7 <= len(lines) <= height
    assert all(len(line) <= 80 for line in lines)
    named = [line for line in lines if "acme/a-model" in line and "worker-" in line]
    assert [line.split()[1] for line in named[:3]] == ["worker-190", "worker-180", "worker-170"]  # the busiest first
    first = lines.index(named[0])
    rest = next(line for line in lines if "more" in line and lines.index(line) > first)
    assert int(rest.split()[1]) == 200 - (lines.index(rest) - 1 - first)
    assert "and" not in drawn(cluster_screen(busy_view(200), {}, "127.0.0.1:1"), 80)


def test_small_cluster_is_whole_on_a_small_screen() -> None:
    small = view()
    small.workers.add(worker_id="decode-0", incarnation="a")
    console = Console(width=80, height=24, force_terminal=False)
    lines = console.render_lines(cluster_screen(small, {}, "127.0.0.1:1", is_cut=True), pad=False)
    shown = "\n".join("".join(part.text for part in line) for line in lines)
    assert len(lines) <= 24 and " more" not in shown
    assert all(words in shown for words in ("decode-0", "prefill-0", "acme/other", "store-a", "feedfeed"))


def test_rows_are_shared_fairly_and_text_is_printable() -> None:
    assert printable("a\x1b[31mb\nc\td\x07é") == "a[31mb\nc\tdé"
    assert fair_shares([2, 50, 100], 30) == [2, 14, 14]
    assert fair_shares([2, 3, 4], 30) == [2, 3, 4]
    assert fair_shares([5, 5], 1) == [1, 1]


def test_rates_come_from_successive_views() -> None:
    first, last = counters_of(view(1000)), counters_of(view(5000))
    rates = rates_of([Sample(10.0, first), Sample(12.0, last)], now_s=12.0)
    assert rates["store-a.b.in"] == 2000.0
    assert rates_of([Sample(10.0, first)], now_s=10.0) == {}
    restarted = view(10)
    restarted.stores[0].incarnation = "c"
    assert "store-a.c.in" not in rates_of([Sample(10.0, first), Sample(11.0, counters_of(restarted))], now_s=11.0)


def test_idle_cluster_has_zero_rates_and_loss_is_stated() -> None:
    now = [0.0]
    screen = LiveScreen("127.0.0.1:1", lambda: now[0])
    assert "connecting to the gateway" in drawn(screen.render())
    screen.show(view(0))
    now[0] = 1.0
    screen.show(view(4000))
    assert "4 kB" in drawn(screen.render())
    now[0] = 30.0
    assert "0 B" in drawn(screen.render())
    screen.lost()
    assert "does not answer" in drawn(screen.render())


def test_bars_are_to_scale_and_never_empty() -> None:
    assert bar(0, 50, 100, cells=10).plain == "█████     "
    assert bar(50, 50, 100, cells=10).plain == "     █████"
    assert bar(100, 0, 100, cells=10).plain == "         █"
    assert bar(0, 0, 0, cells=4).plain == "█   "


def test_explanation_shows_milliseconds_and_reasons() -> None:
    phases = [
        {"name": "queue", "begin_unix_us": 1_000_000, "end_unix_us": 1_012_300, "where": "scheduler", "detail": "[x]"},
        {"name": "relay", "begin_unix_us": 1_002_000, "end_unix_us": 0, "where": "store-a", "detail": ""},
    ]
    shown = drawn(explanation(phases, [DECISION]))
    for part in ("queue", "12.3 ms", "[x]", "relay", "store-a", "2.0 ms", "running", "time_slice", "held for 12 s"):
        assert part in shown


def test_top_shows_pools_with_the_reason() -> None:
    pool = scheduler_pb2.PoolView(num_devices=1, num_slots=2, num_used=2, num_wanted=3, reason="3 slots needed: [why]")
    line = next(line for line in drawn(pools_table([pool])).splitlines() if "1 device" in line)
    assert line.strip().split(maxsplit=5) == ["1", "device", "2", "2", "3", "3 slots needed: [why]"]
    assert "wanted" not in drawn(cluster_screen(view(), {}, "127.0.0.1:1"))


def test_worth_of_a_slot_follows_the_decisions_within_80_columns() -> None:
    lines = drawn(explanation([], [DECISION], WORTH), 80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    (decision,) = [place for place, line in enumerate(lines) if "held for 12 s" in line]
    (bid,) = [place for place, line in enumerate(lines) if line.startswith(f" bid  {WORTH[0]['text'][:43]}")]
    assert decision < bid and "[1 waiting]" in lines[bid]
    assert lines[bid + 1].strip() == "device seconds" and lines[bid + 2].startswith(f" why  {WORTH[1]['text']}")
    alone = drawn(explanation([], [], WORTH[:1]), 80)
    assert "decision" not in alone and "bid" in alone


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
