"""Targets and service classes that are set with the CLI are those of the next request, until they are taken back."""

from __future__ import annotations

from functools import partial

import pytest

from tests.e2e.tenants import Tenant
from tests.support.completions import complete
from tests.support.platform import Platform

pytestmark = pytest.mark.e2e


def explained(platform: Platform, key: str, model: str, **body: str) -> str:
    """The explanation of a new request."""
    answer = complete(platform, key, model, [5, 6, 7], max_tokens=2, **body)
    return platform.cli("explain", "--json", str(answer["id"]))


def test_explain_reports_targets_until_they_are_reset(platform: Platform, tenant: Tenant) -> None:
    model = tenant.model()
    explain = partial(explained, platform, tenant.key, model)
    set_ = platform.cli("models", "set", model, "--interactive-ttft-s", "0.75", "--tbt-target-s", "0.125")
    line = f"{model}: targets: first token in 750 ms (interactive); 125 ms between tokens"
    assert line in set_ and line in platform.cli("models")
    assert "targets (interactive): the first token within 750 ms of its arrival, 125 ms between tokens" in explain(
        service_tier="priority"
    )
    standard = explain(service_tier="default")
    assert "targets (standard): the first token within 2 s of its arrival, 125 ms between tokens" in standard
    back = platform.cli("models", "set", model, "--interactive-ttft-s", "0", "--tbt-target-s", "0")
    assert f"{model}: back to the platform's default targets: first token (interactive), between tokens\n" in back
    assert line not in platform.cli("models")
    assert "targets (interactive): the first token within 500 ms of its arrival, 100 ms between tokens" in explain(
        service_tier="priority"
    )


def test_service_class_is_at_most_that_of_key_and_tenant(platform: Platform, tenant: Tenant) -> None:
    key = platform.tenant("nightly", service_class="batch")
    model = platform.upload(key, tenant.checkpoint("llama"), "llama")
    assert "targets (batch): the first token within 600 s of its arrival" in explained(platform, key, model)
    assert "targets (batch)" in explained(platform, key, model, service_tier="default")
    made = platform.cli("key", "create", "--tenant", "nightly", "--service-class", "interactive", "--no-save").strip()
    assert "targets (batch)" in explained(platform, made, model, service_tier="priority")
    assert "interactive" in platform.cli("key", "list") and "batch" in platform.cli("tenant", "list")
    platform.cli("tenant", "set", "nightly", "--service-class", "none")
    assert "targets (standard): the first token within 2 s" in explained(platform, key, model, service_tier="auto")
    assert "targets (interactive): the first token within 500 ms" in explained(platform, made, model)
