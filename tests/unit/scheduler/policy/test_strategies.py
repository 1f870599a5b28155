"""A policy decides by the strategies that it is given."""

from __future__ import annotations

from collections.abc import Sequence

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker, two_workers_one_host
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import Action, AutoscalerInput
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.dispatch.placement import NoPlacement
from torchrelay.scheduler.policy.relay.planning import TransferEdge
from torchrelay.scheduler.policy.replication.repair import ReplicationInput, ReplicationPlan, Steps
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.types import REMOTE


def deciding_by(scene: PaperCluster, strategies: Strategies) -> PaperCluster:
    scene.policy.state.strategies = strategies
    return scene


def nothing_loaded(autoscaler_input: AutoscalerInput, config: PolicyConfig, *, is_complete: bool) -> tuple[Action, ...]:
    return ()


def never_placed(*_: object) -> NoPlacement:
    return NoPlacement("not here")


def test_another_decision_loads_nothing() -> None:
    scene = deciding_by(two_workers_one_host(), Strategies(decide=nothing_loaded))  # type: ignore[arg-type]
    scene.admit(a_model(), "r1")
    scene.pass_time(5)
    assert not scene.loads()


def test_another_placement_places_nothing() -> None:
    scene = deciding_by(two_workers_one_host(), Strategies(place=never_placed))  # type: ignore[arg-type]
    scene.admit(a_model(), "r1")
    scene.pass_time(5)
    assert scene.loads() and scene.placement("r1") is None


def test_another_plan_names_the_sources() -> None:
    def from_nearest(whole: Sequence[str], receiving: Sequence[str], targets: Sequence[str], **_: object) -> object:
        return tuple(TransferEdge(target, ("somewhere", REMOTE)) for target in targets)

    scene = deciding_by(two_workers_one_host(), Strategies(plan=from_nearest))  # type: ignore[arg-type]
    scene.obedient = False
    scene.admit(a_model(), "r1")
    (wake,) = scene.loads()
    assert [hop.sources for hop in wake.hops] == [("somewhere", REMOTE)]


def test_another_replicator_is_asked_instead() -> None:
    asked: list[ReplicationInput] = []

    def copies_nothing(replication_input: ReplicationInput, config: PolicyConfig) -> Steps[ReplicationPlan]:
        yield 1
        asked.append(replication_input)
        return ReplicationPlan()

    scene = PaperCluster().settle(a_store("store-1", "host-1"), a_worker("w-a"))
    deciding_by(scene, Strategies(repair=copies_nothing))
    scene.pass_time(20)
    assert asked
