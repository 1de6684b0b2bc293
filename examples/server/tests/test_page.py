"""The page in a browser: a prompt is typed, tokens come, and pages of the cache fill."""

from __future__ import annotations

import shutil

import pytest
from servers import Running

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def server(llama):
    running = Running(llama.folder, "--pages", "64")
    yield running
    running.end()


@pytest.fixture(params=["light", "dark"])
def page(request, server):
    with sync_api.sync_playwright() as playwright:
        # The sandbox of Debian's browser refuses to run as root.
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(color_scheme=request.param)
        page.goto(server.url)
        yield page
        browser.close()


@pytest.mark.parametrize("chat", [False, True])
def test_tokens_and_pages(page, server, chat):
    page.fill("#prompt", "In the beginning")
    page.set_checked("#chat", chat)
    page.fill("#tokens", "400")
    page.click("#go")
    page.wait_for_selector("#pages .used")
    page.wait_for_function("document.getElementById('status').textContent.startsWith('400 ')")
    assert len(page.inner_text("#text")) > 100
    assert page.locator("#pages i").count() == 64
    page.wait_for_selector("#pages .kept")
    server.wait_until_idle()


def test_stop(page, server):
    page.wait_for_selector("#go:enabled")
    page.evaluate("get('go').click(); get('stop').click()")  # before the last token can come
    page.wait_for_function("document.getElementById('status').textContent == 'stopped'")
    server.wait_until_idle()


def test_an_error_is_shown(page):
    page.fill("#tokens", "9999")
    page.click("#go")
    page.wait_for_function("document.getElementById('status').textContent.includes('max_tokens')")
