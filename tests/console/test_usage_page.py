"""The page of usage: plots of the same figures as its table."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from playwright.sync_api import Route, expect

from tests.console.conftest import Console
from tests.console.test_console import HOSTILE, assert_accessible_and_fits, chat, turn_to
from tests.support.wait import wait_until

pytestmark = pytest.mark.e2e
# Plots are drawn on a canvas: this keeps the texts of their axes.
NOTE_TEXTS = """() => {
    window.texts = [];
    const draw = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
        window.texts.push(text);
        draw.call(this, text, ...place);
    };
}"""


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


@pytest.mark.parametrize("num_days", [1, 3, 27])
def test_axis_of_days_has_days(console: Console, num_days: int) -> None:
    page = console.open(console.reader)
    chat(page, "What is a day?")

    def with_days(route: Route) -> None:
        usage = route.fetch().json()
        usage["data"] = [usage["data"][0] | {"day": f"2026-11-{day:02}"} for day in range(2, 2 + num_days)]
        route.fulfill(json=usage)

    page.route("**/v1/usage?group_by=day", with_days)
    page.evaluate(NOTE_TEXTS)
    turn_to(page, "Usage and bill")
    expect(page.locator(".plot canvas")).to_be_visible()
    wait_until(lambda: page.evaluate("window.texts"), "the plot")
    days = [text for text in page.evaluate("window.texts") if not text.replace(".", "").isdecimal()]
    assert "Nov 3" in days
    assert set(days) <= {f"Nov {day}" for day in range(1, 31)}


def test_axis_of_a_day_has_hours_and_the_day_in_utc(console: Console) -> None:
    page = console.open(console.reader)
    page.evaluate(NOTE_TEXTS)
    before = datetime.now(UTC)
    page.get_by_label("Plots of the last").select_option("24 hours")
    wait_until(lambda: "12:00" in page.evaluate("window.texts"), "the plot of a day")
    texts = page.evaluate("window.texts")
    assert any(f"{midnight:%b} {midnight.day}" in texts for midnight in (before, datetime.now(UTC)))


def test_without_use_there_is_no_plot(console: Console) -> None:
    page = console.open(console.other)
    turn_to(page, "Usage and bill")
    page.get_by_text("Nothing was used yet").wait_for()
    assert page.locator(".plot").count() == 0
