"""The endpoints of a version, which are built again only as far as they changed."""

from __future__ import annotations

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker
from torchrelay.scheduler.policy.handlers import endpoints
from torchrelay.scheduler.policy.types import InstancePhase, SlotStatus

MODEL = a_model()


def test_layer_rebuilds_endpoint_of_its_instance_only() -> None:
    """Each layer that arrived anywhere rebuilt all endpoints of the version."""
    ready, loading = (
        SlotStatus(
            phase, f"of {name}", MODEL.name, MODEL.version_id, MODEL.pack_id, num_layers_ready=number, num_layers=4
        )
        for name, phase, number in (("w0", InstancePhase.READY, 4), ("w1", InstancePhase.LOADING, 1))
    )
    workers = a_worker("w0", slot=ready), a_worker("w1", slot=loading)
    scene = PaperCluster().settle(a_store("s1", "host-1"), *workers)
    state = scene.policy.state

    def listed() -> dict[str, object]:
        return {each.instance_id: each for each in endpoints.of_version(state, MODEL, scene.now)}

    before = listed()
    scene.now += 1.0
    scene.set_slot("w1", num_layers_ready=2)
    scene.report("w1")
    after = listed()
    assert after["of w0"] is before["of w0"]
    assert after["of w1"] != before["of w1"]
