"""Prometheus accepts the rules and their tests; the dashboards are those that their program writes."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

from tests.support.deploy import DEPLOY

FOLDER = DEPLOY / "monitoring"


@pytest.mark.parametrize(
    "arguments", [("test", "rules", "rules_test.yaml"), ("check", "config", "prometheus.yaml")], ids=" ".join
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboards_are_up_to_date() -> None:
    module = runpy.run_path(str(FOLDER / "dashboards.py"))
    written = {path.name: path.read_text() for path in Path(FOLDER / "grafana").iterdir()}
    assert written == {name: module["to_json"](dashboard) for name, dashboard in module["DASHBOARDS"].items()}
