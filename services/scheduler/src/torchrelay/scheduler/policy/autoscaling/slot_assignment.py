"""Assignment of free slots to a model: a slot that plays both roles, or a pair that is set apart; nearest copy
first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

from torchrelay.scheduler.policy.cluster.storage_tiers import Tier, tier_of
from torchrelay.scheduler.policy.types import BOTH, ROLES, Model, Role, Roles, StoreStatus, WorkerStatus


class FreeSlot(NamedTuple):
    """A free slot as a candidate for one model."""

    worker_id: str
    host_id: str
    playable_roles: Roles
    tier: Tier
    avoided: bool = False  # the model failed to load here recently
    preferred_role: Role | None = None
    hands_over: bool = True  # else it plays all its roles

    @property
    def cost(self) -> tuple[bool, bool, int, int, str]:
        """Lower is better. Slots that can play only one role are used first, and before them engines that hand over."""
        return (self.avoided, not self.hands_over, int(self.tier), len(self.playable_roles), self.worker_id)


@dataclass(frozen=True)
class SlotAssignment:
    worker_id: str
    roles: Roles


def free_slots(
    model: Model,
    workers: Iterable[WorkerStatus],
    stores: Mapping[str, StoreStatus],
    avoid: frozenset[str],
    kv_bytes: int = 0,
) -> list[FreeSlot]:
    """The slots of ``workers`` (all free) whose host has a store with space for the pack; ``stores``: by host. Slots
    with a pool of less than ``kv_bytes`` do not decode.
    """
    copies = (store.copies.get(model.pack_id) for store in stores.values())
    is_held = any(copy is not None and not copy.error for copy in copies)

    @cache
    def tier(host_id: str) -> Tier | None:
        store = stores.get(host_id)
        if store is None or not store.has_space_for(model.pack_id, model.pack_bytes):
            return None
        return tier_of(model.pack_id, store, is_held)

    return [
        FreeSlot(
            worker.worker_id,
            worker.host_id,
            roles,
            nearest,
            worker.worker_id in avoid,
            worker.preferred_role,
            worker.hands_over,
        )
        for worker in workers
        if model.slot_class.fits(worker)
        and (roles := worker.roles_for(kv_bytes))
        and (nearest := tier(worker.host_id)) is not None
    ]


def assign(slots: Iterable[FreeSlot], num_prefill: int, num_decode: int) -> tuple[SlotAssignment, ...]:
    """Assigns slots to as many of the missing prefill and decode instances as possible.

    If both roles are missing, prefers one slot that plays both, which takes half the devices of a pair. A pair comes
    first only if the operator has set slots apart, some that prefer prefill and some that prefer decode, and no load
    failed at either. Without a slot that plays both, any pair, if possible on one host (one copy serves both). Half a
    pair is never loaded.
    """
    left = sorted(slots, key=lambda slot: slot.cost)
    chosen: list[SlotAssignment] = []
    while num_prefill or num_decode:
        missing = Role.PREFILL if num_prefill else Role.DECODE
        taken = _both(left) if num_prefill and num_decode else _single(left, missing)
        if not taken:
            break
        for slot, roles in taken:
            left.remove(slot)
            chosen.append(SlotAssignment(slot.worker_id, roles))
            num_prefill -= Role.PREFILL in roles and num_prefill > 0
            num_decode -= Role.DECODE in roles and num_decode > 0
    return tuple(chosen)


def _single(left: list[FreeSlot], role: Role) -> list[tuple[FreeSlot, Roles]]:
    able = [slot for slot in left if role in slot.playable_roles]
    best = min(able, key=lambda slot: (slot.avoided, slot.preferred_role is not role), default=None)
    return [(best, frozenset((role,)) if best.hands_over else best.playable_roles)] if best else []


def _both(left: list[FreeSlot]) -> list[tuple[FreeSlot, Roles]]:
    on_host = defaultdict[str, list[FreeSlot]](list)
    for slot in left:
        on_host[slot.host_id].append(slot)
    pairs = [pair for slots in (left, *on_host.values()) for pair in _pairs(_first_two_alike(slots))]
    whole = next((slot for slot in left if slot.playable_roles >= BOTH), None)
    if whole is not None:
        pairs = [pair for pair in pairs if (pair[0].preferred_role, pair[1].preferred_role) == ROLES]
    if pairs:
        best = min(pairs, key=lambda pair: (*_pair_cost(*pair), pair[0].cost, pair[1].cost))
        if whole is None or whole.avoided or not (best[0].avoided or best[1].avoided):
            return [(best[0], frozenset((Role.PREFILL,))), (best[1], frozenset((Role.DECODE,)))]
    return [(whole, BOTH)] if whole is not None else []


def _pairs(slots: Sequence[FreeSlot]) -> Iterator[tuple[FreeSlot, FreeSlot]]:
    prefills = [slot for slot in slots if slot.hands_over and Role.PREFILL in slot.playable_roles]
    decodes = [slot for slot in slots if slot.hands_over and Role.DECODE in slot.playable_roles]
    return ((prefill, decode) for prefill, decode in product(prefills, decodes) if prefill is not decode)


def _first_two_alike(slots: Iterable[FreeSlot]) -> list[FreeSlot]:
    """The first two of each group of slots that differ only in name or host, which does not affect the best pair."""
    numbers: Counter[tuple[object, ...]] = Counter()
    chosen = []
    for slot in slots:
        alike = (slot.avoided, slot.tier, slot.playable_roles, slot.preferred_role, slot.hands_over)
        numbers[alike] += 1
        if numbers[alike] <= 2:
            chosen.append(slot)
    return chosen


def _pair_cost(prefill: FreeSlot, decode: FreeSlot) -> tuple[bool, bool, int, int]:
    avoided = prefill.avoided or decode.avoided
    misfits = (prefill.preferred_role is Role.DECODE) + (decode.preferred_role is Role.PREFILL)
    return (avoided, prefill.host_id != decode.host_id, max(prefill.tier, decode.tier), misfits)
