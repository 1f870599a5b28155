"""What a report says of what it rests on."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.cli.advise.test_ledger_day import MODELS, VIEW, row
from torchrelay.cli.advise.ledger_day import ledger_day
from torchrelay.cli.advise.report import Report


def test_held_devices_of_a_part_of_the_day_are_overrated() -> None:
    day = ledger_day([row("a", 0.0), row("b", 9.0)], VIEW, MODELS, 24.0)
    part = replace(day.workload, warm_up_s=5.0)
    assert "overrates their cost" in Report(day, part, [], [], pays_held=True).notes[-1]
    assert Report(day, part, [], [], pays_held=False).notes == list(day.notes)
    assert Report(day, day.workload, [], [], pays_held=True).notes == list(day.notes)
