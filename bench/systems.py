"""The scheduler and other systems on a trace or a recorded day, in virtual time.

    python bench/systems.py --replay LOG --policy ours --policy serverlessllm [--plots runs.png]

The options are those of `torchrelay sim`, which simulates the scheduler alone, and three more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.rivals.systems import SYSTEMS
from bench.simulation.plots import check_available, plot_runs
from torchrelay.cli.api.access import JsonOption
from torchrelay.cli.commands import sim
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console
from torchrelay.sim.runs import run_system
from torchrelay.sim.summary import Prices

RIVALS_IDLE_S = 60.0
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    trace: sim.TraceOption = None,
    replay: sim.ReplayOption = None,
    fleet: sim.FleetOption = "a",
    slo: sim.SloOption = "",
    policy: Annotated[
        list[str] | None, typer.Option(help="A system to simulate, or all; may be repeated.", metavar="NAME")
    ] = None,
    copies: sim.CopiesOption = 1.0,
    zipf: sim.ZipfOption = 1.0,
    seconds: sim.SecondsOption = 600.0,
    seed: sim.SeedOption = 1,
    idle_timeout_s: sim.IdleOption = None,
    requests_per_instance: Annotated[int, typer.Option(min=1, help="Waiting requests for another instance.")] = 16,
    device_price: sim.DevicePriceOption = 2.5,
    ram_price: sim.RamPriceOption = 0.005,
    plots: Annotated[Path | None, typer.Option(help="A PNG file: instances, queue and latency over time.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate systems on the same requests."""
    systems = _systems(policy or ["all"])
    if plots is not None:
        check_available()
    load = sim.workload(trace, replay, fleet, slo, copies, zipf, seconds, seed)
    runs = []
    for name in systems:
        console.err().print(f"simulating {name}")
        knobs = load.knobs(idle_timeout_s, 0.0 if name == "ours" else RIVALS_IDLE_S, requests_per_instance)
        runs.append(run_system(name, SYSTEMS[name], load.fleet, load.models, knobs, load.requests, load.requests))
    if plots is not None:
        plot_runs(plots, runs, f"{load.source.name}, {load.fleet.num_devices} devices, {len(load.requests):,} requests")
    sim.show(load, {run.system: run.summary for run in runs}, Prices(device_price, ram_price), seed, as_json)


def _systems(names: list[str]) -> list[str]:
    if unknown := [name for name in names if name not in (*SYSTEMS, "all")]:
        raise CliError(f"--policy: {unknown[0]} is unknown", f"one of {', '.join(SYSTEMS)}, all")
    return list(SYSTEMS) if "all" in names else list(dict.fromkeys(names))


if __name__ == "__main__":
    try:
        app()
    except CliError as error:
        console.print_error(error)
        sys.exit(error.exit_code)
