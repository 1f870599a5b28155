"""Conditions that need an operator."""

from __future__ import annotations

import pytest

from torchrelay.common.health import HealthReport
from torchrelay.control.v1 import reports_pb2, scheduler_pb2
from torchrelay.gateway.console.alerts import KV_HOLD_S, WAIT_HOLD_S, alerts, held
from torchrelay.gateway.console.core import Alert, Listed

WORKER = reports_pb2.WorkerReport(worker_id="w-1", host_id="host-1", kv_pool_bytes=100, kv_free_bytes=50)
STORE = reports_pb2.StoreReport(host_id="host-1")
HEALTHY = HealthReport()


def of(
    cluster: scheduler_pb2.ClusterView | None, health: HealthReport = HEALTHY, disk_fault: str = ""
) -> dict[str, Alert]:
    listed = [Listed("acme/a", "t-1", "v-1", 900)]
    return {alert.key: alert for alert in alerts(listed, cluster, health, disk_fault)}


def view(**fields: object) -> scheduler_pb2.ClusterView:
    cluster = scheduler_pb2.ClusterView(workers=[WORKER], stores=[STORE], largest_slot_bytes=1000)
    cluster.MergeFrom(scheduler_pb2.ClusterView(**fields))  # type: ignore[arg-type]
    return cluster


def test_healthy_platform_has_no_alert() -> None:
    assert of(view()) == {}


def test_lost_parts_come_first_with_what_to_do() -> None:
    health = HealthReport({"database": "does not answer"}, {"redis": "is unavailable", "scheduler": "does not answer"})
    found = alerts([], None, health, "the disk of /home is full")
    assert [(each.text, each.is_critical) for each in found] == [
        ("The database does not answer.", True),
        ("The scheduler does not answer.", True),
        ("The disk of /home is full.", True),
        ("Redis is unavailable.", False),
    ]
    assert all(each.advice for each in found)
    assert [bool(each.public) for each in found] == [True, True, False, False]


def test_scheduler_that_is_silent_is_told_before_its_health() -> None:
    assert of(None)["scheduler"].text == "The scheduler does not answer."


def test_absent_and_leaving_workers() -> None:
    leaving = reports_pb2.WorkerReport(worker_id="w-1", host_id="host-1", is_leaving=True)
    assert of(scheduler_pb2.ClusterView()).keys() == {"workers"}
    assert of(scheduler_pb2.ClusterView(workers=[leaving])).keys() == {"workers"}
    assert of(scheduler_pb2.ClusterView(workers=[WORKER])).keys() == {"store host-1"}


def test_models_that_cannot_load() -> None:
    slot = reports_pb2.SlotState(state=reports_pb2.SlotState.STATE_FREE, error="out of memory")
    failed = reports_pb2.WorkerReport(worker_id="w-2", host_id="host-1", slot=slot)
    assert "w-2 failed: out of memory" in of(view(workers=[failed]))["load w-2"].text
    too_large = of(scheduler_pb2.ClusterView(workers=[WORKER], stores=[STORE], largest_slot_bytes=800))["size acme/a"]
    assert (too_large.models, "900 B" in too_large.text, "800 B" in too_large.public) == (("acme/a",), True, True)
    relay = scheduler_pb2.RelayView(
        pack_id="p", model="acme/a", target="s-1", state=scheduler_pb2.RelayView.STATE_FAILED, error="no source"
    )
    assert "s-1 failed: no source" in of(view(relays=[relay]))["relay s-1 p"].text


def test_overload() -> None:
    demand = scheduler_pb2.ModelDemand(model="acme/a", num_waiting=2)
    full = reports_pb2.WorkerReport(worker_id="w-3", host_id="host-1", kv_pool_bytes=100, kv_free_bytes=2)
    pool = scheduler_pb2.PoolView(num_devices=1, num_slots=2, num_wanted=3, reason="2 models wait")
    found = of(view(demand=[demand], workers=[full], pools=[pool]))
    assert found.keys() == {"wait acme/a", "kv w-3", "pool 1"}
    assert (found["wait acme/a"].hold_s, found["wait acme/a"].models) == (WAIT_HOLD_S, ("acme/a",))
    assert "98% full" in found["kv w-3"].text
    assert "3 slots of 1 device are wanted, 2 are there" in found["pool 1"].text


@pytest.mark.parametrize(("age_s", "num_shown"), [(0.0, 1), (WAIT_HOLD_S - 1, 1), (WAIT_HOLD_S, 2), (KV_HOLD_S, 3)])
def test_alert_is_shown_once_it_has_held(age_s: float, num_shown: int) -> None:
    found = [Alert("now", "", ""), Alert("wait", "", "", hold_s=WAIT_HOLD_S), Alert("kv", "", "", hold_s=KV_HOLD_S)]
    assert len(held(found, {alert.key: 100.0 for alert in found}, 100.0 + age_s)) == num_shown
