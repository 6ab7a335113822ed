"""What the tests in a real browser share: Chromium, driven by playwright, where both are installed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OWN = ("http://127.0.0.1:", "file:", "data:", "blob:")
PATIENCE = 120_000
"""Milliseconds that a step may take on a busy machine; nothing waits that long if all is well."""


@contextmanager
def chromium(*options: str) -> Iterator[Any]:
    """A browser. Skips the test, with what to install, where there is none."""
    driver = pytest.importorskip("playwright.sync_api", reason='no playwright: pip install -e ".[dev]"')
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt install chromium")
    with driver.sync_playwright() as found:
        browser = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *options], timeout=PATIENCE)
        yield browser
        browser.close()


@contextmanager
def clean_page(browser: Any, own: tuple[str, ...] = OWN, **options: Any) -> Iterator[Any]:
    """A page on which nothing may go wrong: no error in the console, no dialog, no request but to these addresses."""
    options = {"viewport": {"width": 1280, "height": 800}, "accept_downloads": True, **options}
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on("request", lambda request: None if request.url.startswith(own) else wrong.append(request.url))
    yield page
    context.close()
    assert wrong == []


def opened(page: Any, explorer: Any) -> None:
    """Load the page, and wait for all its views."""
    page.goto(explorer.address)
    page.wait_for_selector("[data-round]")
    settled(page)


def settled(page: Any) -> None:
    """Wait until every panel has the answer of the current state."""
    page.wait_for_function(
        "() => [...document.querySelectorAll('[data-slot]')].every("
        "panel => panel.dataset.answered === document.getElementById('explorer').dataset.round)"
    )


def ask(page: Any, prompt: str) -> None:
    """Type a prompt, and press Enter."""
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.keyboard.press("Enter")


def bars(page: Any, slot: str = "next") -> dict[str, str]:
    """The rows of a panel with bars, from the top: their texts by their labels."""
    rows = page.locator(f"[data-slot={slot}] .row")
    labels = rows.evaluate_all("rows => rows.map(row => row.getAttribute('aria-label'))")
    return dict(label.rsplit(": ", 1) for label in labels)


def go_to(page: Any, slot: str, row: int, column: int) -> list[str]:
    """Move to a cell of a grid by the keyboard; returns the lines of its tip."""
    page.locator(f"[data-slot={slot}] canvas").focus()
    for key, times in (("Home", 1), ("PageUp", 9), ("ArrowDown", row), ("ArrowRight", column)):
        for _ in range(times):
            page.keyboard.press(key)
    return page.locator(".tip").inner_text().splitlines()


def says(page: Any, slot: str, text: str) -> None:
    """Wait until a panel says why it has nothing to show."""
    page.wait_for_selector(f"[data-slot={slot}] .error >> text={text}")
