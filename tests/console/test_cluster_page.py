"""The operator's page of the cluster: reasons of instances and relays, and pairs of a loading and a loaded worker."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.console.conftest import Console
from tests.console.test_console import assert_accessible_and_fits, chat, turn_to

pytestmark = pytest.mark.e2e


def sample_of(console: Console) -> Any:
    """The live figures that the operator sees now."""
    headers = {"authorization": f"Bearer {console.platform.home.admin_key()}"}
    with httpx.stream("GET", f"{console.platform.http}/console/live", headers=headers, timeout=30) as response:
        return json.loads(next(response.iter_lines()).removeprefix("data: "))


def open_with(console: Console, sample: Any) -> Page:
    """The operator's overview, whose live figures are those of ``sample``."""
    body = f"data: {json.dumps(sample)}\n\n"
    page = console.open(console.platform.home.admin_key())
    page.route("**/console/live", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.reload()
    page.get_by_text("Models at zero").wait_for()
    return page


def test_instance_and_relay_tell_why(console: Console) -> None:
    chat(console.open(console.reader), "What is a decision?")
    page = console.open(console.platform.home.admin_key())
    turn_to(page, "Cluster")
    page.get_by_text("No loading worker computes prompts now.").wait_for()
    slots = page.get_by_role("region", name="Slots of")
    slots.locator("tbody tr", has_text="ready").first.get_by_role("link").first.click()
    page.get_by_role("heading", name="Instance").wait_for()
    expect(page.get_by_role("region", name="Decisions").locator("tbody tr").first).to_contain_text("ready")
    assert_accessible_and_fits(page)
    with console.platform.admin() as admin:
        relay = admin.call("GET", "/v1/events?since=2026-01-01&kind=relay")["data"][-1]
    page.goto(f"{console.platform.http}/console#/cluster/relay/{relay['store_id']}/{relay['pack_id']}")
    events = page.get_by_role("region", name="Events of the relay")
    expect(events).to_contain_text(relay["reason"])
    expect(events).to_contain_text("relay.started")
    assert_accessible_and_fits(page)


def test_relay_under_way_is_drawn_as_a_chain(console: Console) -> None:
    sample = sample_of(console)
    first = {
        "models": ["reader/glossary"],
        "pack": "p-1",
        "state": "running",
        "pack_bytes": 8_000_000,
        "bytes_per_s": 1e6,
        "left_s": 4.0,
        "ended_s": 0.0,
        "reason": "at zero",
        "target": "host-a",
        "sources": ["remote"],
        "verified": 0.5,
    }
    second = first | {"target": "host-b", "sources": ["host-a", "host-c"], "verified": 0.25}
    ended = first | {"target": "host-d", "state": "finished", "verified": 1.0}
    sample["relays"] = [second, first, ended]
    page = open_with(console, sample)
    turn_to(page, "Cluster")
    picture = page.get_by_role("img")
    expect(picture).to_have_attribute(
        "aria-label", "host-a to host-b, 25%; host-c to host-b, 25%; remote to host-a, 50%"
    )

    def left_edge(host: str) -> float:
        box = picture.locator(".host", has_text=host).locator(".box").bounding_box()
        assert box is not None
        return box["x"]

    def share(host: str) -> float:
        bars = picture.locator(".host", has_text=host)
        widths = [bars.locator(kind).evaluate("bar => bar.width.baseVal.value") for kind in (".bar", ".track")]
        return float(widths[0] / widths[1])

    assert left_edge("remote") < left_edge("host-a") == left_edge("host-c") < left_edge("host-b")
    assert [share(host) for host in ("remote", "host-a", "host-b")] == [1, 0.5, 0.25]
    assert_accessible_and_fits(page)
    page.unroute_all(behavior="ignoreErrors")


def test_failed_load_is_shown_with_its_model(console: Console) -> None:
    chat(console.open(console.reader), "What is a load?")
    sample = sample_of(console)
    slot = {"state": "free", "instance": "", "models": ["reader/glossary"], "error": "out of memory"}
    sample["hosts"][0]["slots"][0] |= slot  # as after a failed load
    page = open_with(console, sample)
    turn_to(page, "Cluster")
    row = page.get_by_role("region", name="Slots of").locator("tbody tr").first
    expect(row).to_contain_text("reader/glossary failed to load: out of memory")
    assert_accessible_and_fits(page)
    page.unroute_all(behavior="ignoreErrors")


def test_loading_worker_is_shown_with_its_pair(console: Console) -> None:
    chat(console.open(console.reader), "What is a pair?")
    sample = sample_of(console)
    # As the scheduler reports it in a larger cluster.
    sample["instances"][0] |= {"state": "loading", "loaded": 0.4, "moves": [["prefill-7", 3, 1.5]]}
    page = open_with(console, sample)
    turn_to(page, "Cluster")
    pairs = page.get_by_role("region", name="Live pairs")
    expect(pairs).to_contain_text("prefill-7")
    expect(pairs).to_contain_text("loading, 40%")
    assert_accessible_and_fits(page)
    page.unroute_all(behavior="ignoreErrors")
