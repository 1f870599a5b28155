"""RosterCache: built once, and nothing is kept of a version without instances."""

from __future__ import annotations

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.core import InstancePhase, WorkerRef
from torchrelay.scheduler.policy.dispatch.open_attempts import NOTHING_BOUND
from torchrelay.scheduler.policy.dispatch.roster_cache import RosterCache
from torchrelay.scheduler.policy.dispatch.roster_entry import RosterEntry

LOADING = RosterEntry(
    WorkerRef("w", "w:1", "i"), "h", True, True, InstancePhase.LOADING, 1000.0, LatencyModel(), 1 << 20, 1.0
)


def test_version_without_instances_is_not_cached() -> None:
    """Each that was ever asked for had an empty roster for good."""
    rosters = RosterCache()
    for number in range(100):
        version_id = f"v{number}"
        assert rosters.of(version_id, lambda: (), lambda entry: entry) == ()
        assert not rosters.prefills(version_id)
        assert rosters.shortlist(version_id, lambda instance_id: NOTHING_BOUND) is None
        rosters.forget_loads(version_id)
    assert rosters.num_known == 0


def test_version_with_departed_instances_is_not_cached() -> None:
    rosters = RosterCache()
    assert rosters.of("v", lambda: (LOADING,), lambda entry: entry) == (LOADING,)
    assert rosters.prefills("v") == (LOADING,)
    rosters.block("v", 1001.0)
    rosters.forget_loads("v")
    rosters.forget("v")
    assert rosters.num_known == 0
