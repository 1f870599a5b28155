"""What each caller sees of the live figures, conditions that need an operator, and the files of the console."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from torchrelay.common.health import HealthReport
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.gateway.console.alerts import KV_HOLD_S, WAIT_HOLD_S, alerts, held
from torchrelay.gateway.console.core import Alert, Listed
from torchrelay.gateway.console.sample import Sample, seen_by
from torchrelay.gateway.console.static_files import static_files
from torchrelay.gateway.core import FirstToken, Principal

ACME = Principal("t-1", "acme", "k-1")
ZOO = Principal("t-2", "zoo", "k-2")
OTHER = Principal("t-3", "other", "k-3")
ADMIN = Principal("", "", "", is_admin=True)


def sample() -> Sample:
    """Acme and zoo have uploaded the same files, and acme alone another model, which is on its way."""
    slot = reports_pb2.SlotState(
        state=reports_pb2.SlotState.STATE_READY,
        instance_id="i-1",
        model="acme/a",
        version_id="v-1",
        load_phases=[types_pb2.Phase(name="hold", begin_unix_us=1, end_unix_us=3)],
    )
    cluster = scheduler_pb2.ClusterView(
        workers=[
            reports_pb2.WorkerReport(
                worker_id="w-1", host_id="host-1", slot=slot, kv_pool_bytes=100, kv_free_bytes=75, num_running=5
            ),
            reports_pb2.WorkerReport(worker_id="w-2", host_id="host-2"),
        ],
        stores=[
            reports_pb2.StoreReport(
                host_id="host-1",
                arena_bytes=100,
                arena_free_bytes=40,
                copies=[reports_pb2.PackCopy(pack_id="p-1", num_chunks=4, num_chunks_verified=1)],
            )
        ],
        instances=[
            scheduler_pb2.InstanceView(
                instance_id="i-1",
                model="acme/a",
                version_id="v-1",
                pack_id="p-1",
                worker_id="w-1",
                state="ready",
                moves=[scheduler_pb2.PromptMoves(worker_id="w-2", num_prompts=3, saved_s=1.5)],
            )
        ],
        demand=[
            scheduler_pb2.ModelDemand(model="acme/a", num_running=5),
            scheduler_pb2.ModelDemand(model="acme/b", num_waiting=2),
        ],
        relays=[
            scheduler_pb2.RelayView(
                pack_id="p-2", model="acme/b", target="host-1", num_chunks=10, num_chunks_verified=5
            )
        ],
        versions=[
            scheduler_pb2.VersionView(version_id="v-1", pack_id="p-1", models=["acme/a"]),
            scheduler_pb2.VersionView(version_id="v-2", pack_id="p-2", models=["acme/b"]),
        ],
    )
    return Sample(
        1.0,
        {"t-1": (20, 300)},
        [Listed("acme/a", "t-1", "v-1"), Listed("acme/b", "t-1", "v-2"), Listed("zoo/same", "t-2", "v-1")],
        [FirstToken(1.0, "t-1", 0.25)],
        cluster,
    )


def test_tenant_sees_its_own_figures() -> None:
    seen = seen_by(ACME, sample())
    assert (seen["requests_per_s"], seen["tokens_per_s"], seen["ttft_p95_s"]) == (2.0, 30.0, 0.25)
    assert (seen["num_models"], seen["num_awake"]) == (2, 1)
    assert seen["demand"] == {"acme/a": [5, 0], "acme/b": [0, 2]}
    assert [(each["models"], each["phases"]) for each in seen["instances"]] == [(["acme/a"], [["hold", 1, 3]])]
    assert [(each["models"], each["verified"]) for each in seen["relays"]] == [(["acme/b"], 0.5)]


def test_tenant_with_equal_upload_sees_its_own_name_and_nothing_of_the_other() -> None:
    seen = seen_by(ZOO, sample())
    assert (seen["num_models"], seen["num_awake"], seen["num_running"], seen["relays"]) == (1, 1, 0, [])
    assert [each["models"] for each in seen["instances"]] == [["zoo/same"]]
    assert "acme" not in json.dumps(seen)


def test_nothing_is_seen_without_models_or_a_scheduler() -> None:
    seen = seen_by(OTHER, sample())
    assert (seen["num_models"], seen["instances"], seen["demand"], seen["relays"]) == (0, [], {}, [])
    assert (seen["requests_per_s"], seen["ttft_p50_s"]) == (0, None)
    seen = seen_by(ACME, Sample(models=[Listed("acme/a", "t-1", "v-1")]))
    assert (seen["num_models"], seen["num_awake"]) == (1, 0)


def test_only_an_admin_sees_hosts_and_workers() -> None:
    for tenant in (ACME, ZOO, OTHER):
        text = json.dumps(seen_by(tenant, sample()))
        assert "host-1" not in text
        assert "w-1" not in text and "w-2" not in text
    hosts = {host["id"]: host for host in seen_by(ADMIN, sample())["hosts"]}
    first = hosts["host-1"]
    assert first["memory"] == [{"models": ["acme/a", "zoo/same"], "verified": 0.25, "pack_bytes": 0, "num_pins": 0}]
    assert [(slot["state"], slot["kv_used"], slot["num_running"]) for slot in first["slots"]] == [("ready", 0.25, 5)]
    assert first["slots"][0]["models"] == ["acme/a", "zoo/same"]
    seen = seen_by(ADMIN, sample())
    assert (seen["num_models"], seen["num_awake"]) == (3, 2)
    (instance,) = seen["instances"]
    assert (instance["models"], instance["moves"]) == (["acme/a", "zoo/same"], [["w-2", 3, 1.5]])
    assert [slot["worker"] for slot in hosts["host-2"]["slots"]] == ["w-2"]


def test_tenant_sees_alerts_of_its_models_and_of_the_platform() -> None:
    alerts = [
        Alert(
            "workers", "There is no worker of host-1.", "Start host-1.", is_critical=True, public="There is no worker."
        ),
        Alert("load", "w-1 failed", "Look at w-1."),
        Alert("wait", "Requests wait.", "Add host-1.", models=("acme/b",), public="Requests wait."),
    ]
    seen = {caller.tenant: seen_by(caller, replace(sample(), alerts=alerts))["alerts"] for caller in (ACME, ZOO, ADMIN)}
    of_all = {"text": "There is no worker.", "advice": "", "models": [], "is_critical": True}
    own = {"text": "Requests wait.", "advice": "", "models": ["acme/b"], "is_critical": False}
    assert seen["acme"] == [of_all, own]
    assert seen["zoo"] == [of_all]
    assert [(each["text"], each["advice"]) for each in seen[""]] == [(each.text, each.advice) for each in alerts]


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


def test_alerts_of_a_silent_scheduler_and_of_absent_or_leaving_workers() -> None:
    leaving = reports_pb2.WorkerReport(worker_id="w-1", host_id="host-1", is_leaving=True)
    assert of(view()) == {}
    assert of(None)["scheduler"].text == "The scheduler does not answer."  # before its health does
    assert of(scheduler_pb2.ClusterView()).keys() == {"workers"}
    assert of(scheduler_pb2.ClusterView(workers=[leaving])).keys() == {"workers"}
    assert of(scheduler_pb2.ClusterView(workers=[WORKER])).keys() == {"store host-1"}


def test_models_that_cannot_load() -> None:
    slot = reports_pb2.SlotState(state=reports_pb2.SlotState.STATE_FREE, model="acme/a", error="out of memory")
    failed = reports_pb2.WorkerReport(worker_id="w-2", host_id="host-1", slot=slot)
    load = of(view(workers=[failed]))["load w-2"]
    assert ("w-2 failed: out of memory" in load.text, load.models, load.public) == (True, ("acme/a",), "")
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


def test_files_are_small_and_their_policy_allows_files_of_the_gateway_only() -> None:
    assert sum(len(file.body) for file in static_files().values()) <= 250_000
    for path, file in static_files().items():
        policy = file.headers["content-security-policy"]
        assert "default-src 'none'" in policy, path
        assert "unsafe" not in policy, path
        assert "http" not in policy, path


def test_page_has_no_inline_code_and_modules_import_existing_files() -> None:
    page = bytes(static_files()["/console"].body).decode()
    assert re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", page) is None
    imported = re.findall(r'(?:src|href)="(/[^"]+)"', page)
    for path, file in static_files().items():
        if path.endswith(".js"):
            imported += re.findall(r'from "([^"]+)"', bytes(file.body).decode())
    assert set(imported) <= static_files().keys()
