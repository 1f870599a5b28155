"""The settings of the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from torchrelay.common.process.settings import CONFIG_VARIABLE, load_settings
from torchrelay.scheduler.policy.config import PoolMode
from torchrelay.scheduler.settings import SchedulerSettings

KEY = "ab" * 16


def test_settings_become_config() -> None:
    settings = SchedulerSettings(
        cluster_key=KEY, idle_timeout_s=5, max_instances=3, pool_mode="advise", pool_min_slots=2, pool_max_slots=3
    )
    assert settings.config.idle_timeout_s == 5 and settings.config.max_instances == 3
    assert settings.config.pool_mode is PoolMode.ADVISE and settings.config.pool_max_slots == 3
    assert SchedulerSettings(cluster_key=KEY, pool_min_slots=2).config.pool_max_slots == 0
    assert SchedulerSettings(cluster_key=KEY, pool_mode="follow", keda_port=7102).keda_port == 7102


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"cluster_key": "abcd"}, "must have at least 16 bytes in hex"),
        ({"cluster_key": "not hex at all, is it"}, "non-hexadecimal number found"),
        ({"pool_min_slots": 3, "pool_max_slots": 2}, "must be at least pool_min_slots"),
        ({"pool_mode": "off", "keda_port": 7102}, "set pool_mode to follow, or keda_port to 0"),
        ({"pool_mode": "advise", "keda_port": 7102}, "set pool_mode to follow, or keda_port to 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        SchedulerSettings(**({"cluster_key": KEY} | changes))


NO_GRACE = "any more: a disconnected gateway always has 10 s to return"


def test_flag_of_ended_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(SchedulerSettings, "torchrelay-scheduler", ["--gateway-grace-s=3"])
    assert f"--gateway-grace-s is not an option {NO_GRACE}" in capsys.readouterr().err


def test_file_with_ended_setting_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("gateway_grace_s = 3\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    with pytest.raises(SystemExit):
        load_settings(SchedulerSettings, "torchrelay-scheduler", [f"--cluster-key={KEY}"])
    assert f"{file}: 'gateway_grace_s' is not a setting {NO_GRACE}" in capsys.readouterr().err


def test_variable_of_ended_setting_is_named_and_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHRELAY_GATEWAY_GRACE_S", "3")
    monkeypatch.setenv("TORCHRELAY_LATE_COST", "3")
    settings = load_settings(SchedulerSettings, "torchrelay-scheduler", [f"--cluster-key={KEY}"])
    assert settings.config.gateway_grace_s == 10.0
    lines = sorted(capsys.readouterr().err.splitlines())
    grace = (
        "TORCHRELAY_GATEWAY_GRACE_S is not a setting any more and is ignored: a disconnected gateway always has 10 s"
    )
    assert len(lines) == 2 and grace in lines[0], "and none about names that they resemble"
    assert "TORCHRELAY_LATE_COST is not a setting any more and is ignored: set late_cost_s" in lines[1]
