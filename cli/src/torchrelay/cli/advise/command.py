"""`torchrelay advise`: the changes of settings that would save most, by a simulation of what the platform recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrelay.cli.api.access import AdminKeyOption, HomeOption, JsonOption, UrlOption, admin_access
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console

if TYPE_CHECKING:
    from torchrelay.sim.advice.workload import Day

EXAMPLE = "Example:  torchrelay advise\n\nOf a log: torchrelay advise --replay inputs.jsonl --device-price 1.2"
_SIMULATION_S = 3.0  # of CPU time, for each change, and at most as much for its warm-up

ReplayOption = Annotated[
    Path | None,
    typer.Option(
        help="Instead of the ledger: a log of torchrelay-scheduler --record.",
        exists=True,
        dir_okay=False,
        metavar="LOG",
    ),
]
HoursOption = Annotated[float, typer.Option(min=0.1, max=24 * 31, help="Recorded time, until now.")]
DevicePriceOption = Annotated[float, typer.Option(min=0.0, help="Dollars per device and hour.")]
RamPriceOption = Annotated[float, typer.Option(min=0.0, help="Dollars per GB of RAM that holds weights, and hour.")]
LatePriceOption = Annotated[
    float, typer.Option(min=0.0, help="Dollars lost with each request that misses a latency target.")
]
PaysHeldOption = Annotated[
    bool,
    typer.Option(
        "--pay-held", help="A device costs only while a model holds it, as with a launcher; default: all of the fleet."
    ),
]


def advise(
    replay: ReplayOption = None,
    hours: HoursOption = 24.0,
    device_price: DevicePriceOption = 2.5,
    ram_price: RamPriceOption = 0.005,
    late_price: LatePriceOption = 0.01,
    pays_held: PaysHeldOption = False,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Advise the three changes of settings that would save most; nothing is changed.

    Simulates the scheduler with the requests of the ledger, or of a log, and with changed settings. What counts is
    dollars a day: devices, RAM and late requests. No change is advised that makes many more requests late.
    """
    from torchrelay.cli.advise.report import Report
    from torchrelay.cli.advise.simulations import simulations_of
    from torchrelay.sim.advice.advice import DayPrices, best_savings, checks_of
    from torchrelay.sim.advice.changes import changes_of
    from torchrelay.sim.advice.workload import stretch_of

    day = _ledger_day(home, url, key, hours) if replay is None else _day_of_log(replay)
    begin, stretch = stretch_of(day.workload, _SIMULATION_S)
    with simulations_of(stretch) as simulations:
        base = simulations.base(stretch)
        changed = simulations.changed(changes_of(stretch, base.late))
    prices = DayPrices(device_price, ram_price, late_price, pays_held)
    savings = best_savings((stretch, base), changed, day.workload.requests_per_day, prices)
    checks = checks_of(day.measured, begin, stretch, base)
    report = Report(day, stretch, checks, savings, pays_held)
    if as_json:
        console.print_json(report.as_json())
    else:
        report.show()


def _ledger_day(home: Path | None, url: str | None, key: str | None, hours: float) -> Day:
    from torchrelay.cli.advise.ledger_day import read_ledger_day

    access = admin_access(home, url, key)
    access.require_admin("advise")
    with access.client() as client:
        return read_ledger_day(client, hours)


def _day_of_log(log: Path) -> Day:
    from torchrelay.sim.advice.workload import day_of_log
    from torchrelay.sim.recorded_day import read_recorded_day

    try:
        with console.err().status("reading the log: about a minute per 500 MB"):
            return day_of_log(read_recorded_day(log))
    except ValueError as error:
        raise CliError(f"--replay: {error}", "torchrelay-scheduler --record FILE writes such a log") from error
