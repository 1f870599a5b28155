"""The page of usage: plots of the same figures as its table."""

from __future__ import annotations

import pytest
from playwright.sync_api import Route, expect

from tests.console.conftest import Console
from tests.console.test_console import HOSTILE, assert_accessible_and_fits, chat, turn_to

pytestmark = pytest.mark.e2e


def test_days_models_and_keys_are_plotted(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, "What is a bar?")

    def with_many(route: Route) -> None:
        """The usage of a larger tenant, with a model's name that the gateway would refuse."""
        usage = route.fetch().json()
        (first, *_), (group,) = usage["data"], usage["data"][0].keys() & {"day", "model", "key"}
        names = (
            [f"2026-11-{day:02}" for day in range(1, 28, 2)] if group == "day" else [f"{group}-{n}" for n in range(20)]
        )
        usage["data"] = [first | {group: name, "cost": str(n * 0.01)} for n, name in enumerate(names)]
        if group == "model":
            usage["data"][-1][group] = HOSTILE
        route.fulfill(json=usage)

    page.route("**/v1/usage?group_by=*", with_many)
    turn_to(page, "Usage and bill")
    for group in ("day", "model", "key"):
        page.get_by_label("Sums by").select_option(group)
        for figure in ("Requests", "Cost, $"):
            page.get_by_label("Plot of").select_option(figure)
            largest = "" if group == "day" else ", the largest 12 of 20"
            expect(page.get_by_role("heading", name=f"{figure} by {group}{largest}", exact=True)).to_be_visible()
        expect(page.locator(".plot canvas")).to_be_visible()
        assert_accessible_and_fits(page)
    assert page.locator("img").count() == 0


def test_without_use_there_is_no_plot(console: Console) -> None:
    page = console.open(console.other)
    turn_to(page, "Usage and bill")
    page.get_by_text("Nothing was used yet").wait_for()
    assert page.locator(".plot").count() == 0
