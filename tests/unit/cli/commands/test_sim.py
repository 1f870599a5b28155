"""`torchrelay sim`, as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchrelay.cli.errors import CliError
from torchrelay.cli.main import app

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:{second:02}.5000000,{500 + second},20\n" for second in range(0, 60, 2)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_a_trace_is_simulated_and_the_same_command_says_the_same(trace: Path) -> None:
    command = ["sim", "--trace", str(trace), "--copies", "2", "--json"]
    first, again = (CliRunner().invoke(app, command) for _ in range(2))
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert found["num_requests"] == 60 and found["num_refused"] == 0
    assert 0 < found["attainment"] <= 1 and found["ttft_p50_s"] <= found["ttft_p99_s"] and found["device_s"] > 0
    assert again.stdout == first.stdout
    table = CliRunner().invoke(app, command[:-1])
    assert "objectives attained" in table.stdout and "60" in table.stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [("a,b\n1,2\n", "line 2: expected TIMESTAMP"), (TRACE + "yesterday,1,2\n", "line 32: expected TIMESTAMP")],
)
def test_a_file_that_is_no_trace_is_named_with_its_line(trace: Path, text: str, why: str) -> None:
    trace.write_text(text)
    result = CliRunner().invoke(app, ["sim", "--trace", str(trace)])
    assert isinstance(result.exception, CliError) and why in str(result.exception)


def test_a_trace_without_arrivals_says_what_to_change(trace: Path) -> None:
    trace.write_text(TRACE.splitlines()[0] + "\n")
    result = CliRunner().invoke(app, ["sim", "--trace", str(trace)])
    assert isinstance(result.exception, CliError) and "no arrivals" in str(result.exception)
