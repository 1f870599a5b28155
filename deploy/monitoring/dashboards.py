"""Writes the Grafana dashboards of this folder, which Grafana imports: `python deploy/monitoring/dashboards.py`.

A dashboard is a table of panels: title, unit, and the expressions with their legends. Each has the variables
`datasource` and, where a model can be chosen, `model`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "grafana"
PANELS_PER_ROW = 3
WIDTH, HEIGHT = 24 // PANELS_PER_ROW, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """``queries``: expressions by legend."""

    title: str
    unit: str
    queries: dict[str, str]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """``models``: the expression whose label names the models to choose from; None: there is no choice."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    models: tuple[str, str] | None = None


def quantile(share: float, histogram: str, by: str, only: str) -> str:
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({histogram}_bucket{{{only}}}{_RATE})))"


_GEN_AI = 'gen_ai_request_model=~"$model"'
_MODEL = 'model=~"$model"'
_TARGET = "torchrelay_scheduler_target_requests_total"
_WASTED = "torchrelay_gateway_wasted_tokens_total"
_SERVED = f"rate(torchrelay_gateway_tokens_total{{{_MODEL}"
_COMPUTED = f'(sum({_SERVED}, kind=~"prompt|output"}}{_RATE})) - sum({_SERVED}, kind="cached"}}{_RATE})))'


def _sum_or_0(metric: str, only: str) -> str:
    return f"(sum(rate({metric}{{{only}}}{_RATE})) or vector(0))"


_WASTED_HERE = _sum_or_0(_WASTED, f'{_MODEL}, cause="cancelled"')
_COMPUTED_AGAIN = " + ".join(
    (
        _sum_or_0(_WASTED, f'{_MODEL}, cause!="cancelled"'),
        _sum_or_0("torchrelay_worker_recomputed_positions_total", _MODEL),
    )
)


def _attainment(by: str) -> str:
    met = f'sum by ({by}) (rate({_TARGET}{{result="met", {_MODEL}}}{_RATE}))'
    return f"{met} / (sum by ({by}) (rate({_TARGET}{{{_MODEL}}}{_RATE})) > 0)"


REQUESTS = Dashboard(
    "torchrelay-requests",
    "Torchrelay: requests",
    (
        Panel(
            "Requests by outcome",
            "reqps",
            {"{{outcome}}": f"sum by (outcome) (rate(torchrelay_gateway_requests_total{{{_MODEL}}}{_RATE}))"},
        ),
        Panel(
            "Time to first token",
            "s",
            {
                f"P{round(share * 100)} {{{{gen_ai_request_model}}}}": quantile(
                    share, "gen_ai_server_time_to_first_token_seconds", "gen_ai_request_model", _GEN_AI
                )
                for share in (0.5, 0.95)
            },
        ),
        Panel(
            "Time per output token",
            "s",
            {
                f"P{round(share * 100)} {{{{gen_ai_request_model}}}}": quantile(
                    share, "gen_ai_server_time_per_output_token_seconds", "gen_ai_request_model", _GEN_AI
                )
                for share in (0.5, 0.95)
            },
            "Means of requests.",
        ),
        Panel(
            "Share of requests within their targets",
            "percentunit",
            {"{{model}}": _attainment("model")},
            "Time to first token and mean time between tokens, both. Refused requests missed them.",
        ),
        Panel(
            "The same by class",
            "percentunit",
            {"{{service_class}}": _attainment("service_class")},
            "Refused requests have no class.",
        ),
        Panel(
            "Goodput",
            "reqps",
            {"{{model}} {{result}}": f"sum by (model, result) (rate({_TARGET}{{{_MODEL}}}{_RATE}))"},
            "met: within both targets; late: the first token; slow: the others; refused.",
        ),
        Panel(
            "Token goodput",
            "percentunit",
            {"all models": f"({_COMPUTED} - {_WASTED_HERE}) / ({_COMPUTED} + {_COMPUTED_AGAIN} > 0)"},
            "Tokens that reached callers, of those that were computed: prompts without cached ones, and answers.",
        ),
        Panel(
            "Tokens computed in vain",
            "short",
            {
                **{cause: _sum_or_0(_WASTED, f'{_MODEL}, cause="{cause}"') for cause in ("lost", "moved", "cancelled")},
                "preempted": _sum_or_0("torchrelay_worker_recomputed_positions_total", _MODEL),
            },
            "Per second. lost, moved: computed again after a worker was lost, or its slot; cancelled: not delivered.",
        ),
        Panel(
            "Duration of requests",
            "s",
            {
                "P95 {{gen_ai_operation_name}}": quantile(
                    0.95, "gen_ai_server_request_duration_seconds", "gen_ai_operation_name", f'{_GEN_AI}, error_type=""'
                )
            },
        ),
        Panel(
            "Tokens",
            "short",
            {"{{kind}}": f"sum by (kind) (rate(torchrelay_gateway_tokens_total{{{_MODEL}}}{_RATE}))"},
            "Per second; prompt includes cached.",
        ),
        Panel(
            "Waiting and running",
            "short",
            {
                "waiting {{model}}": f"sum by (model) (torchrelay_scheduler_requests_waiting{{{_MODEL}}})",
                "running {{model}}": f"sum by (model) (torchrelay_worker_requests_running{{{_MODEL}}})",
            },
            "Attempts: a request runs on a prefill and a decode worker, and counts on both.",
        ),
        Panel(
            "Queue wait, P95",
            "s",
            {
                "{{model}} {{cold}}": quantile(0.95, "torchrelay_scheduler_queue_wait_seconds", "model, cold", _MODEL),
            },
            "cold: placed on an instance that was still loading.",
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            {"{{model}}": f"max by (model) (torchrelay_worker_kv_cache_usage{{{_MODEL}}})"},
        ),
        Panel(
            "Error of predictions, P95",
            "s",
            {
                "first token": quantile(0.95, "torchrelay_scheduler_ttft_prediction_error_seconds", "cold", ""),
                "between tokens": quantile(0.95, "torchrelay_scheduler_tbt_prediction_error_seconds", "cold", ""),
            },
        ),
    ),
    ("gen_ai_server_request_duration_seconds_count", "gen_ai_request_model"),
)

RELAYS = Dashboard(
    "torchrelay-relays",
    "Torchrelay: relays and scaling",
    (
        Panel(
            "Slots",
            "short",
            {"{{kind}}, {{num_devices}} devices": "sum by (num_devices, kind) (torchrelay_scheduler_pool_slots)"},
            "want: with pool_mode advise or follow.",
        ),
        Panel(
            "Instances",
            "short",
            {"{{model}} {{phase}}": "sum by (model, phase) (torchrelay_scheduler_instances)"},
        ),
        Panel(
            "Placements",
            "short",
            {
                "cold={{cold}}": f"sum by (cold) (rate(torchrelay_scheduler_queue_wait_seconds_count{_RATE}))",
            },
            "Per second; cold: on an instance that was still loading.",
        ),
        Panel(
            "Relays running",
            "short",
            {
                "relays": "sum(torchrelay_scheduler_relays_running)",
                "copies": "sum(torchrelay_scheduler_copies_running)",
                "packs without enough copies": "sum(torchrelay_scheduler_packs_under_replicated)",
            },
        ),
        Panel(
            "Relay events",
            "short",
            {"{{event}}": f"sum by (event) (rate(torchrelay_scheduler_relay_events_total{_RATE}))"},
        ),
        Panel(
            "Duration of relays, P95",
            "s",
            {"{{event}}": quantile(0.95, "torchrelay_scheduler_relay_duration_seconds", "event", "")},
        ),
        Panel(
            "Bytes received",
            "Bps",
            {
                "{{instance}} from {{source}}": "sum by (instance, source) "
                f"(rate(torchrelay_param_store_bytes_received_total{_RATE}))"
            },
        ),
        Panel(
            "Bytes sent",
            "Bps",
            {"{{instance}}": f"sum by (instance) (rate(torchrelay_param_store_bytes_sent_total{_RATE}))"},
        ),
        Panel(
            "Packs held",
            "bytes",
            {"{{instance}} {{tier}}": "sum by (instance, tier) (torchrelay_param_store_pack_bytes)"},
        ),
        Panel(
            "Evictions and damaged chunks",
            "short",
            {
                "evicted from {{tier}}": "sum by (tier) (increase(torchrelay_param_store_evictions_total[1h]))",
                "damaged": "sum(increase(torchrelay_param_store_damaged_chunks_total[1h])) or vector(0)",
            },
            "In an hour.",
        ),
        Panel(
            "Engine time by activity",
            "percentunit",
            {
                "{{activity}}": f"sum by (activity) (rate(torchrelay_worker_engine_time_seconds_total{_RATE})) / "
                f"ignoring(activity) group_left sum(rate(torchrelay_worker_engine_time_seconds_total{_RATE}) > 0)"
            },
        ),
        Panel(
            "Scaling stall",
            "percentunit",
            {"{{model}}": f"sum by (model) (rate(torchrelay_scheduler_stall_seconds_total{_RATE}))"},
            "Share of the time in which requests waited for a load, since no instance of the model was loaded.",
        ),
        Panel(
            "Where weights were at a load",
            "short",
            {"{{tier}}": f"sum by (tier) (rate(torchrelay_scheduler_loads_total{_RATE}))"},
            "Per second. host: in the memory of the worker's host; filling: on the way there; peer: in another host's.",
        ),
        Panel(
            "Hits by tier",
            "percentunit",
            {
                "device": f'sum(rate(torchrelay_scheduler_queue_wait_seconds_count{{cold="false"}}{_RATE})) / '
                f"(sum(rate(torchrelay_scheduler_queue_wait_seconds_count{_RATE})) > 0)",
                "{{tier}}": f"sum by (tier) (rate(torchrelay_scheduler_loads_total{_RATE})) / ignoring (tier) "
                f"group_left sum(rate(torchrelay_scheduler_loads_total{_RATE}))",
            },
            "device: of placements, those on a loaded instance; the tiers: of loads, those that began there.",
        ),
        Panel(
            "Bottleneck",
            "short",
            {"{{model}} {{bottleneck}}": "sum by (model, bottleneck) (torchrelay_worker_bottleneck)"},
            "Instances by what holds them back; docs/profile.md says what to do.",
        ),
    ),
)

_BILLED = "torchrelay_gateway_billed_dollars_total"
_TOKENS = "torchrelay_gateway_tokens_total"

MONEY = Dashboard(
    "torchrelay-money",
    "Torchrelay: money",
    (
        Panel(
            "Billed by model",
            "currencyUSD",
            {"{{model}}": f"sum by (model) (rate({_BILLED}{{{_MODEL}}}{_RATE})) * 3600"},
            "Dollars an hour. The ledger has the exact amounts; these start at 0 with each gateway.",
        ),
        Panel(
            "Billed by tenant",
            "currencyUSD",
            {
                "{{tenant}}": f'sum by (tenant) (label_replace(rate({_BILLED}{{{_MODEL}}}{_RATE}), "tenant", "$1", '
                '"model", "([^/]*)/.*")) * 3600'
            },
            "Dollars an hour, by the models' tenants.",
        ),
        Panel("Billed in a day", "currencyUSD", {"all models": f"sum(increase({_BILLED}{{{_MODEL}}}[24h]))"}),
        Panel(
            "Dollars per million tokens",
            "currencyUSD",
            {
                "{{model}}": f"1e6 * sum by (model) (rate({_BILLED}{{{_MODEL}}}{_RATE})) / (sum by (model) "
                f'(rate({_TOKENS}{{{_MODEL}, kind=~"prompt|output"}}{_RATE})) > 0)'
            },
        ),
        Panel(
            "Billed per hour of a slot",
            "currencyUSD",
            {
                "{{model}}": f"sum by (model) (rate({_BILLED}{{{_MODEL}}}[1h])) * 3600 / "
                f"sum by (model) (avg_over_time(torchrelay_scheduler_instances{{{_MODEL}}}[1h]))"
            },
            "Compare it with the price of the machine. Mean of the last hour.",
        ),
        Panel(
            "Slots held",
            "short",
            {"{{model}}": f"sum by (model) (torchrelay_scheduler_instances{{{_MODEL}}})"},
        ),
        Panel(
            "Cached share of prompts",
            "percentunit",
            {
                "{{model}}": f'sum by (model) (rate({_TOKENS}{{{_MODEL}, kind="cached"}}{_RATE})) / '
                f'(sum by (model) (rate({_TOKENS}{{{_MODEL}, kind="prompt"}}{_RATE})) > 0)'
            },
        ),
        Panel(
            "Tokens per request, P95",
            "short",
            {
                "{{gen_ai_token_type}}": quantile(0.95, "gen_ai_client_token_usage", "gen_ai_token_type", _GEN_AI),
            },
        ),
        Panel("Ledger writes not committed", "short", {"writes": "sum(torchrelay_gateway_ledger_writes_pending)"}),
    ),
    (_BILLED, "model"),
)

_GPU_SOURCES = "From NVIDIA's DCGM exporter, else from the workers, by the rules of this folder."

GPUS = Dashboard(
    "torchrelay-gpus",
    "Torchrelay: GPUs",
    (
        Panel("Utilization", "percentunit", {"{{host}}": "torchrelay:gpu_utilization:ratio"}, _GPU_SOURCES),
        Panel("Tensor cores at work", "percentunit", {"{{host}}": "torchrelay:gpu_tensor_active:ratio"}, _GPU_SOURCES),
        Panel("Memory used", "bytes", {"{{host}}": "torchrelay:gpu_memory_used:bytes"}, _GPU_SOURCES),
        Panel(
            "Memory moving data",
            "percentunit",
            {"{{host}}": "torchrelay:gpu_dram_active:ratio"},
            f"Decode steps are bound by it where it is near 1. {_GPU_SOURCES}",
        ),
        Panel("Occupancy of SMs", "percentunit", {"{{host}}": "torchrelay:gpu_sm_occupancy:ratio"}, _GPU_SOURCES),
        Panel("Power", "watt", {"{{host}}": "torchrelay:gpu_power:watts"}, _GPU_SOURCES),
        Panel(
            "Energy per million positions",
            "joule",
            {"{{host}}": "1e6 * torchrelay:joules_per_position"},
            f"A position is a token that ran through the model. {_GPU_SOURCES}",
        ),
    ),
)

DASHBOARDS = {"requests.json": REQUESTS, "relays.json": RELAYS, "money.json": MONEY, "gpus.json": GPUS}


def to_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard in Grafana's format."""
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    ]
    if dashboard.models is not None:
        query = "label_values({}, {})".format(*dashboard.models)
        variables.append(
            {
                "name": "model",
                "label": "Model",
                "type": "query",
                "datasource": _SOURCE,
                "query": {"query": query, "refId": "models"},
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": ["All"], "value": ["$__all"]},
            }
        )
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["torchrelay"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, PANELS_PER_ROW)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "noValue": "no data"}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def to_json(dashboard: Dashboard) -> str:
    return json.dumps(to_grafana(dashboard), indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / name).write_text(to_json(dashboard))
