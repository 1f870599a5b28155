"""Between the state and the planner: arrows for packs that are wanted, and new ones for relays that turned slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torchrelay.scheduler.planning import TransferEdge, plan
from torchrelay.scheduler.policy.core import REMOTE, PackCopy, StoreStatus
from torchrelay.scheduler.policy.effects import Hop, RerouteCommand
from torchrelay.scheduler.policy.reasons import NO_REASON, Reason
from torchrelay.scheduler.policy.relay import transfer_events
from torchrelay.scheduler.policy.relay.replan import is_replan_due, replanned_edge, with_slowness
from torchrelay.scheduler.policy.relay.running_relays import RunningRelay, measured_bytes_per_s, whole_holders
from torchrelay.scheduler.policy.relay.transfers import TransferEvent, TransferStatus
from torchrelay.scheduler.policy.state import State


def plan_relay(
    state: State,
    pack_id: str,
    pack_bytes: int,
    store_ids: Sequence[str],
    now: float,
    *,
    urgent: bool = True,
    reason: Reason = NO_REASON,
) -> tuple[TransferEdge, ...]:
    """Arrows that bring the pack to the stores, by what the links have left beside what runs; they count as started."""
    stores = state.membership.stores
    whole = whole_holders(pack_id, stores.values())
    edges = plan(
        whole,
        _receiving(state, pack_id, whole),
        store_ids,
        nodes=state.links.nodes(list(stores.values()), state.relays.running(), now),
        arriving=state.relays.arriving(pack_id, stores.values()),
        live=_busy_stores(state, store_ids),
        num_bytes=pack_bytes,
    )
    state.relays.start(pack_id, edges, now, urgent)
    for edge in edges:
        if not edge.already_there:
            state.transfers.drawn(_transfer(state, RunningRelay.of(pack_id, edge, now, urgent), pack_bytes, reason))
        elif urgent:
            state.relays.mark_urgent(pack_id, edge.target)
            state.transfers.mark_urgent((pack_id, edge.target))
    return tuple(_with_running_sources(state, pack_id, edge) for edge in edges)


def _transfer(state: State, relay: RunningRelay, pack_bytes: int, reason: Reason) -> TransferStatus:
    store = state.membership.stores.get(relay.target)
    earlier = store.copies.get(relay.pack_id) if store else None
    return TransferStatus(
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


def _with_running_sources(state: State, pack_id: str, edge: TransferEdge) -> TransferEdge:
    """A store that is told again of a copy on its way keeps the sources it has."""
    running = next((one for one in state.relays.into(edge.target) if one.pack_id == pack_id), None)
    if not edge.already_there or running is None:
        return edge
    feeds = tuple(source for source, _ in running.feeds)
    sources = dict.fromkeys((*(feed for feed in feeds if feed != REMOTE), *edge.sources))
    num_striped = max(sum(feed != REMOTE for feed in feeds), 1)
    return replace(edge, sources=tuple(sources), num_striped=num_striped, shares=(1 / num_striped,) * num_striped)


def _receiving(state: State, pack_id: str, whole: Sequence[str]) -> list[str]:
    stores = state.membership.stores
    filling = state.relays.filling(pack_id, stores.values())
    return [store_id for store_id in filling if store_id in stores and store_id not in whole]


def _busy_stores(state: State, store_ids: Sequence[str]) -> frozenset[str]:
    """Stores on whose hosts requests run: their links are fed last."""
    busy = {worker.host_id for worker in state.membership.workers.values() if worker.num_running}
    stores = state.membership.stores
    return frozenset(store_id for store_id in store_ids if store_id in stores and stores[store_id].host_id in busy)


def store_reported(state: State, store: StoreStatus, before: StoreStatus | None, now: float) -> None:
    """Measures the links by the report, ends what has ended, and gives other sources to what turned slow.

    ``before``: what the store said last.
    """
    state.links.observe_store(store, now)
    _record_events(state, state.transfers.observe(store, before, now), now)
    state.relays.observe(store, now)
    for relay in state.relays.into(store.store_id):
        copy = store.copies.get(relay.pack_id)
        if copy is None or not copy.shares or not relay.bytes_per_s:
            continue  # nothing is measured yet
        whole = whole_holders(relay.pack_id, state.membership.stores.values())
        arriving = state.relays.arriving(relay.pack_id, state.membership.stores.values())
        relay = with_slowness(relay, measured_bytes_per_s(copy), whole, arriving, now)
        state.relays.put(relay)
        if is_replan_due(relay, now):
            _reroute(state, store, relay, copy, now)


def store_lost(state: State, store: StoreStatus, cause: str, now: float) -> None:
    state.relays.lose(store.store_id)
    state.links.forget_store(store)
    _record_events(state, state.transfers.lost(store.store_id, cause, now), now)


def relay_refused(state: State, pack_id: str, store_id: str, cause: str, now: float) -> None:
    """The relay could not be started."""
    state.relays.drop(pack_id, store_id)
    _record_events(state, state.transfers.refused((pack_id, store_id), cause, now), now)


def _record_events(state: State, turns: Iterable[TransferEvent], now: float) -> None:
    for told in turns:
        model = state.model_of_pack(told.transfer.pack_id)
        state.effects.events.append(transfer_events.transfer_event(told, model, now))


def _reroute(state: State, store: StoreStatus, relay: RunningRelay, copy: PackCopy, now: float) -> None:
    stores, measured = state.membership.stores, measured_bytes_per_s(copy)
    if relay.replanned_at:
        state.links.took_less(store, now)
    for source, rate in relay.feeds:
        if _rate_from(copy, source) * 2 < rate:
            state.links.fell_short(source, now)
    whole = whole_holders(relay.pack_id, stores.values())
    others = [one for one in state.relays.running() if one is not relay]
    nodes = state.links.nodes(list(stores.values()), others, now)
    if not relay.replanned_at:  # the first time the sources are to blame, not the target
        node = nodes[store.store_id]
        nodes[store.store_id] = replace(node, residual_in=max(node.residual_in, relay.bytes_per_s))
    edge = replanned_edge(
        relay,
        measured,
        whole,
        _receiving(state, relay.pack_id, whole),
        nodes,
        state.relays.arriving(relay.pack_id, stores.values()),
        copy.pack_bytes * (1 - copy.num_chunks_verified / copy.num_chunks),
    )
    state.relays.replan_checked(relay, now)
    model = state.model_of_pack(relay.pack_id, copy.pack_bytes)
    if edge is not None:
        state.relays.restart(relay.pack_id, edge, now)
        again = RunningRelay.of(relay.pack_id, edge, now, relay.urgent)
        state.transfers.redrawn((relay.pack_id, store.store_id), again.feeds, again.bytes_per_s)
        hop = Hop(edge.target, edge.sources, (), edge.num_striped)
        state.effects.commands.append(RerouteCommand(model, hop, relay.urgent))
    if edge is not None or not relay.replanned_at:  # that nothing better is known is told once
        state.effects.events.append(transfer_events.slow_event(relay, measured, edge, model, now))


def _rate_from(copy: PackCopy, source: str) -> float:
    return sum(share.bytes_per_s for share in copy.shares if share.holder_id == source)
