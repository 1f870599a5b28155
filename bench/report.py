"""Options and output of every bench: a table for people, and a JSON object as the last line."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """A measured figure and its bound (None: printed only); ``against`` names the peer or limit of the comparison.

    The value is NaN if it could not be measured, which meets no bound. NaN and infinity are null in the JSON line.
    """

    name: str
    value: float
    unit: str
    bound: float | None = None
    against: str = ""
    at_least: bool = False  # a lower bound

    @property
    def ok(self) -> bool:
        if self.bound is None:
            return True
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def parser_of(description: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser with ``--quick``; ``quick`` is its help text."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def percentile(values: Sequence[float], percent: int) -> float:
    """The percentile of ``values``, interpolated between neighbouring values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def machine() -> dict[str, Any]:
    """The machine and its load average."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def finish(bench: str, conditions: dict[str, Any], checks: list[Check]) -> None:
    """Prints the table and the JSON line; exits with status 1 if a check is not met."""
    for check in checks:
        relation = ">=" if check.at_least else "<="
        bound = "" if check.bound is None else f"  {relation} {check.bound:g}"
        verdict = "ok  " if check.ok else "MISS"
        print(f"{verdict}  {check.name:<26} {check.value:12.4g} {check.unit:<8}{bound:<12} {check.against}")
    rows = [
        {**asdict(check), "value": check.value if math.isfinite(check.value) else None, "ok": check.ok}
        for check in checks
    ]
    for row in rows:
        del row["at_least"]
    print(json.dumps({"bench": bench, "conditions": {**machine(), **conditions}, "checks": rows}))
    sys.stdout.flush()
    sys.exit(0 if all(check.ok for check in checks) else 1)


def progress(text: str) -> None:
    """Prints a progress line; never the last line."""
    print(f"... {text}", flush=True)
