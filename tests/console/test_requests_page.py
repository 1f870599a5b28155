"""The page of requests: what a chat leaves in the ledger, where its time went, and nothing of other tenants."""

from __future__ import annotations

from base64 import b64encode

import pytest
from playwright.sync_api import Page, Route, expect

from tests.console.conftest import Console
from tests.console.test_console import HOSTILE, PHONE, assert_accessible_and_fits, chat, turn_to
from tests.support.wait import wait_until

pytestmark = pytest.mark.e2e
EDGES = """async (address) => {
    const picture = new Image();
    picture.src = address;
    await picture.decode();
    const context = document.createElement("canvas").getContext("2d");
    context.canvas.width = picture.width;
    context.drawImage(picture, 0, 0);
    return [3, picture.width - 4].map((x) => context.getImageData(x, 15, 1, 1).data[0]);
}"""


def rows(page: Page) -> list[str]:
    return page.get_by_role("region", name="Requests").locator("tbody tr").all_inner_texts()


def with_one_request(route: Route) -> None:
    """The list, a request per page."""
    route.continue_(url=route.request.url.replace("limit=50", "limit=1"))


def test_chat_is_listed_with_its_timeline(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, "What is a timeline?")
    page.get_by_role("link", name="Where its time went").click()
    phases = page.get_by_role("region", name="Phases")
    for phase in ("prepare", "queue", "prefill", "decode"):
        expect(phases.get_by_role("row", name=phase).first).to_be_visible()
    expect(page.locator(".timeline rect").first).to_be_visible()
    expect(page.get_by_role("region", name="Decisions")).to_contain_text("prefill on")
    expect(page.locator(".status")).to_have_text("ok")
    assert "What is a timeline?" not in page.content()
    request_id = page.get_by_role("heading", level=2).first.inner_text()
    page.get_by_role("link", name="All requests").click()
    listed = page.get_by_role("region", name="Requests")
    expect(listed.get_by_role("row", name=request_id)).to_contain_text("reader/glossary")
    with console.platform.admin() as admin:
        ids = {each["id"] for each in admin.call("GET", "/v1/requests?limit=500")["data"]}
    assert request_id in ids


def test_request_took_its_preparation_too(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, "What is preparation?")
    page.get_by_role("link", name="Where its time went").click()
    expect(page.get_by_role("region", name="Phases").get_by_role("row", name="prepare")).to_be_visible()
    request_id = page.get_by_role("heading", level=2).first.inner_text()
    with console.platform.admin() as admin:
        request = admin.call("GET", f"/v1/requests/{request_id}")
        phases = admin.call("GET", f"/v1/requests/{request_id}/explain")["phases"]
    begin = min(phase["begin_unix_us"] for phase in phases)
    end = max(phase["end_unix_us"] for phase in phases)
    assert request["opened_unix_us"] == begin
    assert request["ended_unix_us"] >= end


def test_failed_request_tells_its_error(console: Console) -> None:
    """The timeline of a failed request has its error, here with a message that a page must not run."""
    page = console.open(console.reader)
    chat(page, "What is a failure?")
    link = page.get_by_role("link", name="Where its time went")
    failure = {"name": "error", "where": "gateway-0", "detail": HOSTILE}

    def with_failure(route: Route) -> None:
        answer = route.fetch().json()
        if "phases" in answer:
            end = max(phase["end_unix_us"] for phase in answer["phases"])
            answer["phases"].append(failure | {"begin_unix_us": end, "end_unix_us": end})
        else:
            answer |= {"status": "error", "causes": ["error"]}
        route.fulfill(json=answer)

    page.route("**/v1/requests/**", with_failure)
    link.click()
    expect(page.locator("p.error")).to_have_text(f"Error: {HOSTILE}")
    assert page.locator("img").count() == 0
    assert_accessible_and_fits(page)


def test_model_and_status_select(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, "What is a model?")
    turn_to(page, "Requests")
    page.get_by_label("Status").select_option("ok")
    expect(page.get_by_role("region", name="Requests").locator("tbody tr").first).to_contain_text("ok")
    page.get_by_label("Status").select_option("gateway_lost")
    page.get_by_text("No such request").wait_for()
    page.get_by_label("Status").select_option("")
    page.get_by_label("Model").fill("reader/none")
    page.get_by_label("Model").blur()
    page.get_by_text("No such request").wait_for()
    page.get_by_label("Model").fill("reader/glossary")
    page.get_by_label("Model").blur()
    expect(page.get_by_role("region", name="Requests").locator("tbody tr").first).to_contain_text("reader/glossary")


def test_answer_slower_than_the_period_of_the_list_is_shown(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, "What is patience?")
    held: list[Route] = []
    page.route("**/v1/requests?*", lambda route: held.append(route))
    page.clock.install()
    turn_to(page, "Requests")
    wait_until(lambda: page.evaluate("true") and held, "the list's call")
    page.clock.run_for(11_000)
    assert page.evaluate("true") and len(held) == 1
    held[0].continue_()
    expect(page.get_by_role("region", name="Requests")).to_be_visible()
    page.clock.run_for(5_000)
    wait_until(lambda: page.evaluate("true") and held[1:], "the list's next call")


def test_older_page_and_back(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, "What is a page?")
    chat(page, "And the next?")
    page.route("**/v1/requests?*", with_one_request)
    turn_to(page, "Requests")
    expect(page.get_by_role("region", name="Requests").locator("tbody tr")).to_have_count(1)
    (newest,) = rows(page)
    page.get_by_role("button", name="Older").click()
    expect(page.get_by_role("region", name="Requests")).not_to_contain_text(newest.split()[0])
    page.get_by_role("button", name="Newer").click()
    expect(page.get_by_role("region", name="Requests")).to_contain_text(newest.split()[0])


def test_tenant_sees_no_request_of_another(console: Console) -> None:
    reading = console.open(console.reader)
    chat(reading, "What is a secret?")
    reading.get_by_role("link", name="Where its time went").click()
    reading.get_by_role("region", name="Phases").wait_for()
    request_id = reading.get_by_role("heading", level=2).first.inner_text()
    page = console.open(console.other)
    turn_to(page, "Requests")
    page.get_by_text("No request yet").wait_for()
    assert "reader" not in page.content()
    page.goto(f"{console.platform.http}/console#/requests/{request_id}")
    expect(page.get_by_role("alert")).to_contain_text("not found")
    assert "glossary" not in page.content()
    console.errors[:] = [each for each in console.errors if "404" not in each]  # Chromium tells of every refusal


def test_lost_timeline_is_explained(console: Console) -> None:
    """The scheduler has forgotten the request, the ledger has not."""
    page = console.open(console.reader)
    chat(page, "What is memory?")
    page.route("**/explain", lambda route: route.fulfill(status=404, json={"error": {"message": "no recent request"}}))
    page.get_by_role("link", name="Where its time went").click()
    page.get_by_text("No timeline: no recent request").wait_for()
    expect(page.locator("dl")).to_contain_text("reader/glossary")
    console.errors[:] = [each for each in console.errors if "404" not in each]


def test_other_errors_of_a_timeline_are_shown_as_they_are(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, "What is a scheduler?")
    down = {"error": {"message": "the scheduler does not answer"}}
    page.route("**/explain", lambda route: route.fulfill(status=503, json=down))
    page.get_by_role("link", name="Where its time went").click()
    expect(page.get_by_role("alert")).to_have_text("the scheduler does not answer")
    expect(page.get_by_text("2,048")).to_have_count(0)
    console.errors[:] = [each for each in console.errors if "503" not in each]


def test_timeline_of_a_running_request_grows(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, "What is growth?")
    link = page.get_by_role("link", name="Where its time went")
    with console.platform.admin() as admin:
        request = admin.call("GET", f"/v1/requests/{str(link.get_attribute('href')).rpartition('/')[2]}")
    request |= {"status": "running", "ended_unix_us": None, "causes": []}
    page.route("**/v1/requests/*", lambda route: route.fulfill(json=request))
    empty = {"object": "explanation", "phases": [], "decisions": []}
    page.route("**/explain", lambda route: route.fulfill(json=empty), times=1)
    page.clock.install()
    link.click()
    page.get_by_text("No phase of it has ended.").wait_for()
    page.clock.run_for(5_000)
    expect(page.get_by_role("region", name="Phases")).to_be_visible()


def test_wide_table_has_a_visible_edge_where_it_goes_on(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, "What is an edge?")
    page.route("**/v1/requests?*", with_one_request)  # lower than the screen, so that the header covers nothing of it
    page.set_viewport_size(PHONE)
    turn_to(page, "Requests")
    table = page.get_by_role("region", name="Requests")

    def brightness() -> list[int]:
        """Brightness of the table at its left and at its right edge, above the titles."""
        picture = b64encode(table.screenshot()).decode()
        return list(page.evaluate(EDGES, f"data:image/png;base64,{picture}"))

    assert table.evaluate("each => each.scrollWidth > each.clientWidth")
    left, right = brightness()
    assert right < left - 20
    table.evaluate("each => { each.scrollLeft = each.scrollWidth; }")
    left, right = brightness()
    assert left < right - 20
    page.set_viewport_size({"width": 2000, "height": 800})
    left, right = brightness()
    assert left == right


def test_hostile_names_are_text(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, HOSTILE)

    def with_hostile_names(route: Route) -> None:
        """Names that the gateway would refuse."""
        listed = route.fetch().json()
        listed["data"] = [each | {"id": HOSTILE, "model": HOSTILE} for each in listed["data"]]
        route.fulfill(json=listed)

    page.route("**/v1/requests?*", with_hostile_names)
    turn_to(page, "Requests")
    expect(page.get_by_role("region", name="Requests").locator("tbody tr").first).to_contain_text(HOSTILE)
    assert page.locator("img").count() == 0


def test_pages_of_requests_are_accessible_and_fit(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, "What is a chunk?")
    page.get_by_role("link", name="Where its time went").click()
    page.get_by_role("region", name="Phases").wait_for()
    assert_accessible_and_fits(page)
    turn_to(page, "Requests")
    page.get_by_role("region", name="Requests").wait_for()
    assert_accessible_and_fits(page)
