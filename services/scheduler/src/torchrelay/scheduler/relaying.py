"""Between the state and the planner: arrows for packs that are wanted, and new ones for relays that turned slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torchrelay.scheduler import relay_events
from torchrelay.scheduler.core import REMOTE, Copy, Store
from torchrelay.scheduler.courses import Course, Told
from torchrelay.scheduler.effects import Hop, RerouteCommand
from torchrelay.scheduler.planning import Arrow, RunningRelay, measured_bytes_per_s, plan, whole_holders
from torchrelay.scheduler.planning.departures import is_due, redrawn, watched
from torchrelay.scheduler.reasons import NO_REASON, Reason
from torchrelay.scheduler.state import State


def draw(
    state: State,
    pack_id: str,
    pack_bytes: int,
    store_ids: Sequence[str],
    now: float,
    *,
    urgent: bool = True,
    reason: Reason = NO_REASON,
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
    for arrow in arrows:
        if not arrow.already_there:
            state.courses.drawn(_course(state, RunningRelay.of(pack_id, arrow, now, urgent), pack_bytes, reason))
        elif urgent:
            state.relays.hasten(pack_id, arrow.target)
            state.courses.hasten((pack_id, arrow.target))
    return tuple(_as_it_runs(state, pack_id, arrow) for arrow in arrows)


def _course(state: State, relay: RunningRelay, pack_bytes: int, reason: Reason) -> Course:
    store = state.view.stores.get(relay.target)
    earlier = store.copies.get(relay.pack_id) if store else None
    return Course(
        relay.pack_id,
        relay.target,
        pack_bytes,
        relay.started_at,
        relay.feeds,
        relay.bytes_per_s,
        relay.urgent,
        reason,
        stale_begin_us=earlier.relay_begin_us if earlier else 0,
    )


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


def store_reported(state: State, store: Store, before: Store | None, now: float) -> None:
    """Measures the links by the report, ends what has ended, and gives other sources to what turned slow.

    ``before``: what the store said last.
    """
    state.links.observe_store(store, now)
    _tell(state, state.courses.observe(store, before, now), now)
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


def store_lost(state: State, store: Store, cause: str, now: float) -> None:
    state.relays.lose(store.store_id)
    state.links.forget_store(store)
    _tell(state, state.courses.lost(store.store_id, cause, now), now)


def refused(state: State, pack_id: str, store_id: str, cause: str, now: float) -> None:
    """The relay could not be started."""
    state.relays.drop(pack_id, store_id)
    _tell(state, state.courses.refused((pack_id, store_id), cause, now), now)


def _tell(state: State, turns: Iterable[Told], now: float) -> None:
    for told in turns:
        model = state.model_of_pack(told.course.pack_id)
        state.effects.happenings.append(relay_events.happening(told, model, now))


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
    model = state.model_of_pack(relay.pack_id, copy.pack_bytes)
    if arrow is not None:
        state.relays.restart(relay.pack_id, arrow, now)
        again = RunningRelay.of(relay.pack_id, arrow, now, relay.urgent)
        state.courses.redrawn((relay.pack_id, store.store_id), again.feeds, again.bytes_per_s)
        hop = Hop(arrow.target, arrow.sources, (), arrow.num_striped)
        state.effects.commands.append(RerouteCommand(model, hop, relay.urgent))
    if arrow is not None or not relay.replanned_at:  # that nothing better is known is told once
        state.effects.happenings.append(relay_events.slow(relay, measured, arrow, model, now))


def _brings(copy: Copy, source: str) -> float:
    return sum(share.bytes_per_s for share in copy.shares if share.holder_id == source)
