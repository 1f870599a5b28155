"""Runs the relay planner on the state: edges for packs that are needed, and new sources for transfers that turn
slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torchrelay.scheduler.policy.effects import Hop, RerouteCommand, SchedulerEvent
from torchrelay.scheduler.policy.reasons import NO_REASON, Reason
from torchrelay.scheduler.policy.relay.planning import TransferEdge
from torchrelay.scheduler.policy.relay.replan import is_replan_due, replanned_edge, with_slowness
from torchrelay.scheduler.policy.relay.transfer_events import slow_event, transfer_event
from torchrelay.scheduler.policy.relay.transfers import (
    Transfer,
    TransferEvent,
    TransferEventKind,
    TransferKey,
    planned_sources,
)
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import REMOTE, CopyCause, Model, PackCopy, StoreStatus


def plan_relay(
    state: State,
    pack_id: str,
    pack_bytes: int,
    store_ids: Sequence[str],
    now: float,
    *,
    urgent: bool = True,
    reason: Reason = NO_REASON,
    cause: CopyCause | None = None,
) -> tuple[TransferEdge, ...]:
    """Plans edges that bring the pack to the stores with the bandwidth that running transfers leave, and records them
    as started.

    ``urgent``: a request waits for the pack; transfers of other packs that no request waits for leave it their rates.
    """
    stores = state.membership.stores
    whole = state.membership.whole_holders(pack_id)
    receiving = _receiving(state, pack_id, whole)
    concerned = [stores[store_id] for store_id in dict.fromkeys((*whole, *receiving, *store_ids)) if store_id in stores]
    running = state.transfers.touching((*(store.store_id for store in concerned), REMOTE))
    # Transfers of the same pack do not yield: a new target follows their target rather than their source.
    yielding, others = list[Transfer](), list[Transfer]()
    for transfer in running:
        (yielding if urgent and not transfer.urgent and transfer.pack_id != pack_id else others).append(transfer)
    edges = state.strategies.plan(
        whole,
        receiving,
        store_ids,
        nodes=state.links.nodes(concerned, others, now, yielding),
        arriving=state.transfers.progress(pack_id, _having(state, pack_id)),
        live=_busy_stores(state, store_ids),
        num_bytes=pack_bytes,
    )
    state.transfers.plan(pack_id, pack_bytes, edges, stores, now, urgent=urgent, reason=reason, cause=cause)
    if urgent:
        _hasten(state, ((pack_id, edge.target) for edge in edges if not edge.whole))
    return tuple(_with_running_sources(state, pack_id, edge) for edge in edges)


def goes_first(state: State, pack_id: str, store_id: str) -> bool:
    """Whether the store's relay may take all bandwidth it can get, rather than only what other transfers leave."""
    transfer = state.transfers.get((pack_id, store_id))
    return transfer is None or transfer.urgent


def _hasten(state: State, keys: Iterable[TransferKey]) -> None:
    """Makes all transfers upstream of these urgent, and tells their stores, which keep their sources."""
    upstream = [followed for key in keys for followed in _followed(state, key)]
    while upstream:
        key = upstream.pop()
        transfer = state.transfers.get(key)
        if transfer is None or transfer.urgent:
            continue
        state.transfers.put(replace(transfer, urgent=True))
        model = state.model_of_pack(transfer.pack_id, transfer.pack_bytes)
        hop = Hop(transfer.target, transfer.holder_ids, (), max(len(transfer.sources), 1))
        state.effects.commands.append(RerouteCommand(model, hop, True))
        upstream += _followed(state, key)


def _followed(state: State, key: TransferKey) -> list[TransferKey]:
    transfer = state.transfers.get(key)
    return [(transfer.pack_id, source) for source in transfer.holder_ids] if transfer is not None else []


def _with_running_sources(state: State, pack_id: str, edge: TransferEdge) -> TransferEdge:
    """The edge with the sources of a running transfer first, if the store is told again of a copy on its way."""
    running = state.transfers.get((pack_id, edge.target))
    if not edge.already_there or running is None or not running.sources:
        return edge
    peers = [source for source in running.holder_ids if source != REMOTE]
    sources = dict.fromkeys((*peers, *edge.sources))
    num_striped = max(len(peers), 1)
    return replace(edge, sources=tuple(sources), num_striped=num_striped, shares=(1 / num_striped,) * num_striped)


def _having(state: State, pack_id: str) -> list[StoreStatus]:
    """Stores that have a copy of the pack or were told to fetch one."""
    stores = {store.store_id: store for store in state.membership.holders(pack_id)}
    for transfer in state.transfers.of_pack(pack_id):
        if (store := state.membership.stores.get(transfer.target)) is not None:
            stores[store.store_id] = store
    return list(stores.values())


def _receiving(state: State, pack_id: str, whole: Sequence[str]) -> list[str]:
    stores = state.membership.stores
    receiving = state.transfers.receiving(pack_id, state.membership.holders(pack_id))
    return [store_id for store_id in receiving if store_id in stores and store_id not in whole]


def _busy_stores(state: State, store_ids: Sequence[str]) -> frozenset[str]:
    """Stores on hosts where requests run; their links are filled last."""
    stores, workers, sizes = state.membership.stores, state.membership.workers, state.membership.sizes

    def is_busy(host_id: str) -> bool:
        return any(workers[worker_id].num_running for worker_id in sizes.on_host(host_id))

    return frozenset(store_id for store_id in store_ids if store_id in stores and is_busy(stores[store_id].host_id))


def store_reported(state: State, store: StoreStatus, before: StoreStatus | None, now: float) -> None:
    """Updates links and transfers from a store's report, and gives slow transfers new sources. ``before``: the previous
    report.
    """
    events = state.transfers.observe(store, before, now)
    finished = [event.transfer for event in events if event.kind is TransferEventKind.FINISHED]
    state.links.observe_store(store, finished, now)
    _record(state, events, now)
    for transfer in state.transfers.into(store.store_id):
        copy = store.copies.get(transfer.pack_id)
        if copy is None or not copy.shares or not transfer.planned_bytes_per_s:
            continue  # nothing measured yet, or nothing predicted
        whole = state.membership.whole_holders(transfer.pack_id)
        progress = state.transfers.progress(transfer.pack_id, _having(state, transfer.pack_id))
        transfer = with_slowness(transfer, copy.bytes_per_s, whole, progress, now)
        state.transfers.put(transfer)
        if is_replan_due(transfer, now):
            _reroute(state, store, transfer, copy, now)


def store_lost(state: State, store: StoreStatus, cause: str, now: float) -> None:
    state.links.forget_store(store)
    _record_lost(state, state.transfers.lost(store.store_id, cause, now), now)


def relay_refused(state: State, pack_id: str, store_id: str, cause: str, now: float) -> None:
    """Records that the store could not be reached with the relay, or refused it."""
    _record(state, state.transfers.refused((pack_id, store_id), cause, now), now)


def _reroute(state: State, store: StoreStatus, transfer: Transfer, copy: PackCopy, now: float) -> None:
    is_first = not transfer.replan_checked_at
    if not is_first:
        state.links.took_less(store, now)
    rates = {share.holder_id: share.bytes_per_s for share in copy.shares}
    for source, planned in transfer.sources:
        if rates.get(source, 0.0) * 2 < planned:
            state.links.fell_short(source, now)
    whole = state.membership.whole_holders(transfer.pack_id)
    others = [other for other in state.transfers.with_rates() if other.key != transfer.key]
    having = _having(state, transfer.pack_id)
    nodes = state.links.nodes(having, others, now)
    if is_first:  # blame the sources before the target
        node = nodes[store.store_id]
        nodes[store.store_id] = replace(node, residual_in=max(node.residual_in, transfer.planned_bytes_per_s))
    receiving = _receiving(state, transfer.pack_id, whole)
    progress = state.transfers.progress(transfer.pack_id, having)
    edge = replanned_edge(transfer, copy.bytes_per_s, whole, receiving, nodes, progress, copy.missing_bytes)
    checked = replace(transfer, slow_since=0.0, replan_checked_at=now)
    model = state.model_of_pack(transfer.pack_id, copy.pack_bytes)
    if edge is not None:
        sources, num_replans = planned_sources(edge), transfer.num_replans + 1
        checked = replace(checked, sources=sources, planned_bytes_per_s=edge.bytes_per_s, num_replans=num_replans)
    state.transfers.put(checked)
    if edge is not None:
        hop = Hop(edge.target, edge.sources, (), edge.num_striped)
        state.effects.commands.append(RerouteCommand(model, hop, transfer.urgent))
    if edge is not None or is_first:  # the lack of a better source is reported once
        state.effects.events.append(slow_event(transfer, copy.bytes_per_s, edge, model, now))


def _record(state: State, events: Iterable[TransferEvent], now: float) -> None:
    for event in events:
        _record_history(state, event, now)
        if event.kind in (TransferEventKind.FINISHED, TransferEventKind.FAILED):
            _record_copy(state, event.transfer, now)


def _record_lost(state: State, events: Iterable[TransferEvent], now: float) -> None:
    """Records transfers to a store that is gone, and clears the failures of its copies, which were not their fault."""
    for event in events:
        _record_history(state, event, now)
        if event.transfer.cause is not None:
            state.replication_state.clear_failures(event.transfer.key)


def _record_history(state: State, event: TransferEvent, now: float) -> None:
    if event.in_history:
        model = state.model_of_pack(event.transfer.pack_id)
        state.effects.events.append(transfer_event(event, model, now))


def _record_copy(state: State, transfer: Transfer, now: float) -> None:
    """Records the success or failure of a copy that the replicator ordered."""
    cause, error, replication_state = transfer.cause, transfer.error, state.replication_state
    if cause is None:
        return
    if error:
        replication_state.fail(transfer.key, cause, now, state.config)
    else:
        replication_state.clear_failures(transfer.key)
    if transfer.pack_id not in replication_state.recent_packs:
        return
    model, took_s = replication_state.recent_packs.use(transfer.pack_id).model, now - transfer.planned_at
    fields: dict[str, str | float] = {"pack_id": transfer.pack_id, "store_id": transfer.target, "took_s": took_s}
    fields |= {"cause": cause.value} | ({"error": error} if error else {})
    kind, reason = ("copy_failed", error) if error else ("copied", f"{cause.value} is done")
    record_copy_event(state, now, kind, model, f"{transfer.target}: {reason}", fields)


def record_copy_event(
    state: State, now: float, kind: str, model: Model, reason: str, fields: Mapping[str, str | float]
) -> None:
    topic = {"copied": "finished", "copy_failed": "failed"}.get(kind, kind)
    event = SchedulerEvent(now, kind, model.name, model.name, reason, f"copy.{topic}", fields)
    state.effects.events.append(event)
