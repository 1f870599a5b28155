"""A prompt that shares a prefix with an earlier one of its tenant is computed, and billed, only after it."""

from __future__ import annotations

import pytest

from tests.e2e.tenants import Tenant
from tests.support.completions import complete
from tests.support.platform import Platform

pytestmark = pytest.mark.e2e
PROMPT = [(11 * i) % 251 for i in range(1, 101)]


def test_usage_reports_cached_tokens_and_tokens_are_equal(platform: Platform, tenant: Tenant) -> None:
    platform.await_zero()  # the cache lives as long as the instance
    model = tenant.model("qwen2")
    first, again, longer = (
        complete(platform, tenant.key, model, prompt, max_tokens=12, ignore_eos=True)
        for prompt in (PROMPT, PROMPT, [*PROMPT, *PROMPT[:30]])
    )
    assert first["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again, longer)]
    assert cached == [0, 96, 96]
