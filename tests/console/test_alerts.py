"""The overview's alerts on a real platform."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest
from playwright.sync_api import expect

from tests.console.conftest import Console
from tests.console.test_console import assert_accessible_and_fits

pytestmark = pytest.mark.e2e


def test_lost_part_is_told_to_the_operator_until_it_is_back(console: Console) -> None:
    operators, tenants = console.open(console.platform.home.admin_key()), console.open(console.reader)
    operators.get_by_text("No alert").wait_for()
    redis = console.platform.pid("redis")
    os.kill(redis, signal.SIGSTOP)
    try:
        alerts = operators.get_by_role("region", name="Alerts")
        expect(alerts).to_contain_text("Redis does not answer", timeout=30_000)
        expect(alerts).to_contain_text("Rate limits and budgets are not enforced")
        assert_accessible_and_fits(operators)
        expect(tenants.get_by_text("No alert")).to_be_visible()  # their requests go on
    finally:
        with suppress(ProcessLookupError):  # `up` may have replaced it
            os.kill(redis, signal.SIGCONT)
    operators.get_by_text("No alert").wait_for()
