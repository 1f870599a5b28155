"""The metrics that a store exports to Prometheus."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from prometheus_client.parser import text_string_to_metric_families

from tests.support.callers import every_token
from tests.support.wait import eventually
from tests.unit.param_store.holders import damage
from tests.unit.param_store.model_folders import LARGER, write_folder
from tests.unit.param_store.running_store import CLUSTER_KEY, REMOTE, is_complete, publish, running_store
from tests.unit.param_store.test_main import store_process
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.param_store import main
from torchrelay.param_store.background_tasks import fill_disk_cache
from torchrelay.param_store.metrics import export_metrics
from torchrelay.param_store.store import Store


def label_of(labels: Mapping[str, str]) -> str:
    return labels.get("source") or labels.get("tier") or ""


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


async def test_store_process_serves_metrics_to_prometheus(
    tmp_path: Path, nats_url: str, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack, version = published
    store_id = new_id("sto")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with store_process(tmp_path, store_id, nats_url, "--metrics-port", str(port)):
        address = json.loads((tmp_path / "ready.json").read_text())["grpc"]
        async with open_channel(address, token=every_token(CLUSTER_KEY, store_id)) as channel:
            stub = ParamStoreStub(channel)
            await stub.Relay(pb.RelayRequest(pack_id=pack.name, sources=[REMOTE]))
            async for report in stub.WatchCopies(pb.WatchCopiesRequest()):
                if is_complete(report.copies[0], pack.name):
                    break
        page = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        )
    values = {
        (
            sample.name.removeprefix("torchrelay_param_store_"),
            sample.labels.get("source", sample.labels.get("tier", "")),
        ): (sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert values["bytes_received_total", "remote"] == values["pack_bytes", "arena"] == version.pack_bytes
    assert values["packs", "arena"] == 1
    for name, label in [
        ("bytes_received", "peer"),
        ("bytes_sent", ""),
        ("evictions", "arena"),
        ("damaged_chunks", "remote"),
    ]:
        assert values[f"{name}_total", label] == 0
    assert values["streams", ""] == 0


async def test_metrics_count_peers_evictions_and_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[InMemoryMetricReader] = []

    def export(store: Store) -> None:
        readers.append(InMemoryMetricReader())
        export_metrics(store, MeterProvider(metric_readers=readers[-1:]).get_meter("test"))

    monkeypatch.setattr(main, "export_metrics", export)
    async with running_store(tmp_path, (), data_dir=tmp_path / "holder") as holder:
        first, second = [
            (await publish(holder, write_folder(tmp_path / f"model-{seed}", LARGER, seed=seed))) for seed in range(2)
        ]
        await holder.relay(first.pack_id, REMOTE)
        await holder.until_complete(first.pack_id)
        limits = {"arena_bytes": first.pack_bytes + (2 << 20), "disk_cache_bytes": 64 << 20}
        async with running_store(tmp_path, (fill_disk_cache,), **limits) as store:
            await store.relay(first.pack_id, holder.source(first.pack_id, store))
            await store.until_complete(first.pack_id)
            await store.relay(second.pack_id, REMOTE)
            await store.until_complete(second.pack_id)
            await eventually(lambda: values_of(readers[1])["packs", "disk"] == 1)
            assert values_of(readers[1])["evictions", "arena"] == 1
            damage(store.settings.disk_cache_folder / second.pack_id, 0)
            await store.relay(first.pack_id, REMOTE)
            await store.until_complete(first.pack_id)
            await store.relay(second.pack_id, REMOTE)
            await store.until_complete(second.pack_id)
            values = values_of(readers[1])
    assert values["bytes_received", "peer"] == values_of(readers[0])["bytes_sent", ""] == first.pack_bytes
    assert values["damaged_chunks", "disk"] == 1
    assert values["damaged_chunks", "remote"] == values["damaged_chunks", "peer"] == 0
    assert values["packs", "arena"] == 1 and values["pack_bytes", "arena"] == second.pack_bytes
    assert values["evictions", "arena"] == 3
