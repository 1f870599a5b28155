"""The console as its users have it: sign-in, live figures, a chat, its cost; nothing of other tenants."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Locator, Page, Route, ViewportSize, expect

from tests.console.conftest import DESKTOP, MODEL, Console
from tests.support.wait import wait_until
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.errors import ApiError

pytestmark = pytest.mark.e2e
AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
PHONE: ViewportSize = {"width": 360, "height": 800}
LOOKS: tuple[tuple[Literal["light", "dark"], ViewportSize], ...] = (
    ("light", DESKTOP),
    ("dark", DESKTOP),
    ("light", PHONE),
)
# Keeps what the page shows of relays, as one that has ended stays there for seconds only.
NOTE_RELAYS = """() => {
    window.relays = "";
    const note = () => { window.relays += document.querySelector("[aria-label=Relays]")?.innerText ?? ""; };
    new MutationObserver(note).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
HOSTILE = "<img src=x onerror=alert(1)>"
PAGES = ("Overview", "Models", "Cluster", "Requests", "Playground", "Keys and limits", "Usage and bill", "Events")


NOTHING = (
    ("Models", "There is no model yet"),
    ("Cluster", "Hosts are the operator's"),
    ("Requests", "No request yet"),
    ("Playground", "There is no model yet"),
    ("Usage and bill", "Nothing was used yet"),
    ("Keys and limits", "Last used"),
    ("Events", "sign in with the admin key"),
)


def turn_to(page: Page, name: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=name).click()
    page.get_by_role("heading", name=name, level=1).wait_for()


def chat(page: Page, prompt: str) -> None:
    turn_to(page, "Playground")
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#figures")).to_contain_text("tokens/s", timeout=30_000)


def card(page: Page, label: str) -> Locator:
    return page.locator(".card", has=page.get_by_text(label, exact=True)).locator("strong")


def total(page: Page, column: str) -> str:
    """The total of a column of the usage page."""
    titles = page.locator("thead th").all_inner_texts()
    return page.locator("tfoot tr > *").nth(titles.index(column)).inner_text()


def ledger_sums(console: Console, tenant: str) -> tuple[int, int, int]:
    """Requests, output tokens and nano-dollars of a tenant, from the ledger's file."""
    query = (
        "SELECT count(DISTINCT request_id), sum(num_output_tokens), sum(cost_nano) FROM ledger"
        " JOIN tenants USING (tenant_id) WHERE name = ?"
    )
    with closing(sqlite3.connect(console.platform.home.path / "ledger.db")) as database:
        num_requests, num_tokens, cost_nano = database.execute(query, (tenant,)).fetchone()
        return num_requests, num_tokens or 0, cost_nano or 0


def assert_accessible_and_fits(page: Page) -> None:
    """axe finds no serious issue, and nothing is wider than the page: light and dark, on a desktop and on a phone."""
    if not page.evaluate("() => window.axe !== undefined"):
        page.evaluate(AXE)
    for scheme, size in LOOKS:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(size)
        violations = page.evaluate("axe.run().then((result) => result.violations)")
        assert [each for each in violations if each["impact"] in ("serious", "critical")] == [], (
            page.url,
            scheme,
            size,
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], (page.url, scheme)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(DESKTOP)


def other_weights(folder: Path) -> Path:
    """The model with a bit of its weights changed: no host has its pack."""
    shutil.copytree(MODEL, folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_upload_key_chat_and_a_bill_that_equals_the_ledger(console: Console, tmp_path: Path) -> None:
    admin_page = console.open(console.platform.home.admin_key())
    turn_to(admin_page, "Keys and limits")
    new_tenant = admin_page.locator("form", has=admin_page.get_by_role("button", name="Create tenant"))
    new_tenant.get_by_label("Name").fill("payer")
    new_tenant.get_by_label("Budget, $").fill("1.5")
    new_tenant.get_by_role("button").click()
    expect(admin_page.get_by_role("region", name="Tenants").locator("tr", has_text="payer")).to_contain_text("$1.5")
    admin_page.get_by_label("Tenant").first.select_option("payer")
    admin_page.get_by_role("button", name="Create key").click()
    key = admin_page.locator("#new-key").inner_text()
    console.platform.upload(key, other_weights(tmp_path / "terms"), "terms")
    watching = console.open(key)
    watching.evaluate(NOTE_RELAYS)
    page = console.open(key)
    chat(page, "What is a relay?")
    wait_until(lambda: "payer/terms" in watching.evaluate("window.relays"), "a relay on the page")
    assert page.locator("#answer").inner_text()
    turn_to(page, "Overview")
    expect(card(page, "Models awake")).to_have_text("1")
    expect(card(page, "TTFT P50")).to_contain_text("s")
    page.get_by_label("Plots of the last").select_option("24 hours")
    expect(page.locator(".plot canvas").first).to_be_visible()
    turn_to(page, "Models")
    page.get_by_role("link", name="payer/terms").click()
    expect(page.get_by_role("region", name="Decisions")).to_contain_text("payer/terms")  # to load it
    wait_until(lambda: ledger_sums(console, "payer")[0] == 1, "the settlement of the chat")
    _, num_tokens, cost_nano = ledger_sums(console, "payer")
    assert cost_nano > 0
    turn_to(page, "Usage and bill")
    for group in ("day", "model", "key"):
        page.get_by_label("Sums by").select_option(group)
        expect(page.locator("thead th").first).to_have_text(group.capitalize())
        assert total(page, "Cost, $") == f"{cost_nano / 1e9:.9f}"
        assert total(page, "Output tokens") == f"{num_tokens:,}"
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as CSV").click()
    assert saved.value.path().read_text().splitlines()[1].endswith(f'"{cost_nano / 1e9:.9f}"')


def test_page_has_one_header(console: Console) -> None:
    page = console.open(console.reader)
    assert page.locator("header").count() == 1
    page.reload()
    page.get_by_text("Models at zero").wait_for()
    assert page.locator("header").count() == 1
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").wait_for()
    assert page.locator("header").count() == 0
    page.reload()
    page.get_by_label("API key").wait_for()
    assert page.locator("header").count() == 0


def test_models_are_listed_found_and_set(console: Console) -> None:
    page = console.open(console.reader)
    chat(page, "What is a slot?")  # the model is awake now

    def with_many(route: Route) -> None:
        """As many models as a large tenant has."""
        models = route.fetch().json()
        first = models["data"][0]
        models["data"] = [first, *(first | {"id": f"reader/model-{number:03}"} for number in range(200))]
        route.fulfill(json=models)

    page.route("**/v1/models", with_many)
    turn_to(page, "Models")
    page.get_by_text("201 of 201 models").wait_for()
    page.get_by_label("Name contains").fill("gloss")
    page.get_by_text("1 of 201 models").wait_for()
    expect(page.get_by_role("row", name="reader/glossary")).to_contain_text(" ready")
    page.get_by_role("link", name="reader/glossary").click()
    expect(page.get_by_role("region", name="Instances").locator("tbody tr").first).to_contain_text("ready")
    expect(page.locator(".timeline li").first).to_be_visible()
    age = page.get_by_role("region", name="Instances").locator("tbody td.number").first
    shown_age = age.inner_text()
    page.get_by_label("Idle timeout, s").fill("77")
    expect(age).not_to_have_text(shown_age)  # a later sample leaves the field as it is
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Saved.").wait_for()
    with console.platform.admin() as admin:
        assert admin.call("GET", "/v1/models/reader/glossary")["idle_timeout_s"] == 77


def test_key_is_made_changed_rotated_and_revoked(console: Console) -> None:
    page = console.open(console.other)
    turn_to(page, "Keys and limits")
    making = page.locator("form", has=page.get_by_role("button", name="Create key"))
    making.get_by_label("Name").fill(HOSTILE)
    making.get_by_label("Requests per minute").fill("3")
    making.get_by_role("button", name="Create key").click()
    key = page.locator("#new-key").inner_text()
    row = page.get_by_role("row").filter(has_text=HOSTILE)
    expect(row).to_contain_text("3 requests/min")
    assert page.locator("img").count() == 0
    with GatewayClient(console.platform.http, key) as client:
        client.call("GET", "/v1/models")
        changing = page.locator("form", has=page.get_by_role("button", name="Change key"))
        changing.locator("select[name=key]").select_option(key.split("-")[1])
        expect(changing.get_by_label("Requests per minute")).to_have_value("3")
        changing.get_by_label("Budget, $").fill("2")
        changing.get_by_label("Budget period").select_option("day")
        changing.get_by_label("State").select_option("paused")
        changing.get_by_role("button", name="Change key").click()
        expect(row).to_contain_text("3 requests/min, $2/day")
        expect(row).to_contain_text("paused")
        wait_until(lambda: is_refused(client, 403), "the refusal of the paused key")
        row.get_by_role("button", name="Rotate").click()
        row.get_by_role("button", name="Yes").click()
        expect(page.locator("#new-key")).not_to_have_text(key)
        row.get_by_role("button", name="Revoke").click()
        row.get_by_role("button", name="Yes").click()
        expect(row).to_contain_text("revoked")
        wait_until(lambda: is_refused(client, 401), "the refusal of the revoked key")


def is_refused(client: GatewayClient, status: int) -> bool:
    try:
        client.call("GET", "/v1/models")
    except ApiError as error:
        return error.status == status
    return False


def test_admin_sees_hosts_slots_copies_and_events(console: Console) -> None:
    page = console.open(console.platform.home.admin_key())
    turn_to(page, "Cluster")
    expect(card(page, "Hosts")).to_have_text("1")
    chat(console.open(console.reader), "What is a host?")  # after which the slot is kept for ten seconds
    slots = page.get_by_role("region", name="Slots of")
    expect(slots.locator("tbody tr", has_text="ready").first).to_contain_text("reader/glossary")
    expect(page.get_by_role("region", name="Copies of")).to_contain_text("100%")
    slots.get_by_role("link", name="reader/glossary").first.click()
    page.get_by_role("heading", name="reader/glossary").wait_for()
    turn_to(page, "Events")
    expect(page.get_by_role("region", name="Events")).to_contain_text("instance.ready")
    page.get_by_label("Kind").select_option("model")
    expect(page.get_by_role("region", name="Events")).not_to_contain_text("instance.ready")
    expect(page.get_by_role("region", name="Events")).to_contain_text("model.published")


def test_tenant_sees_nothing_of_another(console: Console) -> None:
    chat(console.open(console.reader), "What is a pack?")
    page = console.open(console.other)
    for figure in ("Models awake", "Models at zero", "Requests/s", "Tokens/s", "Running"):
        assert float(card(page, figure).inner_text()) == 0, figure
    expect(card(page, "TTFT P50")).to_have_text("none in the last minute")
    for name, text in NOTHING:
        turn_to(page, name)
        page.get_by_text(text).wait_for()
        assert "reader" not in page.content()
        assert "glossary" not in page.content()


def test_live_stream_of_a_tenant_has_no_word_of_another(console: Console) -> None:
    """What the page would not show must not be sent, either."""
    page = console.open(console.other)
    sample = page.evaluate(
        """async (key) => {
            const response = await fetch("/console/live", { headers: { authorization: `Bearer ${key}` } });
            const { value } = await response.body.getReader().read();
            return new TextDecoder().decode(value);
        }""",
        console.other,
    )
    assert json.loads(sample.removeprefix("data: "))["tenant"] == "other"
    assert "reader" not in sample
    assert "glossary" not in sample


def test_admin_sees_the_models_of_all(console: Console) -> None:
    page = console.open(console.platform.home.admin_key())
    with console.platform.admin() as admin:
        num_models = len(admin.call("GET", "/v1/models")["data"])
    assert int(card(page, "Models awake").inner_text()) + int(card(page, "Models at zero").inner_text()) == num_models
    turn_to(page, "Playground")
    page.get_by_text("The admin key cannot chat").wait_for()


def test_enter_sends_the_prompt_and_begins_no_line(console: Console) -> None:
    page = console.open(console.reader)
    turn_to(page, "Playground")
    prompt = page.get_by_label("Prompt")
    prompt.press_sequentially("first")
    prompt.press("Shift+Enter")
    prompt.press_sequentially("second")
    prompt.press("Enter")
    expect(page.locator("#figures")).to_contain_text("tokens/s", timeout=30_000)
    assert prompt.input_value() == "first\nsecond"


def test_unknown_address_shows_no_other_page(console: Console) -> None:
    page = console.open(console.reader)
    page.evaluate("location.hash = '#/nosuch'")
    page.get_by_role("heading", name="No such page", level=1).wait_for()
    assert page.locator("nav [aria-current]").count() == 0
    turn_to(page, "Models")


def test_hostile_prompts_and_model_names_are_text(console: Console) -> None:
    page = console.open(console.reader)

    def with_hostile_name(route: Route) -> None:
        """A model with a name that the gateway would refuse."""
        models = route.fetch().json()
        models["data"].append(models["data"][0] | {"id": HOSTILE})
        route.fulfill(json=models)

    page.route("**/v1/models", with_hostile_name)
    chat(page, HOSTILE)
    assert page.get_by_label("Model").locator("option").all_inner_texts() == ["reader/glossary", HOSTILE]
    assert HOSTILE in page.locator("#curl").inner_text()
    assert HOSTILE in page.locator("#python").inner_text()
    assert page.locator("img").count() == 0


def test_wrong_key_is_refused_with_its_reason_and_no_address_has_a_key(console: Console) -> None:
    page = console.open(console.reader)
    addresses = []
    page.on("request", lambda request: addresses.append(request.url))
    page.reload()
    page.get_by_text("Models at zero").wait_for()  # the session storage has the key
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").fill("tr-wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("invalid or revoked API key")
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0
    assert addresses
    assert not any(console.reader in address or "tr-wrong" in address for address in addresses)
    console.errors[:] = [each for each in console.errors if "401" not in each]  # Chromium tells of every refusal


def test_pages_are_accessible_and_fit(console: Console) -> None:
    page = console.open(console.reader)
    for name in PAGES:
        turn_to(page, name)
        expect(page.get_by_text("Loading.")).to_have_count(0)
        assert_accessible_and_fits(page)
