"""The slots that are free in one decision, as candidates for each model. Among slots that differ only in name, a model
gets as many candidates as it can use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchrelay.scheduler.policy.autoscaling.slot_assignment import FreeSlot, SlotAssignment
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.cluster.free_workers import SlotKind
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier, tier_of
from torchrelay.scheduler.policy.types import BOTH, Model


class FreeSlots:
    def __init__(self, view: View) -> None:
        self._view, self._free = view, view.membership.free_workers
        self._taken: set[str] = set()

    def take(self, slots: Iterable[FreeSlot | SlotAssignment]) -> None:
        """Marks these slots as no longer free."""
        self._taken.update(slot.worker_id for slot in slots)

    def for_roles(
        self, model: Model, avoid: frozenset[str], kv_bytes: int, num_prefill: int, num_decode: int
    ) -> list[FreeSlot]:
        """The slots among which ``assign`` chooses. Pairs go to one host if possible, so all slots are candidates."""
        kinds = [kind for kind, _ in self._free.kinds(model.slot_class)]
        may_pair = num_prefill > 0 and num_decode > 0 and not _are_whole(kinds, kv_bytes)
        return self.of(model, avoid, kv_bytes, None if may_pair else num_prefill + num_decode)

    def of(
        self, model: Model, avoid: frozenset[str] = frozenset(), kv_bytes: int = 0, most: int | None = None
    ) -> list[FreeSlot]:
        """Slots whose host has a store with free space for the pack; without decode if their KV pool is smaller than
        ``kv_bytes``. ``most``: limit per kind in the farthest tier, where the first by name are returned, and any
        avoided workers before them.
        """
        near = self._near(model)
        slots = []
        for host_id, tier in near.items():
            for worker_id in self._free.on_host(host_id):
                worker = self._free[worker_id]
                roles = worker.roles_for(kv_bytes)
                if roles and model.slot_class.fits(worker) and self._is_free(worker_id):
                    is_avoided = worker_id in avoid
                    preferred_role, hands_over = worker.preferred_role, worker.hands_over
                    slots.append(FreeSlot(worker_id, host_id, roles, tier, is_avoided, preferred_role, hands_over))
        far = Tier.REMOTE if all(tier is Tier.DISK for tier in near.values()) else Tier.PEER
        has_space: dict[str, bool] = dict.fromkeys(near, False)  # by host
        for kind, worker_ids in self._free.kinds(model.slot_class):
            roles, num_left = kind.roles_for(kv_bytes), most
            if not roles or num_left == 0:
                continue
            for worker_id in worker_ids:
                host_id = self._free[worker_id].host_id
                if host_id not in has_space:
                    store = self._view.membership.stores_by_host.get(host_id)
                    has_space[host_id] = store is not None and store.has_space_for(model.pack_id, model.pack_bytes)
                if not has_space[host_id] or not self._is_free(worker_id):
                    continue
                is_avoided = worker_id in avoid
                slots.append(FreeSlot(worker_id, host_id, roles, far, is_avoided, kind.preferred_role, kind.hands_over))
                if num_left is not None and not is_avoided:
                    num_left -= 1
                    if not num_left:
                        break
        return slots

    def _near(self, model: Model) -> Mapping[str, Tier]:
        """Hosts that have the pack in RAM or receive it; if there are none, hosts that have it on disk."""
        stores, index, pack_id = self._view.membership.stores_by_host, self._view.membership, model.pack_id
        in_ram = [store for store in index.holders(pack_id) if not store.copies[pack_id].error]
        on_disk = [] if in_ram else index.disk_holders(pack_id)
        return {
            store.host_id: tier_of(pack_id, store, bool(in_ram))
            for store in (*in_ram, *on_disk)
            if stores.get(store.host_id) is store and store.has_space_for(pack_id, model.pack_bytes)
        }

    def _is_free(self, worker_id: str) -> bool:
        return not (
            worker_id in self._taken
            or worker_id in self._view.instances.workers
            or worker_id in self._view.membership.suspects
        )


def _are_whole(kinds: list[SlotKind], kv_bytes: int) -> bool:
    """Whether every slot plays both roles, and not both roles are preferred somewhere: then no pairs are made."""
    preferred = {kind.preferred_role for kind in kinds}
    return all(kind.roles_for(kv_bytes) >= BOTH for kind in kinds) and not preferred >= BOTH
