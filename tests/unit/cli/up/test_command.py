"""What `torchrelay up` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run
from torchrelay.cli.problems import Problem
from torchrelay.cli.up.command import check_device


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--http-port", "99999"),
        ("--grpc-port", "-1"),
        ("--device", "gpu"),
        ("--device", "cuda:"),
        ("--log-level", "loud"),
    ],
)
def test_a_wrong_option_is_named(run: Run, tmp_path: Path, option: str, value: str) -> None:
    refused = run("up", "--home", str(tmp_path / "home"), option, value)
    assert refused.exit_code == 2
    assert f"Invalid value for '{option}'" in refused.stderr
    assert not (tmp_path / "home").exists()


def test_devices() -> None:
    assert [check_device(device) for device in ("cpu", "cuda", "cuda:11")] == ["cpu", "cuda", "cuda:11"]


@pytest.mark.parametrize("host", ["203.0.113.7", "a..b"])
def test_an_address_that_is_not_ours_is_a_sentence(run: Run, tmp_path: Path, host: str) -> None:
    problem = run("up", "--home", str(tmp_path), "--host", host).exception
    assert isinstance(problem, Problem)
    assert problem.message == f"this machine cannot listen on {host}"
