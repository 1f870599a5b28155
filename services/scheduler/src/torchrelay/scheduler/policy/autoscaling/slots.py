"""Free slots as candidates for a model, and their assignment: a slot that plays both roles, or a pair set apart;
nearest copy first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from torchrelay.scheduler.policy.cluster.free_workers import SlotKind
from torchrelay.scheduler.policy.cluster.instances import Instances
from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.storage_tiers import Tier, tier_of
from torchrelay.scheduler.policy.types import BOTH, ROLES, Model, Role, Roles


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


class FreeSlots:
    """The slots that are free in one decision. Among slots that differ only in name, a model gets as many candidates as
    it can use.
    """

    def __init__(self, instances: Instances, membership: Membership) -> None:
        self._instances, self._membership, self._free = instances, membership, membership.free_workers
        self._taken: set[str] = set()

    def take(self, slots: Iterable[FreeSlot | SlotAssignment]) -> None:
        """Marks these slots as no longer free."""
        self._taken.update(slot.worker_id for slot in slots)

    def for_roles(self, model: Model, avoid: frozenset[str], kv_bytes: int, missing: Counter[Role]) -> list[FreeSlot]:
        """The slots among which ``assign`` chooses. Pairs go to one host if possible, so all slots are candidates."""
        kinds = [kind for kind, _ in self._free.kinds(model)]
        may_pair = len(+missing) == len(ROLES) and not _are_whole(kinds, kv_bytes)
        return self.of(model, avoid, kv_bytes, None if may_pair else missing.total())

    def of(
        self, model: Model, avoid: frozenset[str] = frozenset(), kv_bytes: int = 0, most: int | None = None
    ) -> list[FreeSlot]:
        """Slots whose host has a store with free space for the pack; without decode if their KV pool is smaller than
        ``kv_bytes``. ``most``: limit per kind in the farthest tier, where the first by name are returned, and any
        avoided workers before them.
        """
        slots: list[FreeSlot] = []

        def add(worker_id: str, host_id: str, tier: Tier, kind: SlotKind, roles: Roles) -> None:
            is_avoided = worker_id in avoid
            slots.append(FreeSlot(worker_id, host_id, roles, tier, is_avoided, kind.preferred_role, kind.hands_over))

        near = self._near(model)
        for host_id, tier in near.items():
            for worker_id in filter(self._is_free, self._free.on_host(host_id)):
                kind = SlotKind.of(self._free[worker_id])
                roles = kind.roles_for(kv_bytes)
                if roles and model.fits(kind.slot_class):
                    add(worker_id, host_id, tier, kind, roles)
        far = Tier.REMOTE if all(tier is Tier.DISK for tier in near.values()) else Tier.PEER
        has_space: dict[str, bool] = dict.fromkeys(near, False)  # by host
        for kind, worker_ids in self._free.kinds(model):
            roles, num_left = kind.roles_for(kv_bytes), most
            if not roles or num_left == 0:
                continue
            for worker_id in worker_ids:
                host_id = self._free[worker_id].host_id
                if host_id not in has_space:
                    store = self._membership.store_of(host_id)
                    has_space[host_id] = store is not None and store.has_space_for(model.pack_id, model.pack_bytes)
                if not has_space[host_id] or not self._is_free(worker_id):
                    continue
                add(worker_id, host_id, far, kind, roles)
                if num_left is not None and worker_id not in avoid:
                    num_left -= 1
                    if not num_left:
                        break
        return slots

    def _near(self, model: Model) -> Mapping[str, Tier]:
        """Hosts that have the pack in RAM or receive it; if there are none, hosts that have it on disk."""
        membership, pack_id = self._membership, model.pack_id
        in_ram = [store for store in membership.holders(pack_id) if not store.copies[pack_id].error]
        on_disk = [] if in_ram else membership.disk_holders(pack_id)
        return {
            store.host_id: tier_of(pack_id, store, bool(in_ram))
            for store in (*in_ram, *on_disk)
            if membership.store_of(store.host_id) is store and store.has_space_for(pack_id, model.pack_bytes)
        }

    def _is_free(self, worker_id: str) -> bool:
        return not (
            worker_id in self._taken or worker_id in self._instances.workers or worker_id in self._membership.suspects
        )


def assign(missing: Counter[Role], slots: Iterable[FreeSlot]) -> tuple[SlotAssignment, ...]:
    """Assigns slots to as many of the ``missing`` instances per role as possible.

    If both roles are missing, prefers one slot that plays both, which takes half the devices of a pair. A pair comes
    first only if the operator has set slots apart, some that prefer prefill and some that prefer decode, and no load
    failed at either. Without a slot that plays both, any pair, if possible on one host (one copy serves both). Half a
    pair is never loaded.
    """
    num_prefill, num_decode = missing[Role.PREFILL], missing[Role.DECODE]
    left = sorted(slots, key=lambda slot: slot.cost)
    chosen: list[SlotAssignment] = []
    while num_prefill or num_decode:
        role = Role.PREFILL if num_prefill else Role.DECODE
        taken = _both(left) if num_prefill and num_decode else _single(left, role)
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


def _are_whole(kinds: list[SlotKind], kv_bytes: int) -> bool:
    """Whether every slot plays both roles, and not both roles are preferred somewhere: then no pairs are made."""
    preferred = {kind.preferred_role for kind in kinds}
    return all(kind.roles_for(kv_bytes) >= BOTH for kind in kinds) and not preferred >= BOTH
