"""Limits of keys on a running platform."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.shared.test_bad_input import post
from tests.e2e.tenants import Tenant
from tests.support.platform import Platform
from tests.support.wait import wait_until
from torchrelay.cli.api.client import GatewayClient

pytestmark = pytest.mark.e2e


def test_limits_of_a_key_are_told_and_kept(platform: Platform, tenant: Tenant) -> None:
    """Its tokens are settled as they were used, its budget is what the ledger says, and a change applies at once."""
    limits = {"requests_per_minute": 500, "tokens_per_minute": 100, "budget_nano": 10**9, "budget_period": "month"}
    body = {
        "model": tenant.model(),
        "prompt": [3, 4, 5],
        "max_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    with GatewayClient(platform.http, tenant.key) as owner:
        made = owner.call("POST", "/v1/keys", json={**limits, "models": [tenant.model()]})

        def ask(**settings: Any) -> httpx.Response:
            return post(platform, made["key"], {**body, **settings})

        first = ask()
        assert first.status_code == 200
        told = {name: value for name, value in first.headers.items() if name.startswith("x-ratelimit")}
        assert (told["x-ratelimit-limit-requests"], told["x-ratelimit-limit-tokens"]) == ("500", "100")
        assert int(told["x-ratelimit-remaining-requests"]) == 499
        assert int(told["x-ratelimit-remaining-tokens"]) == 100 - 8
        assert ask(max_tokens=98).status_code == 400, "more than a minute's tokens"
        begin = first.json()["choices"][0]["token_ids"][0]
        assert ask(max_tokens=60, stop_token_ids=[begin]).json()["usage"]["completion_tokens"] <= 1
        with GatewayClient(platform.http, made["key"]) as caller:
            mine = caller.call("GET", "/v1/keys/me")
            used = caller.call("GET", f"/v1/usage?key={made['id']}")["total"]
        assert mine["tokens_left"] > 80, "the answer that ended early gave its tokens back"
        assert mine["spent_nano"] == used["cost_nano"] > 0 and mine["reserved_nano"] == 0
        owner.call("PATCH", f"/v1/keys/{made['id']}", json={"budget_nano": used["cost_nano"]})
        wait_until(lambda: ask().status_code == 403, "the refusal by the lowered budget")
        refused = ask().json()["error"]
        assert refused["code"] == "quota_exceeded" and "per month of this key" in refused["message"]
        owner.call("DELETE", f"/v1/keys/{made['id']}")
