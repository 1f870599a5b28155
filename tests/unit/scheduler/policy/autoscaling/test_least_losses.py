"""Bounds of losses: they are below the exact ones, so that a search with them decides as a search without."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.unit.scheduler.policy.autoscaling.test_eviction import an_instance
from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker
from torchrelay.scheduler.policy.autoscaling.least_losses import VALID_S, LeastLosses
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.types import Role

MODEL, OTHER = a_model("acme/one"), a_model("acme/other")
PREFILL = frozenset((Role.PREFILL,))


class _NothingKnown(LeastLosses):
    """A search with it computes each loss."""

    def note(self, version_id: str, *args: object) -> None:
        self.changed(version_id, has_instances=True)


def test_versions_are_in_order_of_least_loss() -> None:
    losses = LeastLosses(away_s=10.0)
    losses.note(MODEL.version_id, [an_instance(1, MODEL), an_instance(2, MODEL)], 4.0, 2.0, 100.0)
    losses.note(OTHER.version_id, [an_instance(3, OTHER), an_instance(4, OTHER)], 1.0, 2.0, 100.0)
    assert [version_id for _, version_id in losses.whole_up_to(1e9, 100.0)] == [OTHER.version_id, MODEL.version_id]
    least = losses.whole_up_to(1e9, 100.0)[0][0]
    assert losses.up_to(least, 100.0) == [OTHER.version_id] and not losses.up_to(least * 0.99, 100.0)
    losses.check_integrity()


def test_changed_and_old_versions_may_lose_nothing() -> None:
    losses = LeastLosses(away_s=10.0)
    losses.note(MODEL.version_id, [an_instance(1, MODEL)], 4.0, 2.0, 100.0)
    losses.note(OTHER.version_id, [an_instance(2, OTHER, PREFILL)], 4.0, 2.0, 100.5)
    assert losses.others(100.5) == [OTHER.version_id], "a single instance that plays both roles is not spared"
    assert losses.others(100.1 + VALID_S) == [MODEL.version_id, OTHER.version_id]
    losses.changed(OTHER.version_id, has_instances=True)
    assert set(losses.up_to(0.0, 101.2)) == {MODEL.version_id, OTHER.version_id}
    losses.changed(OTHER.version_id, has_instances=False)
    assert losses.up_to(0.0, 101.2) == [MODEL.version_id]
    losses.check_integrity()


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
    assert num_drains > 20
