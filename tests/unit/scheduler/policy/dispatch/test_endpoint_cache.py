"""EndpointCache: built once, and nothing is kept of a version without instances."""

from __future__ import annotations

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.dispatch.endpoint import Endpoint
from torchrelay.scheduler.policy.dispatch.endpoint_cache import EndpointCache
from torchrelay.scheduler.policy.dispatch.open_attempts import NO_WORK
from torchrelay.scheduler.policy.types import InstancePhase, WorkerRef

LOADING = Endpoint(
    WorkerRef("w", "w:1", "i"), "h", True, True, InstancePhase.LOADING, 1000.0, LatencyModel(), 1 << 20, 1.0
)


def test_version_without_instances_is_not_cached() -> None:
    """Each that was ever asked for had an empty list of endpoints for good."""
    endpoints = EndpointCache()
    for number in range(100):
        version_id = f"v{number}"
        assert endpoints.of(version_id, lambda: (), lambda entry: entry) == ()
        assert not endpoints.prefills(version_id)
        assert endpoints.candidate_index(version_id, lambda instance_id: NO_WORK) is None
        endpoints.forget_loads(version_id)
    assert endpoints.num_known == 0


def test_version_with_departed_instances_is_not_cached() -> None:
    endpoints = EndpointCache()
    assert endpoints.of("v", lambda: (LOADING,), lambda entry: entry) == (LOADING,)
    assert endpoints.prefills("v") == (LOADING,)
    endpoints.block("v", 1001.0)
    endpoints.forget_loads("v")
    endpoints.forget("v")
    assert endpoints.num_known == 0
