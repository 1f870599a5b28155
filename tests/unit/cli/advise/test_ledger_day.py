"""The day of a live platform, from rows as its API has them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.unit.cli.fake_gateway import MODEL
from torchrelay.cli.advise.ledger_day import hours_since_oldest, ledger_day
from torchrelay.cli.errors import CliError
from torchrelay.control.v1.reports_pb2 import (
    LatencyModel,
    NicCounters,
    PackCopy,
    SlotState,
    StepCost,
    StoreReport,
    WorkerReport,
)
from torchrelay.control.v1.scheduler_pb2 import ClusterView, MinimumView, VersionView
from torchrelay.control.v1.types_pb2 import Phase
from torchrelay.sim.advice.changes import changes_of
from torchrelay.sim.scenario import Request

LATENCY = LatencyModel(
    prefill=StepCost(base_s=0.01, per_position_s=1e-4, num_steps=50),
    decode=StepCost(base_s=0.02, per_position_s=1e-4, num_steps=50),
    token_budget=512,
)
LOADED = SlotState(
    state=SlotState.STATE_READY,
    pack_id="pack-tiny",
    num_layers=2,
    load_phases=[
        Phase(name="map", begin_unix_us=0, end_unix_us=200_000),
        Phase(name="last_layer", begin_unix_us=200_000, end_unix_us=500_000),
    ],
)
VIEW = ClusterView(
    workers=[
        WorkerReport(worker_id="w0", host_id="h0", slot=LOADED, kv_pool_bytes=1 << 20),
        WorkerReport(worker_id="w1", host_id="h0", kv_pool_bytes=1 << 20),
    ],
    stores=[
        StoreReport(
            store_id="s0",
            host_id="h0",
            arena_target_bytes=1 << 30,
            nic=NicCounters(link_bytes_per_s=125e6),
            copies=[
                PackCopy(
                    pack_id="pack-tiny",
                    pack_bytes=1_500_000,
                    source="remote",
                    relay_begin_unix_us=1_000_000,
                    relay_first_unix_us=1_010_000,
                    relay_end_unix_us=1_500_000,
                )
            ],
        )
    ],
    versions=[
        VersionView(version_id="v1", pack_id="pack-tiny", models=["acme/tiny"], latency=LATENCY),
        VersionView(version_id="v2", pack_id="pack-cold", models=["acme/cold"]),
    ],
)
MODELS = [MODEL | {"min_instances": 1, "idle_timeout_s": 5.0}, MODEL | {"id": "acme/cold"}]
BEGIN_US = 1_790_000_000_000_000


def row(name: str, at_s: float, took_s: float = 2.0, model: str = "acme/tiny", **changes: Any) -> dict[str, Any]:
    opened_us = BEGIN_US + round(at_s * 1e6)
    ended = {"opened_unix_us": opened_us, "ended_unix_us": opened_us + round(took_s * 1e6)}
    tokens = {"prompt_tokens": 100, "completion_tokens": 40, "causes": ["stop"]}
    return {"id": name, "model": model, "status": "ok", **tokens, **ended, **changes}


def test_requests_models_and_cluster_become_a_workload() -> None:
    rows = [
        row("b", 8.5, causes=["stop", "stop"]),
        row("a", 0.0, took_s=3.0),
        row("c", 9.0, model="acme/cold"),
        row("d", 9.5, status="error"),
    ]
    day = ledger_day(rows, VIEW, MODELS, 24.0)
    load = day.workload
    assert load.requests == [Request("a", 0.0, "acme/tiny", 100, 40), Request("b", 8.5, "acme/tiny", 100, 20)]
    (model,) = load.models
    assert (model.name, model.num_devices, model.pack_bytes, model.num_layers) == ("acme/tiny", 1, 1_500_000, 2)
    assert (model.min_instances, model.idle_timeout_s, model.max_instances) == (1, 5.0, 2)
    assert model.latency.decode.base_s == pytest.approx(0.02) and model.prefill_tokens_per_s == pytest.approx(1e4)
    fleet = load.fleet
    assert (fleet.num_hosts, fleet.groups, fleet.arena_bytes) == (1, (1, 1), 1 << 30)
    assert (fleet.nic_bytes_per_s, fleet.disk_bytes_per_s, fleet.device_bytes_per_s) == (125e6, 3e6, 3e6)
    assert day.measured.durations_s == {"a": 3.0, "b": 2.0}
    assert any("acme/cold" in note for note in day.notes)
    assert load.requests_per_day == 2 and not load.quantized
    int8 = [MODELS[0] | {"dtype": "I8"}]
    assert ledger_day(rows, VIEW, int8, 24.0).workload.quantized == {"acme/tiny"}


def test_minimums_are_those_in_force_and_only_known_settings_are_changed() -> None:
    view = ClusterView.FromString(VIEW.SerializeToString())
    view.minimums.append(MinimumView(model="acme/tiny", num_instances=2))
    models = [MODELS[0] | {"idle_timeout_s": 0, "effective_idle_timeout_s": None}]
    scheduled, constant = (ledger_day([row("a", 0.0)], each, models, 24.0).workload for each in (view, VIEW))
    assert (scheduled.models[0].min_instances, constant.models[0].min_instances) == (2, 1)
    titles = [[change.title for change in changes_of(each, {})] for each in (scheduled, constant)]
    assert "no minimum for acme/tiny" not in titles[0] and "no minimum for acme/tiny" in titles[1]
    assert not any("idle" in title for title in titles[0] + titles[1])
    fixed = [models[0] | {"effective_idle_timeout_s": 30.0}]
    assert "longer idle timeouts" in [
        change.title for change in changes_of(ledger_day([row("a", 0.0)], view, fixed, 24.0).workload, {})
    ]


def test_hosts_that_differ_make_the_advice_weak() -> None:
    assert not ledger_day([row("a", 0.0)], VIEW, MODELS, 24.0).weaknesses
    view = ClusterView.FromString(VIEW.SerializeToString())
    view.workers.append(WorkerReport(worker_id="w2", host_id="h1", kv_pool_bytes=1 << 20))
    (said,) = ledger_day([row("a", 0.0)], view, MODELS, 24.0).weaknesses
    assert said.startswith("hosts differ: simulated as 2 hosts with slots of 1 and 1 devices and ")
    alike = ClusterView.FromString(VIEW.SerializeToString())
    alike.stores.append(StoreReport(store_id="s1", host_id="h1", arena_target_bytes=1 << 31))
    assert ledger_day([row("a", 0.0)], alike, MODELS, 24.0).weaknesses


def test_rows_that_were_cut_off_span_the_time_since_the_oldest_ended() -> None:
    now = datetime.fromtimestamp(BEGIN_US / 1e6 + 7200.0, UTC)
    assert hours_since_oldest([row("b", 3598.0), row("a", 1798.0)], now) == pytest.approx(1.5)


def test_day_without_requests_or_latencies_is_refused() -> None:
    with pytest.raises(CliError, match="no request ended in the last 24 hours"):
        ledger_day([], VIEW, MODELS, 24.0)
    with pytest.raises(CliError, match="how long the steps of acme/cold take"):
        ledger_day([row("c", 9.0, model="acme/cold")], VIEW, MODELS, 24.0)
