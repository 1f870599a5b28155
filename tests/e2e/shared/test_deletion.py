"""A model that is deleted is shown no more, while its copies wait to be freed."""

from __future__ import annotations

import pytest

from tests.e2e.tenants import Tenant
from tests.support.completions import complete
from tests.support.platform import Platform

pytestmark = pytest.mark.e2e


def test_deleted_model_is_absent_from_top(platform: Platform, tenant: Tenant) -> None:
    model = platform.upload(tenant.key, tenant.checkpoint("llama"), "short-lived")
    complete(platform, tenant.key, model, [5, 6, 7], max_tokens=2)
    platform.await_zero()

    assert model in platform.cli("top", "--once")
    platform.cli("models", "delete", model, "--yes")
    for view in platform.views():
        is_shown = any(model in version.models for version in view.versions)
        if not is_shown and not any(relay.model == model for relay in view.relays):  # a relay is shown for 6 s more
            break
    assert model not in platform.cli("top", "--once") and any(store.copies for store in view.stores)
