"""Instances: what the reports of their workers mean."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import a_worker
from torchrelay.scheduler.policy.cluster.instances import Instances, TransitionKind
from torchrelay.scheduler.policy.types import BOTH, Instance, InstancePhase, Role, SlotStatus, WorkerStatus

LOADING = SlotStatus(InstancePhase.LOADING, "i1", "acme/tiny", "v", "p", BOTH, 1, 4)


def an_instance(worker: WorkerStatus, accepted_at: float = 0.0, confirmed: bool = False) -> Instance:
    return Instance(
        "i1", "acme/tiny", "v", "p", worker.worker_id, worker.incarnation, worker.host_id, BOTH, InstancePhase.LOADING,
        1.0, 1.0, accepted_at, confirmed,
    )  # fmt: skip


def test_free_slot_means_failure_only_after_load_is_reported() -> None:
    instances, worker = Instances(), a_worker("w")
    instances.put(an_instance(worker))
    assert instances.observe(worker, now=1.1) == []
    instances.put(an_instance(worker, accepted_at=1.2))
    assert instances.observe(worker, now=1.3) == []  # sent before the Load
    (moved,) = instances.observe(replace(worker, slot=LOADING), now=1.4)
    assert moved.kind is TransitionKind.MOVED and moved.instance.confirmed and moved.instance.num_layers_ready == 1
    (failed,) = instances.observe(replace(worker, slot=SlotStatus(error="cut off")), now=1.5)
    assert failed.kind is TransitionKind.FAILED and failed.reason.text == "cut off" and instances.get("i1") is None


def test_load_failing_before_any_report_is_noticed() -> None:
    instances, worker = Instances(), a_worker("w", slot=SlotStatus(error="no space"))
    again = replace(an_instance(worker, accepted_at=1.0), error_before="no space")
    instances.put(again)
    assert instances.observe(worker, now=1.4) == []  # may be the word of the load before
    assert [change.kind for change in instances.observe(worker, now=1.6)] == [TransitionKind.FAILED]
    instances.put(again)
    broken = replace(worker, slot=SlotStatus(error="cut off"))
    assert [change.kind for change in instances.observe(broken, now=1.1)] == [TransitionKind.FAILED]


def test_restart_loses_instance_and_unknown_one_is_adopted() -> None:
    instances, worker = Instances(), a_worker("w")
    instances.put(an_instance(worker, accepted_at=1.0, confirmed=True))
    changes = instances.observe(replace(worker, incarnation="second", slot=replace(LOADING, instance_id="i2")), now=2.0)
    assert [change.kind for change in changes] == [TransitionKind.LOST, TransitionKind.ADOPTED]
    adopted = instances.on_worker("w")
    assert adopted is not None and adopted.instance_id == "i2" and adopted.placeable


def test_older_report_does_not_undo_drain() -> None:
    instances, worker = Instances(), a_worker("w", slot=replace(LOADING, phase=InstancePhase.READY))
    draining = replace(an_instance(worker, accepted_at=1.0, confirmed=True), phase=InstancePhase.DRAINING)
    instances.put(draining)
    instances.observe(worker, now=2.0)
    instance = instances.get("i1")
    assert instance is not None and instance.phase is InstancePhase.DRAINING
    assert [change.kind for change in instances.observe(replace(worker, slot=SlotStatus()), now=3.0)] == [
        TransitionKind.RELEASED
    ]


def test_older_report_does_not_undo_new_roles() -> None:
    prefill, decode = frozenset((Role.PREFILL,)), frozenset((Role.DECODE,))
    ready = replace(LOADING, phase=InstancePhase.READY, roles=prefill)
    instances, worker = Instances(), a_worker("w", slot=ready)
    changed = replace(an_instance(worker, accepted_at=1.0, confirmed=True), roles=decode, roles_since=1.9)
    instances.put(replace(changed, phase=InstancePhase.READY))
    for now, roles in ((2.0, decode), (3.0, prefill)):
        instances.observe(worker, now=now)
        instance = instances.get("i1")
        assert instance is not None and instance.roles == roles


def test_instance_of_a_leaving_worker_drains() -> None:
    instances, worker = Instances(), a_worker("w", slot=replace(LOADING, phase=InstancePhase.READY))
    instances.put(replace(an_instance(worker, accepted_at=1.0, confirmed=True), phase=InstancePhase.READY))
    (moved,) = instances.observe(replace(worker, is_leaving=True), now=2.0)
    assert moved.instance.phase is InstancePhase.DRAINING and not moved.instance.placeable
    assert (moved.instance.since, moved.instance.reason.cause) == (2.0, "worker_leaves")
    assert [instance.instance_id for instance in instances.draining] == ["i1"]
