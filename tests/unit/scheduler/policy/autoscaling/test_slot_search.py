"""The best slots among few are those that are best among all, and so is the cheapest slot to take."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from tests.unit.scheduler.policy.autoscaling.listed_cluster import a_view
from tests.unit.scheduler.policy.paper_cluster import MB, PaperCluster, a_copy, a_model, a_store, a_worker
from torchrelay.scheduler.policy.autoscaling.least_losses import LeastLosses
from torchrelay.scheduler.policy.autoscaling.slots import FreeSlot, FreeSlots, assign
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.storage_tiers import tier_of
from torchrelay.scheduler.policy.types import BOTH, DECODES, Model, PackCopy, Role, Roles, StoreStatus, WorkerStatus

MODEL, OTHER = a_model(), a_model("acme/other")
ROLES: tuple[Roles, ...] = (BOTH, DECODES, BOTH - DECODES)
SIZES = (1, 2)


def some_stores(random: Random) -> list[StoreStatus]:
    def copies() -> list[PackCopy]:
        own = replace(a_copy(MODEL, random.choice([3, 8])), error=random.choice(["", "", "lost"]))
        pinned = replace(a_copy(OTHER), num_pins=1)
        return [*([own] if random.random() < 0.2 else []), *([pinned] if random.random() < 0.4 else [])]

    arenas = (48 * MB, 128 * MB)
    hosts = range(random.randrange(1, 12))
    on_disk = random.choice((None, frozenset({MODEL.pack_id, OTHER.pack_id})))
    return [
        replace(
            a_store(f"s{host}", f"h{host}", copies(), random.choice(arenas)),
            disk_pack_ids=on_disk if random.random() < 0.3 else None,
        )
        for host in hosts
    ]


def some_workers(random: Random, is_alike: bool) -> list[WorkerStatus]:
    """Workers of a few kinds, if not all alike."""
    pools, gpus = (64 * MB, 512 * MB), (0, MODEL.pack_bytes - 1, MODEL.pack_bytes)
    kinds = [
        (random.choice(ROLES), random.choice([None, *Role]), random.choice(pools), random.choice(gpus))
        for _ in range(3)
    ]

    def worker(name: str) -> WorkerStatus:
        host_id, size = f"h{random.randrange(12)}", random.choice(SIZES)
        if is_alike:
            return a_worker(name, host_id, num_devices=size)
        roles, preferred, pool, weights = random.choice(kinds)
        more = {"preferred_role": preferred, "kv_pool_bytes": pool, "weights_bytes": weights}
        return a_worker(name, host_id, roles, num_devices=size, **more)

    names = [f"w{number}" for number in range(random.randrange(30))]
    return [worker(name) for name in random.sample(names, len(names))]


def scanned(
    model: Model, workers: list[WorkerStatus], stores: dict[str, StoreStatus], avoid: frozenset[str], kv_bytes: int
) -> list[FreeSlot]:
    """The slots of ``workers``, all free, by a look at each; ``stores``: by host."""
    is_held = any(model.pack_id in store.copies and not store.copies[model.pack_id].error for store in stores.values())
    return [
        FreeSlot(
            worker.worker_id,
            worker.host_id,
            roles,
            tier_of(model.pack_id, store, is_held),
            worker.worker_id in avoid,
            worker.preferred_role,
            worker.hands_over,
        )
        for worker in workers
        if model.fits(worker)
        and (roles := worker.roles_for(kv_bytes))
        and (store := stores.get(worker.host_id)) is not None
        and store.has_space_for(model.pack_id, model.pack_bytes)
    ]


@pytest.mark.parametrize("is_alike", [True, False])
def test_few_slots_give_same_assignment_as_all(is_alike: bool) -> None:
    random = Random(1)
    for _ in range(400):
        stores = {store.host_id: store for store in some_stores(random)}
        workers = some_workers(random, is_alike)
        taken = frozenset(worker.worker_id for worker in workers if random.random() < 0.2)
        avoid = frozenset(worker.worker_id for worker in workers if random.random() < 0.3)
        model, kv_bytes = replace(MODEL, num_devices=random.choice(SIZES)), random.choice([0, 128 * MB])
        view = a_view([], workers=workers, stores=stores.values())
        for worker_id in taken:
            view.membership.suspect(worker_id, now=1.0)
        free = FreeSlots(view.instances, view.membership)
        every = scanned(model, [worker for worker in workers if worker.worker_id not in taken], stores, avoid, kv_bytes)
        assert set(free.of(model, avoid, kv_bytes)) == set(every)
        nearest = [slot.tier for slot in free.of(model, avoid, kv_bytes, most=1)]
        assert min(nearest, default=None) == min((slot.tier for slot in every), default=None)
        for num_prefill, num_decode in ((1, 1), (3, 3), (0, 1), (2, 0), (3, 1)):
            missing = Counter({Role.PREFILL: num_prefill, Role.DECODE: num_decode})
            assert assign(missing, free.for_roles(model, avoid, kv_bytes, missing)) == assign(missing, every)


class _NothingKnown(LeastLosses):
    """A search with it computes each loss."""

    def note(self, version_id: str, *args: object) -> None:
        self.changed(version_id, has_instances=True)


def _commands(seed: int, losses: LeastLosses | None) -> list[str]:
    """Commands of a cluster in which more models are in use than there are slots."""
    scene, rng = PaperCluster(PolicyConfig(replicate=False, longest_wait_s=20.0)), random.Random(seed)
    if losses is not None:
        scene.policy.state.least_losses = losses
    stores = [a_store(f"s{number}", f"h{number}") for number in range(2)]
    scene.settle(*stores, *(a_worker(f"w{number}", f"h{number % 2}") for number in range(6)))
    models = [replace(a_model(f"t{number % 3}/m{number}"), max_instances=2) for number in range(9)]
    open_requests: list[str] = []
    for number in range(400):
        model = models[int(rng.random() ** 2 * len(models))]
        scene.admit(model, f"r{number}", num_prompt_tokens=rng.choice((50, 400)))
        open_requests.append(f"r{number}")
        if len(open_requests) > 5:
            scene.release(open_requests.pop(rng.randrange(len(open_requests))))
        scene.pass_time(0.1)
        if rng.random() < 0.3:
            scene.finish_loads()
    scene.policy.state.least_losses.check_integrity()
    return [str(command) for command in scene.commands]


def test_search_with_bounds_decides_as_without() -> None:
    num_drains = 0
    for seed in range(4):
        commands = _commands(seed, None)
        assert commands == _commands(seed, _NothingKnown(10.0)), seed
        num_drains += sum("Unload" in command for command in commands)
    assert num_drains > 10
