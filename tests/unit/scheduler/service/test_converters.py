"""Messages of gateways and stores as the policy sees them."""

from __future__ import annotations

from typing import Any

from tests.unit.scheduler.service.scripted_cluster import a_request, a_version
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.scheduler.policy.types import Admission, LatencyTargets, ServiceClass, SlotClass
from torchrelay.scheduler.service.converters import (
    admission_from_proto,
    model_from_proto,
    store_from_proto,
    worker_from_proto,
)


def admission(**fields: Any) -> Admission:
    return admission_from_proto(a_request("r1", **fields), "gateway-1", now=100.0)


def test_admission_has_service_class_of_request() -> None:
    given = admission(service_class=scheduler_pb2.SERVICE_CLASS_BATCH)
    assert given.service_class is ServiceClass.BATCH
    assert admission().service_class is ServiceClass.STANDARD


def test_retried_request_keeps_its_arrival() -> None:
    """After its worker's death it had a new deadline and the last place."""
    first, again = admission(), admission(attempt=2, age_ms=7500)
    assert again.admitted_at == first.admitted_at == 100.0
    assert again.deadline == first.deadline - 7.5


def test_admission_has_targets_of_model() -> None:
    version = a_version()
    assert model_from_proto(version).targets == LatencyTargets()
    version.targets.CopyFrom(types_pb2.LatencyTargets(interactive_ttft_s=0.2, standard_ttft_s=0.5, tbt_target_s=0.05))
    assert model_from_proto(version).targets == LatencyTargets(0.2, 0.5, 0.0, 0.05)


def test_model_has_slots_of_version() -> None:
    version = a_version()
    assert model_from_proto(version).slot_class == SlotClass(1, "")
    version.scaling.engine, version.scaling.num_devices = "vllm", 2
    assert model_from_proto(version).slot_class == SlotClass(2, "vllm")


def test_service_class_numbers_match_protocol() -> None:
    assert {f"SERVICE_CLASS_{ServiceClas.name}": ServiceClas.value for ServiceClas in ServiceClass} == dict(
        scheduler_pb2.ServiceClass.items()
    )


def test_unknown_service_class_is_standard() -> None:
    assert admission(service_class=99).service_class is ServiceClass.STANDARD


def test_worker_report_tells_what_the_engine_can() -> None:
    report = reports_pb2.WorkerReport(worker_id="w1")
    worker = worker_from_proto(report, 1.0)  # of an earlier release
    assert worker.hands_over and worker.computes_by_layer
    assert (worker.engine, worker.num_devices) == ("torchrelay", 1)
    report.capabilities.CopyFrom(reports_pb2.EngineCapabilities(engine="vllm"))
    report.num_devices = 2
    worker = worker_from_proto(report, 1.0)
    assert not worker.hands_over and not worker.computes_by_layer
    assert (worker.engine, worker.num_devices) == ("vllm", 2)
    report.capabilities.kv_handover = report.capabilities.layer_spans = True
    worker = worker_from_proto(report, 1.0)
    assert worker.hands_over and worker.computes_by_layer


def test_store_report_without_disk_keeps_disk_packs() -> None:
    report = reports_pb2.StoreReport(store_id="s1")
    assert store_from_proto(report, 1.0).disk_pack_ids is None
    report.disk.SetInParent()
    assert store_from_proto(report, 1.0).disk_pack_ids == frozenset()
    report.disk.pack_ids.extend(["p", "q"])
    assert store_from_proto(report, 1.0).disk_pack_ids == frozenset({"p", "q"})
