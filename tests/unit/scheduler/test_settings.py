"""The settings of the scheduler."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from torchrelay.param_store.settings import StoreSettings
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.settings import SchedulerSettings


def test_settings_become_the_config_and_a_bad_key_is_refused() -> None:
    settings = SchedulerSettings(cluster_key="ab" * 16, idle_timeout_s=5, max_instances=3)
    assert settings.config.idle_timeout_s == 5 and settings.config.max_instances == 3
    for key in ("abcd", "not hex at all, is it"):
        with pytest.raises(ValidationError):
            SchedulerSettings(cluster_key=key)


def test_a_store_gives_up_its_object_store_before_the_scheduler_gives_up_the_load() -> None:
    """The store's error names the cause; and a pause that the store outlasts costs no try of the load."""
    fields = SchedulerSettings.model_fields, StoreSettings.model_fields
    assert fields[0]["load_stall_s"].default > fields[1]["remote_give_up_s"].default
    assert fields[0]["load_stall_s"].default == PolicyConfig().load_stall_s
