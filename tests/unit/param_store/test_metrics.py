"""The metrics that a store exports to Prometheus, and the counters of network interfaces that it reports."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from prometheus_client.parser import text_string_to_metric_families

from tests.support.wait import eventually
from tests.unit.param_store.holders import damage
from tests.unit.param_store.model_folders import StoredPack, put_pack
from tests.unit.param_store.running_store import running_store
from tests.unit.param_store.test_main import fetch_in_process, store_process
from torchrelay.common.ids import new_id
from torchrelay.param_store import main
from torchrelay.param_store.background_tasks import fill_disk_cache
from torchrelay.param_store.metrics import export_metrics
from torchrelay.param_store.nic_counters import NicCounters, read_nic_counters
from torchrelay.param_store.store import Store


def values_of(reader: InMemoryMetricReader) -> dict[tuple[str, str], float]:
    """Each instrument's value by its short name and label."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        (metric.name.removeprefix("torchrelay_param_store_"), str(next(iter((point.attributes or {}).values()), ""))): (
            point.value
        )
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    }


async def test_store_process_serves_metrics_to_prometheus(tmp_path: Path, nats_url: str, pack: StoredPack) -> None:
    store_id = new_id("sto")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with store_process(tmp_path, store_id, nats_url, "--metrics-port", str(port)):
        await fetch_in_process(tmp_path, store_id, pack)
        page = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        )
    values: dict[tuple[str, str], float] = {}
    for sample in (sample for family in text_string_to_metric_families(page) for sample in family.samples):
        label = sample.labels.get("source") or sample.labels.get("tier") or ""
        values[sample.name.removeprefix("torchrelay_param_store_"), label] = sample.value
    assert values["bytes_received_total", "remote"] == values["pack_bytes", "arena"] == pack.num_bytes
    assert values["packs", "arena"] == 1
    assert values["bytes_received_total", "peer"] == values["bytes_sent_total", ""] == 0
    assert values["evictions_total", "arena"] == values["damaged_chunks_total", "remote"] == values["streams", ""] == 0


async def test_metrics_count_peers_evictions_and_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[InMemoryMetricReader] = []

    def export(store: Store) -> None:
        readers.append(InMemoryMetricReader())
        export_metrics(store, MeterProvider(metric_readers=readers[-1:]).get_meter("test"))

    monkeypatch.setattr(main, "export_metrics", export)
    async with running_store(tmp_path, (), data_dir=tmp_path / "holder") as holder:
        first, second = (put_pack(tmp_path, seed) for seed in range(2))
        await holder.fetch(first.pack_id)
        limits = {"arena_bytes": first.num_bytes + (2 << 20), "disk_cache_bytes": 64 << 20}
        async with running_store(tmp_path, (fill_disk_cache,), **limits) as store:
            await store.fetch(first.pack_id, holder.source(first.pack_id, store))
            await store.fetch(second.pack_id)
            await eventually(lambda: values_of(readers[1])["packs", "disk"] == 1)
            assert values_of(readers[1])["evictions", "arena"] == 1
            damage(store.settings.disk_cache_folder / second.pack_id, 0)
            await store.fetch(first.pack_id)
            await store.fetch(second.pack_id)
            values = values_of(readers[1])
    assert values["bytes_received", "peer"] == values_of(readers[0])["bytes_sent", ""] == first.num_bytes
    assert values["damaged_chunks", "disk"] == 1
    assert values["damaged_chunks", "remote"] == values["damaged_chunks", "peer"] == 0
    assert values["packs", "arena"] == 1 and values["pack_bytes", "arena"] == second.num_bytes
    assert values["evictions", "arena"] == 3


HEAD = "Inter-|   Receive  |  Transmit\n face |bytes    packets errs drop fifo |bytes    packets errs\n"


def counters(folder: Path, **rows: tuple[int, int]) -> Path:
    lines = [f"{name:>6}: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n" for name, (received, sent) in rows.items()]
    path = folder / "dev"
    path.write_text(HEAD + "".join(lines))
    return path


def a_device(folder: Path, name: str, speed: str, real: bool = True) -> None:
    (folder / name).mkdir()
    (folder / name / "speed").write_text(speed)
    if real:
        (folder / name / "device").mkdir()


def test_hardware_devices_summed_without_bridges(tmp_path: Path) -> None:
    a_device(tmp_path, "eth0", "10000\n")
    a_device(tmp_path, "eth1", "10000\n")
    a_device(tmp_path, "bond0", "20000\n", real=False)
    path = counters(tmp_path, lo=(7, 7), eth0=(100, 200), eth1=(1, 2), bond0=(101, 202))
    assert read_nic_counters(path, tmp_path) == NicCounters(202, 101, 2.5e9)


def test_devices_of_a_namespace_unknown_speeds_and_missing_counters(tmp_path: Path) -> None:
    assert read_nic_counters(tmp_path / "absent", tmp_path) is None
    assert read_nic_counters(counters(tmp_path, lo=(1, 2)), tmp_path) is None
    path = counters(tmp_path, lo=(7, 7), veth0=(100, 200))
    assert read_nic_counters(path, tmp_path) == NicCounters(200, 100), "virtual devices count where no other is"
    a_device(tmp_path, "eth0", "-1\n")
    assert read_nic_counters(counters(tmp_path, eth0=(1, 2)), tmp_path) == NicCounters(2, 1), "no known speed"


async def test_store_reports_nic_counters(tmp_path: Path) -> None:
    before = read_nic_counters()
    async with running_store(tmp_path) as store:
        report = await store.report()
    assert report.HasField("nic") == (before is not None)
    if before is not None:
        assert report.nic.bytes_received >= before.bytes_received
