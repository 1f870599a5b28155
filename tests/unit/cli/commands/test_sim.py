"""`torchrelay sim`, as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run, refusal

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


def test_simulation_is_reproducible(run: Run, trace: Path) -> None:
    command = ["sim", "--trace", str(trace), "--copies", "2", "--json"]
    first, again = run(*command), run(*command)
    assert first.exit_code == 0, first.output
    (ours,) = json.loads(first.stdout)["policies"]
    assert (ours["policy"], ours["num_requests"], ours["num_refused"]) == ("ours", 60, 0)
    assert 0 < ours["attainment"] <= 1 and ours["ttft_p50_s"] <= ours["ttft_p99_s"]
    hours = ours["device_s"] / 3600, ours["ram_byte_s"] / 3600e9
    assert ours["cost"] == pytest.approx(2.5 * hours[0] + 0.005 * hours[1]) and min(hours) > 0
    assert again.stdout == first.stdout


def test_objectives_and_fleet_are_applied(run: Run, trace: Path, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.json"
    fleet.write_text(json.dumps(FLEET))
    attainments = []
    for slo in ("1000,10", "0.0001,0.0001"):
        command = ["sim", "--trace", str(trace), "--fleet", str(fleet), "--slo", slo]
        result = run(*command, "--json")
        assert result.exit_code == 0, result.output
        attainments.append(json.loads(result.stdout)["policies"][0]["attainment"])
    assert attainments == [1.0, 0.0]
    table = run(*command).stdout
    assert "attained" in table and "30 requests" in table and "ours" in table
    for change, why in (
        ({"num_hosts": 0}, "num_hosts must be a number above 0"),
        ({"groups": 4}, "groups must be a list"),
        ({"hosts": 4}, "not hosts"),
    ):
        fleet.write_text(json.dumps(FLEET | change))
        assert why in str(refusal(run("sim", "--trace", str(trace), "--fleet", str(fleet))))


def test_invalid_options_are_refused(run: Run, trace: Path) -> None:
    for options, why in (
        (["--slo", "fast"], "fast is not a pair of seconds"),
        (["--slo", "0.5"], "0.5 is not a pair of seconds"),
        (["--fleet", "c"], "c is no JSON file"),
        (["--replay", str(trace)], "either --trace or --replay"),
    ):
        assert why in str(refusal(run("sim", "--trace", str(trace), *options)))
    assert "either --trace or --replay" in str(refusal(run("sim")))
    said = str(refusal(run("sim", "--replay", str(trace))))
    assert "is not a log of torchrelay-scheduler --record" in said


NO_COLUMNS = " has no column TIMESTAMP, ContextTokens, GeneratedTokens"
NO_TIME = "TIMESTAMP must be a time such as 2023-11-16 18:17:03.97, not 'yesterday'"


WRONG_TRACES = [
    ("", NO_COLUMNS),
    ("a,b\n", NO_COLUMNS),
    ("TIMESTAMP,b,GeneratedTokens\n1,2,3\n", " has no column ContextTokens"),
    (TRACE + "yesterday,1,2\n", f", line 32: {NO_TIME}"),
    (TRACE + NEXT + "-1,2\n", ", line 32: ContextTokens must be a whole number of at least 0, not '-1'"),
    (TRACE + NEXT + "1,2.5\n", ", line 32: GeneratedTokens must be a whole number of at least 0, not '2.5'"),
    (TRACE + NEXT + "1\n", ", line 32: GeneratedTokens must be a whole number of at least 0, not ''"),
]


def test_invalid_trace_error_names_line_and_column(run: Run, trace: Path) -> None:
    for text, why in WRONG_TRACES:
        trace.write_text(text)
        refused = refusal(run("sim", "--trace", str(trace)))
        assert refused.message == f"{trace}{why}"
        assert refused.hint == "a trace is a CSV file with the header TIMESTAMP,ContextTokens,GeneratedTokens"
    trace.write_text(TRACE.splitlines()[0] + "\n")
    assert "no arrivals" in str(refusal(run("sim", "--trace", str(trace))))
