"""Runs the relay planner on the state: edges for packs that are needed, and new sources for transfers that turn
slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torchrelay.scheduler.policy.effects import CopyCommand, Hop, RerouteCommand, SchedulerEvent
from torchrelay.scheduler.policy.reasons import NO_REASON, Reason
from torchrelay.scheduler.policy.relay.planning import TransferEdge
from torchrelay.scheduler.policy.relay.transfer_events import slow_event, transfer_event
from torchrelay.scheduler.policy.relay.transfers import Transfer, TransferEvent, TransferEventKind
from torchrelay.scheduler.policy.replication.copies import CopyOrder
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import CopyCause, Model, PackCopy, StoreStatus


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
    membership, transfers = state.membership, state.transfers
    whole, arriving = membership.whole_holders(pack_id), transfers.arriving(pack_id)
    concerned = [membership.stores[each] for each in (*whole, *arriving, *store_ids) if each in membership.stores]
    # Transfers of the same pack do not yield: a new target follows their target rather than their source.
    yielding, others = list[Transfer](), list[Transfer]()
    for transfer in transfers.touching(store.store_id for store in concerned):
        (yielding if urgent and not transfer.urgent and transfer.pack_id != pack_id else others).append(transfer)
    edges = state.strategies.plan(
        whole,
        list(arriving),
        store_ids,
        nodes=state.links.nodes(concerned, others, now, yielding),
        arriving=arriving,
        live=_busy_stores(state, store_ids),
        num_bytes=pack_bytes,
    )
    edges = transfers.plan(pack_id, pack_bytes, edges, now, urgent=urgent, reason=reason, cause=cause)
    if urgent:
        for transfer in transfers.hasten(pack_id, [edge.target for edge in edges if not edge.whole]):
            hop = Hop(transfer.target, tuple(transfer.sources), (), max(len(transfer.sources), 1))
            _reroute(state, hop, transfer)
    return edges


def goes_first(state: State, pack_id: str, store_id: str) -> bool:
    """Whether the store's relay may take all bandwidth it can get, rather than only what other transfers leave."""
    transfer = state.transfers.get((pack_id, store_id))
    return transfer is None or transfer.urgent


def _reroute(state: State, hop: Hop, transfer: Transfer) -> None:
    model = state.model_of_pack(transfer.pack_id, transfer.pack_bytes)
    state.effects.commands.append(RerouteCommand(model, hop, transfer.urgent))


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
        if copy is not None and copy.shares and transfer.planned_bytes_per_s:  # measured and predicted
            state.transfers.note_rate(transfer, copy.bytes_per_s, now)
            if transfer.is_replan_due(now):
                _replan(state, store, transfer, copy, now)


def store_lost(state: State, store: StoreStatus, cause: str, now: float) -> None:
    state.links.forget_store(store)
    _record(state, state.transfers.lost(store.store_id, cause, now), now, is_store_lost=True)


def relay_refused(state: State, pack_id: str, store_id: str, cause: str, now: float) -> None:
    """Records that the store could not be reached with the relay, or refused it."""
    _record(state, state.transfers.refused((pack_id, store_id), cause, now), now)


def _replan(state: State, store: StoreStatus, transfer: Transfer, copy: PackCopy, now: float) -> None:
    is_first, links, transfers = not transfer.replan_checked_at, state.links, state.transfers
    if not is_first:
        links.took_less(store, now)
    rates = {share.holder_id: share.bytes_per_s for share in copy.shares}
    for source, planned in transfer.sources.items():
        if rates.get(source, 0.0) * 2 < planned:
            links.fell_short(source, now)
    having = (*state.membership.whole_holders(transfer.pack_id), *transfers.arriving(transfer.pack_id))
    others = [other for other in transfers.touching(having) if other is not transfer]
    nodes = links.nodes([state.membership.stores[store_id] for store_id in having], others, now)
    if is_first:  # blame the sources before the target
        node = nodes[store.store_id]
        nodes[store.store_id] = replace(node, residual_in=max(node.residual_in, transfer.planned_bytes_per_s))
    edge = transfers.better_edge(transfer, copy, nodes)
    if edge is not None or is_first:  # the lack of a better source is reported once
        model = state.model_of_pack(transfer.pack_id, copy.pack_bytes)
        state.effects.events.append(slow_event(transfer, copy.bytes_per_s, edge, model, now))
    transfers.replan(transfer, edge, now)
    if edge is not None:
        _reroute(state, Hop(edge.target, edge.sources, (), edge.num_striped), transfer)


def _record(state: State, events: Iterable[TransferEvent], now: float, *, is_store_lost: bool = False) -> None:
    """Records events in the history, and the ends of copies that the replicator ordered; a copy is not to blame for the
    loss of its store.
    """
    for event in events:
        transfer = event.transfer
        if event.in_history:
            state.effects.events.append(transfer_event(event, state.model_of_pack(transfer.pack_id), now))
        if transfer.cause is not None and is_store_lost:
            state.copies.copy_ended(transfer.key, now)
        elif transfer.cause is not None and event.kind in (TransferEventKind.FINISHED, TransferEventKind.FAILED):
            _record_copy(state, transfer, transfer.cause, now)


def _record_copy(state: State, transfer: Transfer, cause: CopyCause, now: float) -> None:
    """Records the success or failure of a copy that the replicator ordered."""
    error = transfer.error
    state.copies.copy_ended(transfer.key, now, error)
    if (pack := state.copies.packs.get(transfer.pack_id)) is None:
        return
    took_s = now - transfer.planned_at
    fields: dict[str, str | float] = {"pack_id": transfer.pack_id, "store_id": transfer.target, "took_s": took_s}
    fields |= {"cause": cause.value} | ({"error": error} if error else {})
    kind, reason = ("copy_failed", error) if error else ("copied", f"{cause.value} is done")
    _record_copy_event(state, now, kind, pack.model, f"{transfer.target}: {reason}", fields)


def order_copy(state: State, order: CopyOrder, now: float) -> None:
    """Orders a copy in RAM, and records why."""
    model, cause, urgent = order.pack.model, order.cause.value, order.cause is CopyCause.REBUILD
    store_ids, reason = [order.store_id], Reason(cause, order.reason)
    (edge,) = plan_relay(
        state, model.pack_id, model.pack_bytes, store_ids, now, urgent=urgent, reason=reason, cause=order.cause
    )
    hop = Hop(edge.target, edge.sources, (), edge.num_striped)
    first = goes_first(state, model.pack_id, order.store_id)
    state.effects.commands.append(CopyCommand(model, hop, first, not order.may_evict_retained))
    fields = {"cause": cause, "pack_id": model.pack_id, "store_id": order.store_id, "source": edge.upstream}
    _record_copy_event(state, now, cause, model, f"{order.reason}: {edge}; {order.pack.worth}", fields)


def record_evictions(state: State, store: StoreStatus, now: float) -> None:
    """Records copies that the store no longer reports: it evicted them to free space, or they were dropped."""
    for pack_id in state.copies.evicted(store):
        pack = state.copies.packs[pack_id]
        worth = state.pack_worth(pack.model, pack.last_used, now)
        fields = {"pack_id": pack_id, "store_id": store.store_id}
        reason = f"no longer in the RAM of {store.store_id}; {worth}"
        _record_copy_event(state, now, "evicted", pack.model, reason, fields)


def _record_copy_event(
    state: State, now: float, kind: str, model: Model, reason: str, fields: Mapping[str, str | float]
) -> None:
    topic = {"copied": "finished", "copy_failed": "failed"}.get(kind, kind)
    event = SchedulerEvent(now, kind, model.name, model.name, reason, f"copy.{topic}", fields)
    state.effects.events.append(event)
