"""Advice as a table, or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from torchrelay.cli.views import console
from torchrelay.common.quantities import format_duration
from torchrelay.sim.advice.advice import ATTAINED, DEVICE_S, DURATION, Check, Saving
from torchrelay.sim.advice.workload import Day, Workload

_FEW_REQUESTS = 100
_FORMATS: dict[str, Callable[[float], str]] = {
    ATTAINED: "{:.1%}".format,
    DEVICE_S: "{:,.0f}".format,
    DURATION: format_duration,
}


@dataclass(frozen=True)
class Report:
    """``stretch``: what was simulated of ``day``."""

    day: Day
    stretch: Workload
    checks: Sequence[Check]
    savings: Sequence[Saving]
    pays_held: bool

    @property
    def notes(self) -> list[str]:
        is_part = len(self.stretch.counted) < len(self.day.workload.requests)
        busiest = "with --pay-held, devices are paid all day as in the busiest stretch, which overrates their cost"
        return [*self.day.notes, *([busiest] if self.pays_held and is_part else [])]

    @property
    def weaknesses(self) -> list[str]:
        """Why the advice is weak."""
        off = [f"{check.name} off by {check.off:.0%}" for check in self.checks if check.is_weak]
        few = len(self.stretch.counted) < _FEW_REQUESTS
        return [
            *self.day.weaknesses,
            *off,
            *([] if self.checks else ["nothing was measured to compare the simulation with"]),
            *([f"it rests on {len(self.stretch.counted):,} requests"] if few else []),
        ]

    def as_json(self) -> dict[str, Any]:
        rows = [
            {
                "change": each.change.title,
                "command": each.change.command,
                "dollars_saved_per_day": round(each.saved, 2),
                "attained_before": each.attained_before,
                "attained": each.attained,
                "rests_on": self.basis(each),
            }
            for each in self.savings
        ]
        checks = [
            {"figure": check.name, "measured": check.measured, "simulated": check.simulated} for check in self.checks
        ]
        return {
            "num_requests": len(self.day.workload.requests),
            "num_simulated": len(self.stretch.counted),
            "checks": checks,
            "weak_because": self.weaknesses,
            "notes": self.notes,
            "advice": rows,
        }

    def basis(self, saving: Saving) -> str:
        number = f"simulated, {len(self.stretch.counted):,} requests"
        return f"{number}; estimated: {saving.change.estimate}" if saving.change.estimate else number

    @property
    def _basis_line(self) -> str:
        simulated, number = f"{len(self.stretch.counted):,} requests", len(self.day.workload.requests)
        if len(self.stretch.counted) < number:
            length = format_duration(self.stretch.arrivals_s)
            simulated = f"the busiest {length} of {number:,} requests: {simulated}"
        return f"simulated: {simulated}"

    def show(self) -> None:
        out = console.out()
        for line in (self._basis_line, *map(_comparison, self.checks), *self.notes):
            out.print(console.printable(line), markup=False)
        if self.weaknesses:
            out.print(f"weak advice: {'; '.join(self.weaknesses)}", style="bold", markup=False)
        if not self.savings:
            out.print("nothing to advise: no change that was tried saves anything")
            return
        out.print(self._table())
        for number, each in enumerate(self.savings, 1):
            out.print(console.printable(f"{number}  {each.change.command}"), soft_wrap=True, markup=False)
        out.print("\nEach by itself: savings do not add up, and nothing was changed.", style="dim")

    def _table(self) -> console.ResultTable:
        right = ("", "saved a day", "attained")
        columns = ("", "change", "saved a day", "attained", "rests on")
        table = console.ResultTable(*columns, right=right, is_narrow=True)
        for number, each in enumerate(self.savings, 1):
            attained = f"{each.attained_before:.1%} → {each.attained:.1%}"
            title = Text(console.printable(each.change.title))
            table.add_line(str(number), title, f"${each.saved:,.2f}", attained, self.basis(each))
        return table


def _comparison(check: Check) -> str:
    measured, simulated = map(_FORMATS[check.name], (check.measured, check.simulated))
    return f"{check.name}: {measured} measured, {simulated} simulated ({check.off:.0%} off)"
