"""`torchrelay sim`, as a person runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchrelay.cli.errors import CliError
from torchrelay.cli.main import app

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:{second:02}.5000000,{500 + second},20\n" for second in range(0, 60, 2)
)
NEXT = "2023-11-16 18:02:00,"
FLEET = {
    "num_hosts": 2,
    "groups": [4, 2, 1, 1],
    "nic_bytes_per_s": 12.5e9,
    "device_bytes_per_s": 25e9,
    "disk_bytes_per_s": 2.5e9,
    "arena_bytes": 480e9,
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_simulation_is_reproducible(trace: Path) -> None:
    command = ["sim", "--trace", str(trace), "--copies", "2", "--policy", "ours", "--policy", "all_cache", "--json"]
    first, again = (CliRunner().invoke(app, command) for _ in range(2))
    assert first.exit_code == 0, first.output
    ours, cached = json.loads(first.stdout)["policies"]
    assert (ours["policy"], cached["policy"]) == ("ours", "all_cache")
    for row in (ours, cached):
        assert row["num_requests"] == 60 and row["num_refused"] == 0
        assert 0 < row["attainment"] <= 1 and row["ttft_p50_s"] <= row["ttft_p99_s"]
        hours = row["device_s"] / 3600, row["ram_byte_s"] / 3600e9
        assert row["cost"] == pytest.approx(2.5 * hours[0] + 0.005 * hours[1]) and min(hours) > 0
    assert cached["ram_byte_s"] > ours["ram_byte_s"]
    assert again.stdout == first.stdout


def test_objectives_and_fleet_are_applied(trace: Path, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.json"
    fleet.write_text(json.dumps(FLEET))
    attainments = []
    for slo in ("1000,10", "0.0001,0.0001"):
        command = ["sim", "--trace", str(trace), "--fleet", str(fleet), "--slo", slo]
        result = CliRunner().invoke(app, [*command, "--json"])
        assert result.exit_code == 0, result.output
        attainments.append(json.loads(result.stdout)["policies"][0]["attainment"])
    assert attainments == [1.0, 0.0]
    table = CliRunner().invoke(app, command).stdout
    assert "attained" in table and "30 requests" in table and "ours" in table


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--slo", "fast"], "fast is not a pair of seconds"),
        (["--slo", "0.5"], "0.5 is not a pair of seconds"),
        (["--policy", "magic"], "magic is unknown"),
        (["--fleet", "c"], "c is no JSON file"),
    ],
)
def test_invalid_options_are_refused(trace: Path, options: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["sim", "--trace", str(trace), *options])
    assert isinstance(result.exception, CliError) and why in str(result.exception)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_hosts": 0}, "num_hosts must be a number above 0"),
        ({"groups": 4}, "groups must be a list"),
        ({"hosts": 4}, "not hosts"),
    ],
)
def test_invalid_fleet_error_names_field(trace: Path, tmp_path: Path, change: dict[str, object], why: str) -> None:
    fleet = tmp_path / "fleet.json"
    fleet.write_text(json.dumps(FLEET | change))
    result = CliRunner().invoke(app, ["sim", "--trace", str(trace), "--fleet", str(fleet)])
    assert isinstance(result.exception, CliError) and why in str(result.exception)


def test_plots_are_drawn(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "runs.png"
    result = CliRunner().invoke(app, ["sim", "--trace", str(trace), "--plots", str(path)])
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plots_without_matplotlib_are_refused_early(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, ["sim", "--trace", str(trace), "--plots", str(tmp_path / "runs.png")])
    assert isinstance(result.exception, CliError) and "not installed" in str(result.exception)
    assert "pip install matplotlib" in result.exception.hint


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", " has no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("a,b\n", " has no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,b,GeneratedTokens\n1,2,3\n", " has no column ContextTokens"),
        (
            TRACE + "yesterday,1,2\n",
            ", line 32: TIMESTAMP must be a time such as 2023-11-16 18:17:03.97, not 'yesterday'",
        ),
        (TRACE + NEXT + "-1,2\n", ", line 32: ContextTokens must be a whole number of at least 0, not '-1'"),
        (TRACE + NEXT + "1,2.5\n", ", line 32: GeneratedTokens must be a whole number of at least 0, not '2.5'"),
        (TRACE + NEXT + "1\n", ", line 32: GeneratedTokens must be a whole number of at least 0, not ''"),
    ],
)
def test_invalid_trace_error_names_line_and_column(trace: Path, text: str, why: str) -> None:
    trace.write_text(text)
    refused = CliRunner().invoke(app, ["sim", "--trace", str(trace)]).exception
    assert isinstance(refused, CliError) and refused.message == f"{trace}{why}"
    assert refused.hint == "a trace is a CSV file with the header TIMESTAMP,ContextTokens,GeneratedTokens"


def test_empty_trace_error_hints_at_fix(trace: Path) -> None:
    trace.write_text(TRACE.splitlines()[0] + "\n")
    result = CliRunner().invoke(app, ["sim", "--trace", str(trace)])
    assert isinstance(result.exception, CliError) and "no arrivals" in str(result.exception)


def test_trace_or_log_is_required(trace: Path) -> None:
    for given in ([], ["--trace", str(trace), "--replay", str(trace)]):
        with pytest.raises(CliError, match="either --trace or --replay"):
            CliRunner().invoke(app, ["sim", *given], catch_exceptions=False)
    with pytest.raises(CliError, match="is not a log of torchrelay-scheduler --record"):
        CliRunner().invoke(app, ["sim", "--replay", str(trace)], catch_exceptions=False)
