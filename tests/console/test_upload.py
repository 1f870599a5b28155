"""An upload in the browser: a dropped folder becomes a model; what breaks off goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Locator, Page, Request, Route, expect

from tests.console.conftest import MODEL, Console
from tests.console.test_console import (
    assert_accessible_and_fits,
    chat,
    ledger_sums,
    other_weights,
    total,
    turn_to,
)
from tests.support.wait import wait_until
from torchrelay.modelspec.quantization import INT8_PER_OUTPUT

pytestmark = pytest.mark.e2e
WEIGHTS = "**/v1/uploads/*/files/model.safetensors"
FIRST_PART_BYTES = 1 << 20
HOSTILE = "<img src=x onerror=alert(1)>.bin"
NOTE_END_OF_DRAG = """() => {
    window.endOfDrag = "";
    for (const type of ["drop", "dragleave"])
        addEventListener(type, () => { window.endOfDrag = type; }, { capture: true, once: true });
}"""
_numbers = count()


class Sender(NamedTuple):
    tenant: str
    key: str


@pytest.fixture
def sender(console: Console) -> Sender:
    """A tenant without models."""
    tenant = f"sender-{next(_numbers)}"
    return Sender(tenant, console.platform.tenant(tenant))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, with a file that is not part of a model."""
    folder = tmp_path / "My Glossary"
    shutil.copytree(MODEL, folder)
    (folder / HOSTILE).write_text("not part of a model")
    return folder


def drop(page: Page, folder: Path) -> None:
    """Drops the folder as a file manager does, again if Chromium ends the drag as one that the page did not accept.

    It does so if it looks for the target anew at the drop, because the page has not accepted that target yet.
    """
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(folder)], "dragOperationsMask": 1}

    def is_dropped() -> bool:
        page.evaluate(NOTE_END_OF_DRAG)
        for kind in ("dragEnter", "dragOver", "drop"):
            session.send("Input.dispatchDragEvent", {"type": kind, "x": 100, "y": 300, "data": data})
        wait_until(lambda: page.evaluate("window.endOfDrag"), "the end of the drag")
        return bool(page.evaluate("window.endOfDrag") == "drop")

    wait_until(is_dropped, "the drop")
    session.detach()


def area(page: Page) -> Locator:
    return page.get_by_role("region", name="Upload", exact=True)


def parts_sent(page: Page) -> list[tuple[str, int]]:
    """File and offset of each part that the page sends from now on."""
    sent: list[tuple[str, int]] = []

    def note(request: Request) -> None:
        if request.method == "PUT":
            sent.append((request.url.rpartition("/")[2], int(request.headers["upload-offset"])))

    page.on("request", note)
    return sent


def send(page: Page, folder: Path, name: str, quantize: str = "") -> None:
    turn_to(page, "Models")
    drop(page, folder)
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Weights of linear layers").select_option(quantize)
    page.get_by_role("button", name="Upload", exact=True).click()


def send_first_part(page: Page, folder: Path, name: str, quantize: str = "") -> list[Route]:
    """Uploads until one part of the weights has arrived; returns the call of the next, which is held back."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        if int(route.request.headers["upload-offset"]) == 0:
            route.continue_()
        else:
            held.append(route)

    page.route(WEIGHTS, hold)
    send(page, folder, name, quantize)
    expect(area(page).get_by_role("row", name="model.safetensors")).to_contain_text("29%")
    wait_until(lambda: page.evaluate("true") and held, "the second part")
    return held


def expect_published(page: Page, model: str) -> None:
    expect(area(page).get_by_text(f"{model} is published.")).to_be_visible(timeout=60_000)


def test_dropped_folder_becomes_a_model_that_chats_and_is_billed(
    console: Console, sender: Sender, folder: Path
) -> None:
    page = console.open(sender.key)
    sent = parts_sent(page)
    turn_to(page, "Models")
    drop(page, folder)
    expect(page.get_by_label("Name", exact=True)).to_have_value("my-glossary")
    expect(area(page)).to_contain_text(f"not sent: {HOSTILE}")
    expect(area(page)).to_contain_text("3.61 MB of weights,")
    assert page.locator("img").count() == 0
    page.get_by_role("button", name="Upload", exact=True).click()
    model = f"{sender.tenant}/my-glossary"
    expect_published(page, model)
    assert {path for path, _ in sent} == {path.name for path in MODEL.iterdir()}
    page.get_by_role("region", name="Models").get_by_role("link", name=model).click()
    page.get_by_role("heading", name=model).wait_for()
    chat(page, "What is a relay?")
    assert page.locator("#answer").inner_text()
    wait_until(lambda: ledger_sums(console, sender.tenant)[0] == 1, "the settlement of the chat")
    turn_to(page, "Usage and bill")
    expect(page.locator("tfoot")).to_be_visible()
    assert total(page, "Cost, $") == f"{ledger_sums(console, sender.tenant)[2] / 1e9:.9f}"


def test_upload_goes_on_after_a_reload_when_the_folder_is_dropped_again(
    console: Console, sender: Sender, folder: Path
) -> None:
    page = console.open(sender.key)
    send_first_part(page, folder, "terms")
    page.on("dialog", lambda dialog: dialog.accept())  # the browser asks before it leaves a page that sends
    page.reload()
    page.unroute(WEIGHTS)
    unfinished = page.get_by_role("region", name="Unfinished uploads")
    expect(unfinished).to_contain_text(f"{sender.tenant}/terms")
    page.get_by_text("Drop the folder again to continue").wait_for()
    sent = parts_sent(page)
    drop(page, folder)  # under another name than the folder's: the gateway knows it
    expect_published(page, f"{sender.tenant}/terms")
    assert sent[0] == ("model.safetensors", FIRST_PART_BYTES)
    assert {path for path, _ in sent} <= {"model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    expect(unfinished).to_have_count(0)


def test_quantized_upload_goes_on_in_its_tab_and_another_tab_asks(
    console: Console, sender: Sender, folder: Path
) -> None:
    page, model = console.open(sender.key), f"{sender.tenant}/small"
    send_first_part(page, folder, "small", "int8")
    page.on("dialog", lambda dialog: dialog.accept())
    page.reload()
    page.unroute(WEIGHTS)
    other = console.open(sender.key)
    turn_to(other, "Models")
    drop(other, folder)
    expect(other.get_by_label("Name", exact=True)).to_have_value(model)
    expect(other.get_by_label("Weights of linear layers")).to_have_value("")
    other.close()
    page.get_by_text("Drop the folder again to continue").wait_for()
    drop(page, folder)
    expect_published(page, model)
    with console.platform.admin() as admin:
        assert admin.call("GET", f"/v1/models/{model}")["dtype"] == "I8"


def forget_refusals_of_sizing(console: Console) -> None:
    """The form asks for the size of each folder; Chromium tells of every refusal."""
    console.errors[:] = [each for each in console.errors if "400" not in each]


def test_upload_that_cannot_be_quantized_is_kept_for_another_choice(
    console: Console, sender: Sender, folder: Path
) -> None:
    page = console.open(sender.key)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(INT8_PER_OUTPUT)}))
    send(page, folder, "small", "int8")
    expect(area(page).get_by_role("alert")).to_contain_text("the weights are quantized already")
    sent = parts_sent(page)
    drop(page, folder)
    expect(page.get_by_label("Name", exact=True)).to_have_value(f"{sender.tenant}/small")
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(area(page).get_by_role("alert")).to_contain_text("supported are I8")  # its weights are not what it says
    assert sent == []
    forget_refusals_of_sizing(console)


def test_folder_of_equal_sizes_and_other_weights_is_asked_for_its_name(
    console: Console, sender: Sender, folder: Path, tmp_path: Path
) -> None:
    """Two fine-tunes of a model have equal paths and sizes: only their digests tell them apart."""
    page = console.open(sender.key)
    send_first_part(page, folder, "support-v1")
    area(page).get_by_role("button", name="Stop").click()
    page.unroute(WEIGHTS)
    drop(page, other_weights(tmp_path / "support-v2"))
    expect(page.get_by_label("Name", exact=True)).to_have_value("support-v2")
    turn_to(page, "Cluster")  # the folder that was chosen is not of the page
    turn_to(page, "Models")
    page.get_by_role("button", name="Upload", exact=True).click()
    expect_published(page, f"{sender.tenant}/support-v2")
    with console.platform.admin() as admin:
        [open_upload] = [
            each for each in admin.call("GET", "/v1/uploads")["data"] if each["model"].startswith(f"{sender.tenant}/")
        ]
        assert open_upload["model"] == f"{sender.tenant}/support-v1"
        models = [each["id"] for each in admin.call("GET", "/v1/models")["data"]]
        assert f"{sender.tenant}/support-v1" not in models
        admin.call("DELETE", f"/v1/uploads/{open_upload['id']}")


def test_upload_goes_on_after_the_connection_broke(console: Console, sender: Sender, folder: Path) -> None:
    page = console.open(sender.key)
    sent = parts_sent(page)
    [held] = send_first_part(page, folder, "terms")
    page.context.set_offline(True)
    held.abort("connectionfailed")
    broken = area(page).get_by_text("The connection is broken. Trying again.")
    broken.wait_for()
    page.unroute(WEIGHTS)
    turn_to(page, "Cluster")  # the upload is not of the page
    turn_to(page, "Models")
    broken.wait_for()
    page.context.set_offline(False)
    expect_published(page, f"{sender.tenant}/terms")
    assert [offset for path, offset in sent if path == "model.safetensors"][:3] == [
        0,
        FIRST_PART_BYTES,
        FIRST_PART_BYTES,
    ]
    console.errors[:] = [
        each for each in console.errors if "net::ERR" not in each
    ]  # Chromium tells of lost connections


def test_upload_is_stopped_continued_and_aborted(console: Console, sender: Sender, folder: Path) -> None:
    page = console.open(sender.key)
    send_first_part(page, folder, "terms")
    area(page).get_by_role("button", name="Stop").click()
    page.unroute(WEIGHTS)
    area(page).get_by_role("button", name="Continue").click()
    expect_published(page, f"{sender.tenant}/terms")
    (folder / "generation_config.json").unlink()
    send_first_part(page, folder, "terms")
    expect(area(page).get_by_role("progressbar", name="model.safetensors")).to_be_visible()
    area(page).get_by_role("button", name="Stop").click()
    area(page).get_by_role("button", name="Abort").click()
    area(page).get_by_role("button", name="Yes").click()
    expect(area(page).get_by_role("progressbar")).to_have_count(0)
    with console.platform.admin() as admin:
        assert sender.tenant not in json.dumps(admin.call("GET", "/v1/uploads"))


def test_commit_that_the_platform_could_not_end_goes_on(console: Console, sender: Sender, folder: Path) -> None:
    """The gateway's last line tells of a fault of the platform: the upload stays open."""
    page = console.open(sender.key)
    lines = [
        {"error": {"message": "the param-store is down"}, "status": 503},
        {"error": {"message": "internal error during the commit"}, "status": 500},
    ]

    def fail(route: Route) -> None:
        route.fulfill(content_type="application/x-ndjson", body=json.dumps(lines.pop(0)) + "\n")

    page.route("**/commit", fail, times=len(lines))
    send(page, folder, "terms")
    expect(area(page).get_by_role("alert")).to_have_text("internal error during the commit")
    assert lines == []  # it went on by itself after the first
    expect(area(page).get_by_role("button", name="Abort")).to_be_visible()
    area(page).get_by_role("button", name="Continue").click()
    expect_published(page, f"{sender.tenant}/terms")


def test_upload_that_is_stopped_early_and_continued_runs_once(console: Console, sender: Sender, folder: Path) -> None:
    page = console.open(sender.key)
    turn_to(page, "Models")
    drop(page, folder)
    sent = parts_sent(page)
    held: list[Route] = []
    begun: list[str] = []
    page.on("request", lambda request: begun.append(request.url) if request.method == "POST" else None)
    is_held = True
    page.route("**/v1/models", lambda route: held.append(route) if is_held else route.continue_())
    page.get_by_role("button", name="Upload", exact=True).click()
    wait_until(lambda: page.evaluate("true") and held[1:], "the calls of the page and of the upload")
    area(page).get_by_role("button", name="Stop").click()
    area(page).get_by_role("button", name="Continue").click()
    is_held = False
    for route in held:
        route.continue_()
    expect_published(page, f"{sender.tenant}/my-glossary")
    names = [url.rpartition("/")[2] for url in begun]
    assert [name for name in names if name != "sizing"] == ["uploads", "commit"]
    assert len(sent) == len(set(sent))


def test_failed_abort_is_shown(console: Console, sender: Sender, folder: Path) -> None:
    page = console.open(sender.key)
    send_first_part(page, folder, "terms")
    area(page).get_by_role("button", name="Stop").click()
    down = {"error": {"message": "the param-store is down"}}
    page.route("**/v1/uploads/*", lambda route: route.fulfill(status=503, json=down), times=1)
    area(page).get_by_role("button", name="Abort").click()
    area(page).get_by_role("button", name="Yes").click()
    expect(area(page).get_by_role("alert")).to_have_text("the param-store is down")
    with console.platform.admin() as admin:
        [upload] = [
            each for each in admin.call("GET", "/v1/uploads")["data"] if each["model"] == f"{sender.tenant}/terms"
        ]
        admin.call("DELETE", f"/v1/uploads/{upload['id']}")
    area(page).get_by_role("button", name="Abort").click()
    area(page).get_by_role("button", name="Yes").click()
    expect(area(page).get_by_role("progressbar")).to_have_count(0)
    console.errors[:] = [each for each in console.errors if "503" not in each and "404" not in each]


def test_refusals_name_the_file_and_the_field(console: Console, sender: Sender, folder: Path) -> None:
    page = console.open(sender.key)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": HOSTILE, "architectures": [HOSTILE]}))
    send(page, folder, "terms")
    refusal = area(page).get_by_role("alert")
    expect(refusal).to_contain_text(HOSTILE)
    expect(refusal).to_contain_text("config.json")
    assert page.locator("img").count() == 0
    send(page, folder, "Not A Name/x")
    assert page.get_by_label("Name", exact=True).evaluate("field => field.validity.patternMismatch")
    (folder / "tokenizer.json").unlink()
    drop(page, folder)
    expect(area(page).get_by_role("alert")).to_contain_text("My Glossary has no tokenizer.json")
    drop(page, folder / "config.json")
    expect(area(page).get_by_role("alert")).to_contain_text("Drop the folder of a model, not a file.")
    forget_refusals_of_sizing(console)


def test_folder_is_chosen_by_the_keyboard_and_sent_by_the_admin(console: Console, sender: Sender, folder: Path) -> None:
    page = console.open(console.platform.home.admin_key())
    page.on("filechooser", lambda chooser: chooser.set_files(folder))
    turn_to(page, "Models")
    page.get_by_role("link", name="Changes").focus()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Upload a model")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_label("Name, TENANT/MODEL").fill(f"{sender.tenant}/terms")
    page.keyboard.press("Enter")
    expect_published(page, f"{sender.tenant}/terms")


def test_tenant_sees_no_upload_of_another_and_a_sign_out_ends_it(
    console: Console, sender: Sender, folder: Path
) -> None:
    page = console.open(sender.key)
    send_first_part(page, folder, "secret-terms")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").fill(console.other)
    page.get_by_role("button", name="Sign in").click()
    turn_to(page, "Models")
    page.get_by_text("There is no model yet").wait_for()
    drop(page, folder)  # of the same files
    expect(page.get_by_label("Name", exact=True)).to_have_value("my-glossary")
    assert "secret-terms" not in page.content()
    assert sender.tenant not in page.content()


def test_upload_is_accessible_and_fits(console: Console, sender: Sender, folder: Path) -> None:
    page = console.open(sender.key)
    turn_to(page, "Models")
    drop(page, folder)
    expect(page.get_by_label("Name", exact=True)).to_have_value("my-glossary")
    assert_accessible_and_fits(page)
    send_first_part(page, folder, "terms")
    assert_accessible_and_fits(page)
    page.get_by_role("button", name="Stop").click()
    assert_accessible_and_fits(page)
    page.on("dialog", lambda dialog: dialog.accept())
    page.reload()
    page.get_by_role("region", name="Unfinished uploads").wait_for()
    assert_accessible_and_fits(page)
