"""bench/systems.py, as a person runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.systems import app
from tests.unit.cli.commands.test_sim import TRACE
from torchrelay.cli.errors import CliError


def test_systems_get_the_same_requests_and_are_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, plot = tmp_path / "trace.csv", tmp_path / "runs.png"
    trace.write_text(TRACE)
    command = ["--trace", str(trace), "--copies", "2", "--policy", "ours", "--policy", "all_cache", "--json"]
    result = CliRunner().invoke(app, [*command, "--plots", str(plot)])
    assert result.exit_code == 0, result.output
    ours, cached = json.loads(result.stdout)["policies"]
    assert (ours["policy"], cached["policy"]) == ("ours", "all_cache")
    for row in (ours, cached):
        assert row["num_requests"] == 60 and row["num_refused"] == 0
        hours = row["device_s"] / 3600, row["ram_byte_s"] / 3600e9
        assert row["cost"] == pytest.approx(2.5 * hours[0] + 0.005 * hours[1]) and min(hours) > 0
    assert cached["ram_byte_s"] > ours["ram_byte_s"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    unknown = CliRunner().invoke(app, [*command, "--policy", "magic"]).exception
    assert isinstance(unknown, CliError) and "magic is unknown" in unknown.message
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused = CliRunner().invoke(app, [*command, "--plots", str(plot)]).exception
    assert isinstance(refused, CliError) and "matplotlib" in refused.message
