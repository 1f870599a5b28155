"""Between the state and the planner: arrows for packs that are wanted, and new ones for relays that turned slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchrelay.scheduler.core import REMOTE, Copy, Model, Store
from torchrelay.scheduler.effects import Hop, RerouteCommand
from torchrelay.scheduler.planning import Arrow, RunningRelay, measured_bytes_per_s, plan, whole_holders
from torchrelay.scheduler.planning.departures import is_due, redrawn, watched
from torchrelay.scheduler.state import State


def draw(
    state: State,
    pack_id: str,
    pack_bytes: int,
    store_ids: Sequence[str],
    now: float,
    *,
    urgent: bool = True,
) -> tuple[Arrow, ...]:
    """Arrows that bring the pack to the stores, by what the links have left beside what runs; they count as started."""
    stores = state.view.stores
    whole = whole_holders(pack_id, stores.values())
    arrows = plan(
        whole,
        _filling(state, pack_id, whole),
        store_ids,
        nodes=state.links.nodes(list(stores.values()), state.relays.running(), now),
        arriving=state.relays.arriving(pack_id, stores.values()),
        live=_busy(state, store_ids),
        num_bytes=pack_bytes,
    )
    state.relays.start(pack_id, arrows, now, urgent)
    return tuple(_as_it_runs(state, pack_id, arrow) for arrow in arrows)


def _as_it_runs(state: State, pack_id: str, arrow: Arrow) -> Arrow:
    """A store that is told again of a copy on its way keeps the sources it has."""
    running = next((one for one in state.relays.into(arrow.target) if one.pack_id == pack_id), None)
    if not arrow.already_there or running is None:
        return arrow
    feeds = tuple(source for source, _ in running.feeds)
    sources = dict.fromkeys((*(feed for feed in feeds if feed != REMOTE), *arrow.sources))
    num_striped = max(sum(feed != REMOTE for feed in feeds), 1)
    return replace(arrow, sources=tuple(sources), num_striped=num_striped, shares=(1 / num_striped,) * num_striped)


def _filling(state: State, pack_id: str, whole: Sequence[str]) -> list[str]:
    stores = state.view.stores
    filling = state.relays.filling(pack_id, stores.values())
    return [store_id for store_id in filling if store_id in stores and store_id not in whole]


def _busy(state: State, store_ids: Sequence[str]) -> frozenset[str]:
    """Stores on whose hosts requests run: their links are fed last."""
    busy = {worker.host_id for worker in state.view.workers.values() if worker.num_running}
    stores = state.view.stores
    return frozenset(store_id for store_id in store_ids if store_id in stores and stores[store_id].host_id in busy)


def store_reported(state: State, store: Store, now: float) -> None:
    """Measures the links by the report, ends what has ended, and gives other sources to what turned slow."""
    state.links.observe_store(store, now)
    state.relays.observe(store, now)
    for relay in state.relays.into(store.store_id):
        copy = store.copies.get(relay.pack_id)
        if copy is None or not copy.shares or not relay.bytes_per_s:
            continue  # nothing is measured yet
        whole = whole_holders(relay.pack_id, state.view.stores.values())
        arriving = state.relays.arriving(relay.pack_id, state.view.stores.values())
        relay = watched(relay, measured_bytes_per_s(copy), whole, arriving, now)
        state.relays.put(relay)
        if is_due(relay, now):
            _reroute(state, store, relay, copy, now)


def store_lost(state: State, store: Store) -> None:
    state.relays.lose(store.store_id)
    state.links.forget_store(store)


def _reroute(state: State, store: Store, relay: RunningRelay, copy: Copy, now: float) -> None:
    stores, measured = state.view.stores, measured_bytes_per_s(copy)
    if relay.replanned_at:
        state.links.took_less(store, now)
    for source, rate in relay.feeds:
        if _brings(copy, source) * 2 < rate:
            state.links.fell_short(source, now)
    whole = whole_holders(relay.pack_id, stores.values())
    others = [one for one in state.relays.running() if one is not relay]
    nodes = state.links.nodes(list(stores.values()), others, now)
    if not relay.replanned_at:  # the first time the sources are to blame, not the target
        node = nodes[store.store_id]
        nodes[store.store_id] = replace(node, residual_in=max(node.residual_in, relay.bytes_per_s))
    arrow = redrawn(
        relay,
        measured,
        whole,
        _filling(state, relay.pack_id, whole),
        nodes,
        state.relays.arriving(relay.pack_id, stores.values()),
        copy.pack_bytes * (1 - copy.num_chunks_verified / copy.num_chunks),
    )
    state.relays.noted(relay, now)
    if arrow is None:
        return
    state.relays.restart(relay.pack_id, arrow, now)
    known = (model for model in state.models.values() if model.pack_id == relay.pack_id)
    model = next(known, Model(relay.pack_id[:12], "", relay.pack_id, copy.pack_bytes, 0))
    hop = Hop(arrow.target, arrow.sources, (), arrow.num_striped)
    state.effects.commands.append(RerouteCommand(model, hop, relay.urgent))
    reason = (
        f"{measured / 1e6:.3g} MB/s instead of the {relay.bytes_per_s / 1e6:.3g} planned from {relay.upstream}: {arrow}"
    )
    fields = {"pack_id": relay.pack_id, "store_id": store.store_id, "relay": str(arrow)}
    state.happened(now, "reroute", model, reason, "scale.reroute", fields)


def _brings(copy: Copy, source: str) -> float:
    return sum(share.bytes_per_s for share in copy.shares if share.holder_id == source)
