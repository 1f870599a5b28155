"""Environments of child processes."""

from __future__ import annotations

from torchrelay.common.process.environment import SECRET_SETTINGS, plain_environment, service_environment
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.param_store.settings import StoreSettings
from torchrelay.scheduler.settings import SchedulerSettings
from torchrelay.worker.settings import WorkerSettings

NAMED = {"PATH": "/bin", "LC_ALL": "C", "TORCHRELAY_NODE_KEY": "ab", "TORCHRELAY_LOG_LEVEL": "info", "AWS_REGION": "x"}


def test_plain_environment_has_no_settings() -> None:
    assert plain_environment(NAMED) == {"PATH": "/bin", "LC_ALL": "C"}


def test_service_environment_omits_secrets() -> None:
    assert service_environment(NAMED) == {"PATH": "/bin", "LC_ALL": "C", "TORCHRELAY_LOG_LEVEL": "info"}
    assert service_environment(NAMED, reads_object_store=True)["AWS_REGION"] == "x"


def test_secret_settings_are_listed() -> None:
    """A new setting that is named like a secret is one, or is named here."""
    public = {"tls_key_file", "remote_url", "cached_keys"}
    settings = (GatewaySettings, SchedulerSettings, StoreSettings, WorkerSettings)
    fields = {name for each in settings for name in each.model_fields}
    named = {name for name in fields if any(word in name for word in ("key", "token", "pepper", "_url", "secret"))}
    tokens_of_text = {name for name in named if "tokens" in name or name.startswith("token")}
    assert named - public - tokens_of_text == set(SECRET_SETTINGS) & fields
