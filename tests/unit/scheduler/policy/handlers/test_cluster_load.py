"""The autoscaler's input for a decision on some versions."""

from __future__ import annotations

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker
from torchrelay.scheduler.policy.handlers.cluster_load import autoscaler_input


def test_demand_of_any_version_can_be_read() -> None:
    first, second = a_model("acme/first"), a_model("acme/second")
    scene = PaperCluster().settle(a_store("store-1", "host-1"), a_worker("w-a"), a_worker("w-b"))
    scene.admit(first, "r1")
    scene.admit(second, "r2")
    decision_input = autoscaler_input(scene.policy.state, scene.now, [first.version_id])
    assert [demand.model.name for demand in decision_input.demands] == [first.name]
    assert decision_input.cluster_load.demand_of(first.version_id) is decision_input.demands[0]
    asked = decision_input.cluster_load.demand_of(second.version_id)
    assert asked is not None and asked.model.name == second.name and asked.num_cold == 1
    assert decision_input.cluster_load.demand_of("unknown") is None
