"""`torchrelay sim`: what the scheduler, and other systems, would make of a trace on a cluster, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrelay.cli.api.access import JsonOption
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console

if TYPE_CHECKING:
    from torchrelay.sim.recorded_day import RecordedDay
    from torchrelay.sim.scenario import Fleet, Request, ServedModel
    from torchrelay.sim.summary import Prices, Summary

_RIVALS_IDLE_S = 60.0
EXAMPLE = "Example:  torchrelay sim --trace arrivals.csv --fleet a --slo 0.5,0.1 --policy ours --policy serverlessllm"
_FLEET_HELP = (
    "a: 4 hosts of 8 devices on NVLink; b: 2 hosts of 8 devices on PCIe; 100 Gbit/s between hosts. Or a JSON file with "
    "num_hosts, groups, nic_bytes_per_s, device_bytes_per_s, disk_bytes_per_s, arena_bytes."
)
_SLO_HELP = "Seconds to the first token and per further token, as in 0.5,0.1; without it, each model has its own."
_POLICY_HELP = "A system to simulate (ours), or all; may be given several times."

TraceOption = Annotated[
    Path | None,
    typer.Option(help="A CSV file with TIMESTAMP, ContextTokens, GeneratedTokens.", exists=True, dir_okay=False),
]
ReplayOption = Annotated[
    Path | None,
    typer.Option(
        help="Instead of a trace: a log of torchrelay-scheduler --record, with its models, cluster and requests.",
        exists=True,
        dir_okay=False,
    ),
]
FleetOption = Annotated[str, typer.Option(help=_FLEET_HELP, metavar="[a|b|FILE]")]
SloOption = Annotated[str, typer.Option(help=_SLO_HELP, metavar="TTFT,TPOT")]
PolicyOption = Annotated[list[str] | None, typer.Option(help=_POLICY_HELP, metavar="NAME")]
CopiesOption = Annotated[float, typer.Option(min=0.01, help="Mean number of requests per arrival of the trace.")]
ZipfOption = Annotated[float, typer.Option(min=0.0, help="Exponent of the twelve models' shares; 0: equal.")]
SecondsOption = Annotated[float, typer.Option(min=1.0, help="Simulated part of the trace, from its beginning.")]
SeedOption = Annotated[int, typer.Option(help="Seed for the models and the times of copied arrivals.")]
IdleOption = Annotated[
    float | None,
    typer.Option(
        "--idle-timeout-s",
        min=0.1,
        help="Idle timeout of models without their own. Without it, as recorded, or computed by ours and 60 of others.",
    ),
]
EachOption = Annotated[
    int, typer.Option("--requests-per-instance", min=1, help="Waiting requests that justify another instance.")
]
DevicePriceOption = Annotated[float, typer.Option(min=0.0, help="Price of a device per hour.")]
RamPriceOption = Annotated[float, typer.Option(min=0.0, help="Price per hour of a GB of RAM that holds weights.")]
PlotsOption = Annotated[
    Path | None,
    typer.Option(help="A PNG file for instances, queue and time to first token over time; needs matplotlib."),
]


def sim(
    trace: TraceOption = None,
    replay: ReplayOption = None,
    fleet: FleetOption = "a",
    slo: SloOption = "",
    policy: PolicyOption = None,
    copies: CopiesOption = 1.0,
    zipf: ZipfOption = 1.0,
    seconds: SecondsOption = 600.0,
    seed: SeedOption = 1,
    idle_timeout_s: IdleOption = None,
    requests_per_instance: EachOption = 16,
    device_price: DevicePriceOption = 2.5,
    ram_price: RamPriceOption = 0.005,
    plots: PlotsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate the scheduler, with twelve models of 8B to 72B on a cluster or with a recorded day."""
    from torchrelay.sim.plots import PlotsUnavailable, check_available, plot_runs
    from torchrelay.sim.policies.runs import run_system
    from torchrelay.sim.policies.setup import Knobs
    from torchrelay.sim.summary import Prices

    if (trace is None) == (replay is None):
        raise CliError("give either --trace or --replay", EXAMPLE)
    systems = _systems(policy or ["ours"])
    if plots is not None:
        try:
            check_available()
        except PlotsUnavailable as error:
            raise CliError(f"{error}", "pip install matplotlib, or leave --plots out") from error
    day = None if replay is None else _recorded_day(replay)
    if day is not None:
        cluster, models, requests = day.fleet, day.models, day.requests
        idle_timeout_s = idle_timeout_s or day.config.idle_timeout_s
    else:
        assert trace is not None
        cluster, models = _fleet(fleet), _models(slo)
        requests = _requests(trace, models, copies, zipf, seconds, seed)
    source = trace or replay
    assert source is not None
    runs = []
    for system in systems:
        if len(systems) > 1:
            console.err().print(f"simulating {system}")
        idle_s = idle_timeout_s or (0.0 if system == "ours" else _RIVALS_IDLE_S)
        late_cost_s = Knobs().late_cost_s if day is None else day.config.late_cost_s
        knobs = Knobs(idle_s, requests_per_instance, late_cost_s)
        runs.append(run_system(system, cluster, models, knobs, requests, requests))
    if plots is not None:
        plot_runs(plots, runs, f"{source.name}, {cluster.num_devices} devices, {len(requests):,} requests")
    summaries = {} if day is None else {"recorded": day.measured}
    summaries |= {run.system: run.summary for run in runs}
    prices = Prices(device_price, ram_price)
    if as_json:
        rows = [_row(name, summary, prices) for name, summary in summaries.items()]
        console.print_json({"seed": seed, "policies": rows})
    else:
        console.out().print(_table(summaries, prices))


def _recorded_day(log: Path) -> RecordedDay:
    from torchrelay.sim.recorded_day import read_recorded_day

    try:
        day = read_recorded_day(log)
    except ValueError as error:
        raise CliError(f"--replay: {error}", "torchrelay-scheduler --record FILE writes such a log") from error
    if day.without_latency:
        names = ", ".join(day.without_latency)
        console.err().print(f"left out, as no worker has learned how long their steps take: {names}")
    return day


def _requests(
    trace: Path, models: Sequence[ServedModel], copies: float, zipf: float, seconds: float, seed: int
) -> list[Request]:
    from torchrelay.sim.traces import COLUMNS, read_trace, requests_of

    try:
        arrivals = [arrival for arrival in read_trace(trace) if arrival.at < seconds]
    except ValueError as error:
        raise CliError(str(error), f"a trace is a CSV file with the header {','.join(COLUMNS)}") from error
    requests = requests_of(arrivals, models, copies, zipf, seed)
    if not requests:
        raise CliError(f"{trace} has no arrivals in its first {seconds:g} s", "take more with --seconds or --copies")
    return requests


def _models(slo: str) -> list[ServedModel]:
    from torchrelay.sim.fleets import twelve_models

    return [_with_slo(model, slo) for model in twelve_models()]


def _fleet(text: str) -> Fleet:
    from torchrelay.sim.fleets import CLUSTER_A, CLUSTER_B, read_fleet

    if text in ("a", "b"):
        return CLUSTER_A if text == "a" else CLUSTER_B
    try:
        return read_fleet(Path(text))
    except ValueError as error:
        raise CliError(f"--fleet: {error}", "a, b, or a JSON file: see torchrelay sim --help") from error


def _systems(names: Sequence[str]) -> list[str]:
    from torchrelay.sim.policies.systems import SYSTEMS

    if unknown := [name for name in names if name not in (*SYSTEMS, "all")]:
        raise CliError(f"--policy: {unknown[0]} is unknown", f"one of {', '.join(SYSTEMS)}, all")
    return list(SYSTEMS) if "all" in names else list(dict.fromkeys(names))


def _with_slo(model: ServedModel, slo: str) -> ServedModel:
    if not slo:
        return model
    try:
        ttft_s, tpot_s = map(float, slo.split(","))
        if not (0 < ttft_s < math.inf and 0 < tpot_s < math.inf):
            raise ValueError("not above 0")
    except ValueError as error:
        hint = "two numbers above 0, as 0.5,0.1: to the first token, and per further token"
        raise CliError(f"--slo: {slo} is not a pair of seconds", hint) from error
    return replace(model, ttft_base_s=ttft_s, ttft_prompt_factor=0.0, tpot_target_s=tpot_s)


def _row(name: str, summary: Summary, prices: Prices) -> dict[str, Any]:
    """Endless times as null."""
    figures = {"policy": name, **asdict(summary), "cost": summary.cost(prices)}
    return {name: None if isinstance(value, float) and math.isinf(value) else value for name, value in figures.items()}


def _table(summaries: Mapping[str, Summary], prices: Prices) -> console.ResultTable:
    """A row for each policy."""
    figures = ("attained", "refused", "TTFT P50", "P95", "P99", "per token", "device s", "RAM GB h", "loads", "cost")
    title = f"{next(iter(summaries.values())).num_requests:,} requests"
    table = console.ResultTable("policy", *figures, right=figures, whole=("policy",), title=title)
    for name, summary in summaries.items():
        table.add_row(
            name,
            f"{summary.attainment:.2%}",
            f"{summary.num_refused:,}",
            f"{summary.ttft_p50_s:.2f} s",
            f"{summary.ttft_p95_s:.2f} s",
            f"{summary.ttft_p99_s:.2f} s",
            f"{summary.tpot_p50_s * 1e3:.1f} ms",
            f"{summary.device_s:,.0f}",
            f"{summary.ram_byte_s / 3600e9:,.0f}",
            f"{summary.num_loads:,}",
            f"{summary.cost(prices):,.2f}",
        )
    return table
