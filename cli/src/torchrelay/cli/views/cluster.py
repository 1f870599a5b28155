"""`torchrelay top`: the cluster as tables, with rates computed from successive views."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchrelay.cli.views.console import NARROW_CELLS, Fitted, ResultTable, WidthAware
from torchrelay.cli.views.packs import (
    STATE_STYLES,
    PackIndex,
    copies_table,
    join_names,
    models_table,
    name_cells,
    roles_text,
)
from torchrelay.cli.views.relays import relay_blocks
from torchrelay.common.latency.bottleneck import ADVICE
from torchrelay.common.quantities import format_bytes, format_count, format_duration
from torchrelay.control.v1 import reports_pb2, scheduler_pb2

RATE_WINDOW_S = 5.0  # a worker that only decodes reports twice a second
Counters = Mapping[str, float]  # "<node>.<counter>" -> value since the node's start
Rates = Mapping[str, float]  # the same names -> per second


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one time."""

    at_s: float
    counters: Counters


def counters_of(view: scheduler_pb2.ClusterView) -> dict[str, float]:
    """The counters whose rates are shown, by node and incarnation: a restarted node starts at zero."""
    counters: dict[str, float] = {}
    for worker in view.workers:
        node = f"{worker.worker_id}.{worker.incarnation}"
        counters[f"{node}.prefilled"] = worker.num_positions_prefilled
        counters[f"{node}.decoded"] = worker.num_positions_decoded
    for store in view.stores:
        node = f"{store.store_id}.{store.incarnation}"
        counters[f"{node}.in"], counters[f"{node}.out"] = store.bytes_received, store.bytes_sent
    return counters


def rates_of(samples: Iterable[Sample], now_s: float) -> dict[str, float]:
    """Per second since the oldest sample, for the counters that it has."""
    listed = list(samples)
    if not listed or now_s <= listed[0].at_s:
        return {}
    first, last = listed[0], listed[-1]
    span_s = now_s - first.at_s
    return {
        name: (value - first.counters[name]) / span_s for name, value in last.counters.items() if name in first.counters
    }


class LiveScreen:
    """The latest view and recent samples; drawn by one thread, fed by another."""

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        self._address, self._clock = address, clock
        self._view: scheduler_pb2.ClusterView | None = None
        self._samples: deque[Sample] = deque(maxlen=256)
        self._is_lost = False

    def show(self, view: scheduler_pb2.ClusterView) -> None:
        self._samples.append(Sample(self._clock(), counters_of(view)))
        self._view, self._is_lost = view, False

    def lost(self) -> None:
        """Marks the platform as unreachable; the last view stays."""
        self._is_lost = True

    def render(self) -> RenderableType:
        view, now_s = self._view, self._clock()
        if view is None:
            return Text(f"connecting to the gateway at {self._address} ...")
        samples = self._recent(now_s)
        shown = cluster_screen(view, rates_of(samples, now_s), self._address, is_cut=True)
        lost = Text("the platform does not answer; last known view", style="bold red")
        return Group(lost, shown) if self._is_lost else shown

    def _recent(self, now_s: float) -> list[Sample]:
        """Samples of the window and the one before it, without which a quiet cluster would have no rates."""
        samples = list(self._samples)
        old = [sample for sample in samples if sample.at_s < now_s - RATE_WINDOW_S]
        return [*old[-1:], *samples[len(old) :]]


def cluster_screen(view: scheduler_pb2.ClusterView, rates: Rates, address: str, *, is_cut: bool = False) -> WidthAware:
    """The view for the terminal's width, and with ``is_cut`` its height; without rates their columns stay empty."""

    def draw(width: int) -> RenderableType:
        parts = _parts(view, rates, address, width < NARROW_CELLS)
        return Fitted(parts) if is_cut else Group(*parts)

    return WidthAware(draw)


def _parts(view: scheduler_pb2.ClusterView, rates: Rates, address: str, is_small: bool) -> list[RenderableType]:
    time_of_day = datetime.now().strftime("%H:%M:%S")
    waiting, running = (sum(getattr(demand, name) for demand in view.demand) for name in ("num_waiting", "num_running"))
    counts = f"{running} running, {waiting} waiting"
    head = Text.assemble(("Torchrelay", "bold"), f"  {time_of_day}  {address}  {counts}")
    packs = PackIndex(view)
    parts: list[RenderableType] = [head, ""]
    if view.relays:
        parts.append(relay_blocks(view.relays, is_small))
    parts.append(workers_table(view.workers, rates, packs, is_small))
    if bound := [worker for worker in view.workers if worker.profile.bottleneck in ADVICE]:
        parts.append(bottlenecks_table(bound))
    if view.instances or view.demand or packs.at_zero:
        parts.append(models_table(view, packs, is_small))
    parts.append(stores_table(view.stores, rates, is_small))
    if any(store.copies for store in view.stores):
        parts.append(copies_table(view, packs, is_small))
    if changed := [instance for instance in view.instances if instance.roles_reason]:
        parts.append(role_changes_table(changed))
    if moved := [instance for instance in view.instances if instance.moves]:
        parts.append(moves_table(moved))
    if view.minimums:
        parts.append(minimums_table(view.minimums))
    if view.pools:
        parts.append(pools_table(view.pools))
    if not view.instances:
        parts.append(Text("no instances: every model is at zero", style="dim"))
    return parts


def workers_table(
    workers: Iterable[reports_pb2.WorkerReport], rates: Rates, packs: PackIndex, is_small: bool = False
) -> Table:
    numbers = ("run", "KV free", "pre/s", "dec/s")
    columns = ("worker", "host", "roles", "state", "model", "layers", *numbers)
    hidden = ("host", "layers", "KV free") if is_small else ()
    table = ResultTable(*columns, right=(*numbers, "layers"), whole=("worker", "model"), without=hidden, is_narrow=True)
    for worker in sorted(workers, key=lambda worker: (not worker.slot.model, worker.worker_id)):
        slot, node = worker.slot, f"{worker.worker_id}.{worker.incarnation}"
        state = reports_pb2.SlotState.State.Name(slot.state).removeprefix("STATE_").lower()
        table.add_line(
            worker.worker_id,
            worker.host_id,
            roles_text(slot.roles or worker.roles),
            Text(state, style=STATE_STYLES.get(state, "")),
            _slot_text(slot, packs, is_small),
            f"{slot.num_layers_ready}/{slot.num_layers}" if slot.num_layers else "",
            str(worker.num_running),
            f"{worker.kv_free_bytes / worker.kv_pool_bytes:.0%}" if worker.kv_pool_bytes else "-",
            _rate(rates.get(f"{node}.prefilled")),
            _rate(rates.get(f"{node}.decoded")),
        )
    return table


def bottlenecks_table(workers: Iterable[reports_pb2.WorkerReport]) -> Table:
    """A row per worker: what holds it back, the share of its steps that this takes, and what to do about it."""
    table = ResultTable("bottleneck of", "", "share", "what to do", right=("share",), is_narrow=True)
    for worker in sorted(workers, key=lambda worker: worker.worker_id):
        name = worker.profile.bottleneck
        share = f"{getattr(worker.profile, name):.0%}" if name != "loading" else ""
        table.add_line(worker.worker_id, name, share, Text(ADVICE[name]))
    return table


def _slot_text(slot: reports_pb2.SlotState, packs: PackIndex, is_small: bool) -> Text:
    """The slot's error, or its models."""
    if slot.error:
        return Text(slot.error, style="red")
    return Text(join_names(packs.served_by(slot), name_cells(is_small)) if slot.model else "-")


def stores_table(stores: Iterable[reports_pb2.StoreReport], rates: Rates, is_small: bool = False) -> Table:
    numbers = ("used", "arena", "limit", "packs", "in/s", "out/s", "received", "sent", "uploads")
    hidden = ("host", "limit", "received", "sent") if is_small else ()
    table = ResultTable("store", "host", *numbers, right=numbers, whole=("store",), without=hidden, is_narrow=True)
    for store in sorted(stores, key=lambda store: store.store_id):
        node = f"{store.store_id}.{store.incarnation}"
        table.add_line(
            store.store_id,
            store.host_id,
            format_bytes(sum(copy.pack_bytes for copy in store.copies)),
            format_bytes(store.arena_bytes),
            format_bytes(store.arena_target_bytes),
            str(len(store.copies)),
            _rate(rates.get(f"{node}.in"), is_bytes=True),
            _rate(rates.get(f"{node}.out"), is_bytes=True),
            format_bytes(store.bytes_received),
            format_bytes(store.bytes_sent),
            str(store.num_running_uploads),
        )
    return table


def role_changes_table(instances: Iterable[scheduler_pb2.InstanceView]) -> Table:
    """A row per instance that was ordered to play other roles, the last first."""
    table = ResultTable("roles changed", "to", "ago", "why", right=("ago",), whole=("roles changed",), is_narrow=True)
    for each in sorted(instances, key=lambda each: (each.roles_s, each.worker_id)):
        table.add_line(each.worker_id, roles_text(each.roles), format_duration(each.roles_s), Text(each.roles_reason))
    return table


def moves_table(instances: Iterable[scheduler_pb2.InstanceView]) -> Table:
    """A row per pair of workers of which the first began prompts while it loaded and the second took them over."""
    numbers = ("prompts", "saved")
    table = ResultTable("began while loading", "taken over by", *numbers, right=numbers, is_narrow=True)
    for instance in sorted(instances, key=lambda instance: instance.worker_id):
        for moves in instance.moves:
            number = str(moves.num_prompts)
            table.add_line(instance.worker_id, moves.worker_id, number, format_duration(moves.saved_s))
    return table


def minimums_table(minimums: Iterable[scheduler_pb2.MinimumView]) -> Table:
    """A row per model that stays loaded without requests, now or later."""
    table = ResultTable("minimum of", "min", "next", "why", right=("min",), whole=("minimum of",), is_narrow=True)
    for each in minimums:
        change = f"{each.next_num_instances} in {format_duration(each.next_s)}" if each.next_s else ""
        table.add_line(Text(each.model), str(each.num_instances), change, Text(each.reason))
    return table


def pools_table(pools: Iterable[scheduler_pb2.PoolView]) -> Table:
    """A row per pool: the slots that it has, and the advice how many it should have."""
    numbers = ("slots", "used", "wanted")
    table = ResultTable("pool", *numbers, "why", right=numbers, whole=("pool",), is_narrow=True)
    for pool in pools:
        counts = (pool.num_slots, pool.num_used, pool.num_wanted)
        table.add_line(format_count(pool.num_devices, "device"), *map(str, counts), Text(pool.reason))
    return table


def _rate(per_s: float | None, is_bytes: bool = False) -> str:
    if per_s is None:
        return ""
    return format_bytes(per_s) if is_bytes else f"{per_s:,.0f}"
