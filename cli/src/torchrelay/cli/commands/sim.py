"""`torchrelay sim`: what the scheduler would make of a trace on a cluster, in virtual time."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrelay.cli.api.access import JsonOption
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console

if TYPE_CHECKING:
    from torchrelay.sim.summary import Summary

EXAMPLE = "Example:  torchrelay sim --trace arrivals.csv --fleet a --copies 3"


class FleetName(StrEnum):
    """a: 4 hosts of 8 devices on NVLink; b: 2 hosts of 8 devices on PCIe; 100 Gbit/s between hosts."""

    A = "a"
    B = "b"


TraceOption = Annotated[
    Path, typer.Option(help="A CSV file with TIMESTAMP, ContextTokens, GeneratedTokens.", exists=True, dir_okay=False)
]
FleetOption = Annotated[FleetName, typer.Option(help=FleetName.__doc__)]
CopiesOption = Annotated[float, typer.Option(min=0.01, help="How often each arrival happens, on average.")]
ZipfOption = Annotated[float, typer.Option(min=0.0, help="How unequal the twelve models' shares are; 0: equal.")]
SecondsOption = Annotated[float, typer.Option(min=1.0, help="Of the trace, from its beginning.")]
SeedOption = Annotated[int, typer.Option(help="Of the models and of the moments of further copies.")]


def sim(
    trace: TraceOption,
    fleet: FleetOption = FleetName.A,
    copies: CopiesOption = 1.0,
    zipf: ZipfOption = 1.0,
    seconds: SecondsOption = 600.0,
    seed: SeedOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Simulate the scheduler with twelve models of 8B to 72B on a cluster: objectives attained, latencies, cost."""
    summary = _run(trace, fleet, copies, zipf, seconds, seed)
    if as_json:
        console.print_json(asdict(summary))
        return
    table = console.ResultTable("", "value", right=("value",))
    for name, value in (
        ("requests", f"{summary.num_requests:,}"),
        ("refused", f"{summary.num_refused:,}"),
        ("objectives attained", f"{summary.attainment:.2%}"),
        ("time to first token, P50 / P95 / P99", _seconds(summary)),
        ("time per output token, P50", f"{summary.tpot_p50_s * 1e3:.1f} ms"),
        ("device seconds", f"{summary.device_s:,.0f}"),
        ("packs in RAM", f"{summary.ram_byte_s / 3600e9:,.0f} GB h"),
        ("loads", f"{summary.num_loads:,}"),
    ):
        table.add_row(name, value)
    console.out().print(table)


def _seconds(summary: Summary) -> str:
    return " / ".join(f"{value:.2f}" for value in (summary.ttft_p50_s, summary.ttft_p95_s, summary.ttft_p99_s)) + " s"


def _run(trace: Path, fleet: FleetName, copies: float, zipf: float, seconds: float, seed: int) -> Summary:
    from torchrelay.scheduler.policy.config import PolicyConfig
    from torchrelay.scheduler.policy.policy import Policy
    from torchrelay.sim.fleets import CLUSTER_A, CLUSTER_B, twelve_models
    from torchrelay.sim.plant import Plant
    from torchrelay.sim.summary import summarize
    from torchrelay.sim.traces import read_trace, requests_of

    try:
        arrivals = [arrival for arrival in read_trace(trace) if arrival.at < seconds]
    except ValueError as error:
        raise CliError(str(error)) from error
    models, ids = twelve_models(), count()
    requests = requests_of(arrivals, models, copies, zipf, seed)
    if not requests:
        raise CliError(f"{trace} has no arrivals in its first {seconds:g} s", "take more with --seconds or --copies")
    policy = Policy(PolicyConfig(), lambda: f"instance-{next(ids)}", now=1000.0)
    plant = Plant(policy, CLUSTER_A if fleet is FleetName.A else CLUSTER_B, models)
    outcomes = plant.run(requests)
    return summarize(outcomes, plant.served, plant.at_last_arrival)
