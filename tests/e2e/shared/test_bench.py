"""`torchrelay bench` on a running platform: every request is counted, whatever the machine's speed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.tenants import Tenant

pytestmark = pytest.mark.e2e


def measured(tenant: Tenant, *options: str) -> dict[str, Any]:
    """The figures of a load with prompts of 16 and answers of 4 tokens."""
    size = ("--prompt", "16", "--answer", "4", "--target", "60,60", "--json", "--key", tenant.key)
    figures: dict[str, Any] = json.loads(tenant.platform.cli("bench", tenant.model(), *options, *size))
    number = figures["num_completed"]
    assert figures["num_failed"] == 0 and figures["is_complete"], figures["errors"]
    assert (figures["num_prompt_tokens"], figures["num_output_tokens"]) == (16 * number, 4 * number)
    assert (figures["num_met"], figures["attainment"]) == (number, 1.0)
    assert figures["ttft_s"]["p50"] <= figures["ttft_s"]["p99"] and figures["tbt_s"]["p50"] <= figures["tbt_s"]["p99"]
    assert figures["cold_starts"]["num_explained"] == number
    assert figures["devices"]["most_devices"] <= 2 and figures["dollars_per_million_tokens"]["by_prices"] > 0
    return figures


def test_requests_one_after_another_are_billed_as_counted(tenant: Tenant) -> None:
    tenant.model()
    before = tenant.usage()
    figures = measured(tenant, "--scenario", "single", "--requests", "6")
    assert figures["num_completed"] == 6
    after = tenant.usage()
    tokens = {name: after[name] - before[name] for name in ("requests", "prompt_tokens", "completion_tokens")}
    assert tokens == {"requests": 6, "prompt_tokens": 6 * 16, "completion_tokens": 6 * 4}


def test_bursts_are_sent_whole(tenant: Tenant) -> None:
    figures = measured(tenant, "--scenario", "burst", "--at-once", "3", "--every", "1", "--duration", "2.5")
    assert figures["num_completed"] == 6 and figures["num_cached_tokens"] == 0


def test_cold_calls_all_wait_for_a_load(tenant: Tenant) -> None:
    figures = measured(tenant, "--scenario", "cold", "--requests", "2", "--wait", "0.2", "--device-price", "2")
    assert (figures["num_completed"], figures["cold_starts"]["num_cold"]) == (2, 2)
    assert {"queue", "plan", "prefill", "decode"} <= set(figures["cold_starts"]["phases_s"])
    assert figures["devices"]["device_s"] > 0 and figures["dollars_per_million_tokens"]["by_devices"] > 0
