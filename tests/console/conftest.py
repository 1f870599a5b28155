"""A platform with two tenants, and Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, ViewportSize, expect, sync_playwright

from examples.glossary.terms import FOLDER
from tests.support.platform import Platform, running_platform

SMALL = ("--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1")
MODEL = Path(FOLDER) / "model"
DESKTOP: ViewportSize = {"width": 1200, "height": 800}
WAIT_MS = 60_000  # the browser and the platform share a busy machine
CHROMIUMS = "chromium-headless-shell", "chromium"  # the first draws with half the CPU
CHROMIUM = next(filter(None, map(shutil.which, CHROMIUMS)), CHROMIUMS[0])  # where it is missing, Playwright says so


@dataclass(slots=True)
class Console:
    """The console of a platform: ``reader`` has a model, ``other`` has none."""

    platform: Platform
    browser: BrowserContext  # of all tests: it keeps the console's scripts
    reader: str
    other: str
    errors: list[str] = field(default_factory=list)

    def open(self, key: str) -> Page:
        """The overview, after signing in; errors of the browser's console are kept."""
        page = self.browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(f"{self.platform.http}/console")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_text("Models at zero").wait_for()
        return page


@pytest.fixture(scope="package")
def running_console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    expect.set_options(timeout=WAIT_MS)
    with running_platform(tmp_path_factory.mktemp("platform") / "home", SMALL) as platform, sync_playwright() as driver:
        reader, other = platform.tenant("reader"), platform.tenant("other")
        platform.upload(reader, MODEL, "glossary")
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield Console(platform, browser.new_context(viewport=DESKTOP), reader, other)
        browser.close()


@pytest.fixture
def console(running_console: Console) -> Iterator[Console]:
    """The shared console; a test ends without an error in the browser's."""
    running_console.errors.clear()
    yield running_console
    for page in running_console.browser.pages:
        page.close()
    assert running_console.errors == []
