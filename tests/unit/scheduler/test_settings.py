"""The settings of the scheduler."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from torchrelay.scheduler.settings import SchedulerSettings


def test_settings_become_config_and_bad_key_is_refused() -> None:
    settings = SchedulerSettings(cluster_key="ab" * 16, idle_timeout_s=5, max_instances=3)
    assert settings.config.idle_timeout_s == 5 and settings.config.max_instances == 3
    for key in ("abcd", "not hex at all, is it"):
        with pytest.raises(ValidationError):
            SchedulerSettings(cluster_key=key)
