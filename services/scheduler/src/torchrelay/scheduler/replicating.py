"""From the state to the replicator's decision, and from that to commands and their reasons."""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.scheduler import relaying
from torchrelay.scheduler.copybook import Ended
from torchrelay.scheduler.core import Instance, Model, Store
from torchrelay.scheduler.effects import CopyCommand, GuardCommand, Happening, Hop
from torchrelay.scheduler.reasons import Reason
from torchrelay.scheduler.replication import CopyOrder, Holdings, Pack, repair
from torchrelay.scheduler.state import State


def replicate(state: State, now: float) -> None:
    """Decides on all copies, a few times a second; not before a start has heard of all stores."""
    rules, book = state.rules, state.copybook
    if not rules.replicate or now < max(book.due_at, state.started_at + rules.refusal_settle_s):
        return
    book.due_at = now + rules.replicate_every_s
    for instance in state.fleet:
        if instance.staying and (model := _model_of(state, instance)):
            book.recency.note(model, now)
    for ended in list(book.ended(state.view.stores, now, rules)):
        _ended(state, ended, now)
    decided = repair(_holdings(state, now), rules)
    recent = {use.model.pack_id for use in book.recency if use.last_used >= now - rules.recent_s}
    book.settled, book.num_short = (book.settled & recent) | decided.settled, decided.num_short
    for order in decided.orders:
        _copy(state, order, now)
    for store_id, packs in book.untold(decided.guards, state.view.stores, now, rules):
        state.effects.commands.append(GuardCommand(store_id, packs, rules.guard_s))


def _model_of(state: State, instance: Instance) -> Model | None:
    """The model of an instance; of one that an earlier scheduler loaded, what its host's copy tells."""
    if model := state.models.get(instance.version_id):
        return model
    store = state.view.store_of(instance.host_id)
    copy = store.copies.get(instance.pack_id) if store else None
    return Model(instance.model, instance.version_id, copy.pack_id, copy.pack_bytes, 0) if copy else None


def _holdings(state: State, now: float) -> Holdings:
    book = state.copybook
    away = book.away(now)
    stores = {**away, **state.view.stores}
    held = {copy.pack_id for store in stores.values() for copy in store.copies.values() if copy.complete}
    book.keep_lost(held)
    packs = [
        Pack(
            use.model.pack_id,
            use.model.pack_bytes,
            use.last_used,
            settled=use.model.pack_id in book.settled,
            lost=use.model.pack_id in book.lost,
        )
        for use in book.recency
    ]
    return Holdings(now, stores, packs, frozenset(away), book.under_way, book.avoid(now, state.rules))


def _copy(state: State, order: CopyOrder, now: float) -> None:
    model = state.copybook.recency.model(order.pack_id)
    (arrow,) = relaying.draw(
        state,
        order.pack_id,
        model.pack_bytes,
        [order.store_id],
        now,
        urgent=order.urgent,
        reason=Reason(order.cause.value, order.reason),
    )
    state.copybook.order((order.pack_id, order.store_id), order.cause, now)
    hop = Hop(arrow.target, arrow.sources, (), arrow.num_striped)
    state.effects.commands.append(CopyCommand(model, hop, order.urgent, not order.may_evict_guarded))
    cause = order.cause.value
    fields = {"cause": cause, "pack_id": order.pack_id, "store_id": order.store_id, "source": arrow.upstream}
    _happened(state, now, cause, model, f"{order.reason}: {arrow}", f"scale.{cause}", fields)


def copy_begun(state: State, pack_id: str, store_id: str, now: float) -> None:
    """The store has taken the order."""
    state.copybook.begun((pack_id, store_id), now)


def copy_failed(state: State, pack_id: str, store_id: str, cause: str, now: float, gone: bool = False) -> None:
    """The store could not be given the order, or refused it. ``gone``: the pack was deleted, so it is forgotten."""
    relaying.refused(state, pack_id, store_id, cause, now)
    if ended := state.copybook.fail((pack_id, store_id), cause, now, state.rules):
        _ended(state, ended, now)
    if gone:
        state.copybook.forget(pack_id)


def _ended(state: State, ended: Ended, now: float) -> None:
    if ended.pack_id not in state.copybook.recency:
        return
    model = state.copybook.recency.model(ended.pack_id)
    fields: dict[str, str | float] = {"pack_id": ended.pack_id, "store_id": ended.store_id, "took_s": ended.took_s}
    fields |= {"cause": ended.cause.value} | ({"error": ended.error} if ended.error else {})
    kind, reason = ("copy_failed", ended.error) if ended.error else ("copied", f"{ended.cause.value} is done")
    _happened(state, now, kind, model, f"{ended.store_id}: {reason}", f"scale.{kind}", fields)


def _happened(
    state: State, now: float, kind: str, model: Model, reason: str, event: str, fields: Mapping[str, str | float]
) -> None:
    state.effects.happenings.append(Happening(now, kind, model.name, model.name, reason, event, fields))


def store_left(state: State, store: Store, now: float) -> None:
    """A store is gone, or silent: it may come back with its arena."""
    state.copybook.left(store, now + state.rules.loss_grace_s)


def store_seen(state: State, store: Store, before: Store | None, now: float) -> None:
    """A store reports; ``before``: what it said last. Packs that an earlier scheduler guarded were used of late."""
    book = state.copybook
    book.returned(store, before)
    for copy in store.copies.values():
        if copy.guarded and copy.pack_id not in book.recency:
            book.recency.note(Model(copy.pack_id[:12], "", copy.pack_id, copy.pack_bytes, 0), now)
