"""A model's page: versions and the return to them, settings, aliases, price, instances."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.console.conftest import MODEL, Console
from tests.console.test_console import assert_accessible_and_fits, chat

pytestmark = pytest.mark.e2e


def open_model(page: Page, model: str) -> None:
    page.evaluate("model => { location.hash = `#/models/${model}`; }", model)
    page.get_by_role("heading", name=model, exact=True).wait_for()
    expect(page.get_by_role("region", name="Versions")).to_be_visible()


def described(console: Console, model: str) -> dict[str, Any]:
    with console.platform.admin() as admin:
        return admin.call("GET", f"/v1/models/{model}")


@pytest.fixture(scope="module")
def author(running_console: Console, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A key of a tenant whose model `author/terms` has two versions."""
    key = running_console.platform.tenant("author")
    running_console.platform.upload(key, MODEL, "terms")
    folder = tmp_path_factory.mktemp("models") / "terms"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"top_k": 7}))
    running_console.platform.upload(key, folder, "terms")
    return key


def test_replaced_version_is_made_current_again(console: Console, author: str) -> None:
    page = console.open(author)
    open_model(page, "author/terms")
    current = described(console, "author/terms")["version"]
    versions = page.get_by_role("region", name="Versions").locator("tbody tr")
    expect(versions).to_have_count(2)
    expect(versions.nth(0)).to_contain_text("current")
    expect(versions.nth(0)).to_contain_text(current[:16])
    before = versions.nth(1).locator("th").inner_text()
    versions.nth(1).get_by_role("button", name="Roll back").click()
    versions.nth(1).get_by_role("button", name="Yes").click()
    expect(versions.nth(0)).to_contain_text(before)
    assert described(console, "author/terms")["version"].startswith(before)


def test_tenant_sets_engine_and_aliases(console: Console, author: str) -> None:
    page = console.open(author)
    open_model(page, "author/terms")
    page.get_by_label("Engine").select_option("torchrelay")
    page.get_by_label("Maximum instances per role").fill("3")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("Saved.").wait_for()
    page.get_by_label("Further names").fill("words, claude-terms")
    page.get_by_role("button", name="Set aliases").click()
    expect(page.get_by_label("Further names")).to_have_value("claude-terms, words")
    model = described(console, "author/terms")
    assert (model["engine"], model["max_instances"], model["idle_timeout_s"]) == ("torchrelay", 3, 0)
    page.get_by_label("Further names").fill("NO NAME")
    page.get_by_role("button", name="Set aliases").click()
    expect(page.get_by_role("alert")).to_contain_text("is not a valid name")
    assert page.get_by_role("button", name="Set price").count() == 0
    assert page.get_by_label("Minimum instances").count() == 0
    console.errors[:] = [each for each in console.errors if "400" not in each]  # Chromium tells of every refusal


def test_settings_keep_an_engine_on_several_gpus(console: Console, author: str) -> None:
    page = console.open(author)
    model = described(console, "author/terms") | {"engine": "vllm:2"}  # no worker of this platform has it

    def with_engine(route: Route) -> None:
        if route.request.method == "GET":
            route.fulfill(json=model)
        else:
            route.continue_()

    page.route("**/v1/models/author/terms", with_engine)
    open_model(page, "author/terms")
    expect(page.get_by_label("Engine")).to_have_value("vllm:2")
    page.get_by_label("Maximum instances per role").fill("4")
    with page.expect_request(lambda request: request.method == "PATCH") as sent:
        page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("Saved.").wait_for()
    assert sent.value.post_data_json == {"max_instances": 4}


def test_admin_sets_schedule_targets_and_price(console: Console, author: str) -> None:
    page = console.open(console.platform.home.admin_key())
    open_model(page, "author/terms")
    expect(page.locator("h2:text-is('Price') + div")).to_contain_text("default")  # above the form of a new price
    page.get_by_label("Scheduled minimum instances").fill("sat 01:00-02:00 Europe/Berlin = 1")
    page.get_by_label("TTFT target, standard, s").fill("2.5")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("Saved.").wait_for()
    model = described(console, "author/terms")
    assert (model["schedule"], model["standard_ttft_s"]) == (["sat 01:00-02:00 Europe/Berlin = 1"], 2.5)
    for label, dollars in (("Prompt", "0.2"), ("Cached prompt", "0.05"), ("Output", "0.8")):
        page.get_by_label(f"{label}, $ per million", exact=True).fill(dollars)
    page.get_by_role("button", name="Set price").click()
    row = page.get_by_role("region", name="Price").locator("tbody tr")
    expect(row).to_contain_text("of this model")
    expect(row).to_contain_text("$0.200$0.050$0.800in force")
    page.get_by_label("Scheduled minimum instances").fill("never")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("never")
    console.errors[:] = [each for each in console.errors if "400" not in each]  # Chromium tells of every refusal


def test_page_of_another_tenants_model_tells_nothing(console: Console, author: str) -> None:
    page = console.open(console.other)
    page.evaluate("() => { location.hash = '#/models/author/terms'; }")
    expect(page.get_by_role("alert").first).to_contain_text("does not exist")
    assert page.get_by_role("region").count() == 0
    console.errors[:] = [each for each in console.errors if "404" not in each]  # Chromium tells of every refusal


def test_model_page_is_accessible_and_fits(console: Console, author: str) -> None:
    chat(console.open(console.reader), "What is a relay?")
    page = console.open(console.platform.home.admin_key())
    open_model(page, "reader/glossary")
    page.locator(".timeline").first.wait_for()
    page.get_by_role("region", name="Price").wait_for()
    assert_accessible_and_fits(page)


def test_size_and_speed_are_shown_once_a_model_has_run(console: Console) -> None:
    page = console.open(console.reader)
    open_model(page, "reader/glossary")
    expect(page.get_by_role("heading", name="Size and speed")).to_be_visible()
    expect(page.get_by_text("KV per token")).to_be_visible()
    chat(page, "What is a relay?")
    open_model(page, "reader/glossary")
    expect(page.get_by_text(re.compile("about [0-9.,]+ tokens/s"))).to_be_visible()
    assert_accessible_and_fits(page)
