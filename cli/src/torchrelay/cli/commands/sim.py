"""`torchrelay sim`: what the scheduler would make of a trace on a cluster, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrelay.cli.api.access import JsonOption
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console

if TYPE_CHECKING:
    from torchrelay.sim.recorded_day import RecordedDay
    from torchrelay.sim.scenario import Fleet, Request, ServedModel
    from torchrelay.sim.setup import Knobs
    from torchrelay.sim.summary import Prices, Summary

EXAMPLE = "Example:  torchrelay sim --trace arrivals.csv --fleet a --slo 0.5,0.1"
_FLEET_HELP = (
    "a: 4 hosts of 8 devices on NVLink; b: 2 hosts of 8 devices on PCIe; 100 Gbit/s between hosts. Or a JSON file with "
    "num_hosts, groups, nic_bytes_per_s, device_bytes_per_s, disk_bytes_per_s, arena_bytes."
)
_SLO_HELP = "Seconds to the first token and per further token, as in 0.5,0.1; without it, each model has its own."

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
CopiesOption = Annotated[float, typer.Option(min=0.01, help="Mean number of requests per arrival of the trace.")]
ZipfOption = Annotated[float, typer.Option(min=0.0, help="Exponent of the twelve models' shares; 0: equal.")]
SecondsOption = Annotated[float, typer.Option(min=1.0, help="Simulated part of the trace, from its beginning.")]
SeedOption = Annotated[int, typer.Option(help="Seed for the models and the times of copied arrivals.")]
IdleOption = Annotated[
    float | None,
    typer.Option(
        "--idle-timeout-s",
        min=0.1,
        help="Idle timeout of models without their own. Without it, as recorded, or computed.",
    ),
]
DevicePriceOption = Annotated[float, typer.Option(min=0.0, help="Price of a device per hour.")]
RamPriceOption = Annotated[float, typer.Option(min=0.0, help="Price per hour of a GB of RAM that holds weights.")]


@dataclass(frozen=True)
class Workload:
    """Requests for models on a cluster, from a trace or a recorded day."""

    source: Path
    fleet: Fleet
    models: Sequence[ServedModel]
    requests: Sequence[Request]
    day: RecordedDay | None = None

    def knobs(self, idle_timeout_s: float | None, unset_idle_s: float = 0.0, requests_per_instance: int = 16) -> Knobs:
        """``idle_timeout_s``: without it, as recorded, otherwise ``unset_idle_s``."""
        from torchrelay.sim.setup import Knobs

        if self.day is None:
            return Knobs(idle_timeout_s or unset_idle_s, requests_per_instance)
        idle_s = idle_timeout_s or self.day.config.idle_timeout_s or unset_idle_s
        return Knobs(idle_s, requests_per_instance, self.day.config.late_cost_s)


def sim(
    trace: TraceOption = None,
    replay: ReplayOption = None,
    fleet: FleetOption = "a",
    slo: SloOption = "",
    copies: CopiesOption = 1.0,
    zipf: ZipfOption = 1.0,
    seconds: SecondsOption = 600.0,
    seed: SeedOption = 1,
    idle_timeout_s: IdleOption = None,
    device_price: DevicePriceOption = 2.5,
    ram_price: RamPriceOption = 0.005,
    as_json: JsonOption = False,
) -> None:
    """Simulate the scheduler, with twelve models of 8B to 72B on a cluster or with a recorded day."""
    from torchrelay.sim.runs import run_system
    from torchrelay.sim.setup import ours
    from torchrelay.sim.summary import Prices

    load = workload(trace, replay, fleet, slo, copies, zipf, seconds, seed)
    run = run_system("ours", ours, load.fleet, load.models, load.knobs(idle_timeout_s), load.requests, load.requests)
    show(load, {"ours": run.summary}, Prices(device_price, ram_price), seed, as_json)


def workload(
    trace: Path | None, replay: Path | None, fleet: str, slo: str, copies: float, zipf: float, seconds: float, seed: int
) -> Workload:
    """The workload that the options name. Raises ``CliError``."""
    if replay is not None and trace is None:
        day = _recorded_day(replay)
        return Workload(replay, day.fleet, day.models, day.requests, day)
    if trace is None or replay is not None:
        raise CliError("give either --trace or --replay", EXAMPLE)
    cluster, models = _fleet(fleet), _models(slo)
    return Workload(trace, cluster, models, _requests(trace, models, copies, zipf, seconds, seed))


def show(load: Workload, simulated: Mapping[str, Summary], prices: Prices, seed: int, as_json: bool) -> None:
    """Prints the figures of each policy, below those of the recorded day."""
    summaries = {**({} if load.day is None else {"recorded": load.day.measured}), **simulated}
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
