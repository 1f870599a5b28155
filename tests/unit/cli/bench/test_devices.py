"""Devices and computed tokens from views of the cluster."""

from __future__ import annotations

from torchrelay.cli.bench.devices import DeviceSample, computed_tokens, device_seconds, sample_of
from torchrelay.control.v1.reports_pb2 import SlotState, WorkerReport
from torchrelay.control.v1.scheduler_pb2 import ClusterView


def worker(name: str, version: str, num_devices: int, prefilled: int, decoded: int) -> WorkerReport:
    slot = SlotState(instance_id="inst" if version else "", version_id=version)
    return WorkerReport(
        incarnation=name,
        slot=slot,
        num_devices=num_devices,
        num_positions_prefilled=prefilled,
        num_positions_decoded=decoded,
    )


def test_sample_counts_the_devices_of_the_version() -> None:
    workers = [
        worker("a", "v1", 2, 10, 5),
        worker("b", "v1", 0, 1, 0),
        worker("c", "v2", 4, 0, 0),
        worker("d", "", 1, 3, 0),
    ]
    sample = sample_of(ClusterView(workers=workers), "v1", 1.5)
    assert (sample.at_s, sample.num_devices, sample.holders) == (1.5, 3, frozenset({"a", "b"}))
    assert sample.num_computed == {"a": 15, "b": 1, "c": 0, "d": 3}


def test_device_seconds_end_with_the_load() -> None:
    samples = [DeviceSample(at, number, {}, frozenset()) for at, number in ((0.0, 0), (1.0, 2), (2.0, 2), (4.0, 2))]
    assert device_seconds(samples, 10.0) == 1 + 2 + 4
    assert device_seconds(samples, 3.0) == 1 + 2 + 2
    assert device_seconds(samples, 0.5) == 0.5
    assert device_seconds(samples[:1], 1.0) == 0


def test_tokens_count_while_a_worker_holds_the_version() -> None:
    samples = [
        DeviceSample(0.0, 0, {"a": 100, "b": 7}, frozenset()),
        DeviceSample(0.5, 1, {"a": 110, "b": 8}, frozenset({"a"})),
        DeviceSample(1.0, 1, {"a": 130, "b": 9}, frozenset({"a"})),
        DeviceSample(1.5, 1, {"b": 10, "c": 5}, frozenset({"c"})),  # a began again as c
        DeviceSample(2.0, 0, {"b": 11, "c": 6}, frozenset()),
    ]
    assert computed_tokens(samples) == 30 + 5 + 1


def test_tokens_of_a_worker_that_a_view_lacks_count_once() -> None:
    held = frozenset({"a"})
    samples = [
        DeviceSample(0.0, 1, {"a": 1000}, held),
        DeviceSample(0.5, 0, {}, frozenset()),
        DeviceSample(1.0, 1, {"a": 1020}, held),
    ]
    assert computed_tokens(samples) == 20
    assert computed_tokens([]) == 0
