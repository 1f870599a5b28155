"""Output of every bench: a table for people, and one JSON object as the last line."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One measured figure; ``bound`` is None if it is only printed; ``against``: the peer or limit compared with.

    NaN: could not be measured; it meets no bound. That and infinite ones are null in the JSON line.
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


def machine() -> dict[str, Any]:
    """The machine and its load."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def finish(bench: str, conditions: dict[str, Any], checks: list[Check]) -> None:
    """Prints the table and the JSON line; ends the process with status 1 when a check is not met."""
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
    """A progress line; never the last one."""
    print(f"... {text}", flush=True)
