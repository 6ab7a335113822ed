"""The explorer through a real browser: from the address to the first view, and from a click to new numbers.

python benchmarks/explorer.py [MODEL]       needs Chromium, and playwright from PyPI
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from typing import Any

from playwright.sync_api import sync_playwright

import hookline
from hookline.explore import explore, first_prompts

NEXT = "[data-slot=next] svg"
ANSWERED = """panels => [...document.querySelectorAll(panels)].every(
    panel => panel.dataset.answered === document.getElementById("explorer").dataset.round)"""
ROUNDS = 7


def first_view(browser: Any, address: str) -> float:
    """Return the time from opening the address to the next-token probabilities."""
    page = browser.new_page()
    start = time.perf_counter()
    page.goto(address)
    page.wait_for_selector(NEXT)
    spent = time.perf_counter() - start
    page.close()
    return spent


def click(page: Any, answered: str) -> float:
    """Return the time from a click on the checkbox of an edit to the new answers of all these panels."""
    box = page.locator(".edits li input[type=checkbox]")
    start = time.perf_counter()
    box.click()
    page.wait_for_function(ANSWERED, arg=answered)
    return time.perf_counter() - start


def main(name: str = "tinyworld") -> None:
    """Print the medians over several rounds."""
    prompt, other = first_prompts(name)
    prompt = prompt or "When Mary and John went to the store, John gave a drink to"
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    model = hookline.load(name)
    with explore(model, prompt, other, browser=False) as explorer, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        opened = [first_view(browser, explorer.address) for _ in range(ROUNDS)]
        page = browser.new_page()
        page.goto(explorer.address)
        page.wait_for_selector("[data-slot=heads] canvas")
        page.locator("[data-slot=heads] canvas").focus()
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Zero", exact=True).click()
        page.wait_for_function(ANSWERED, arg="[data-slot]")
        panels = {"next tokens": "[data-slot=next]", "all views": "[data-slot]"}
        clicked = {}
        for what, each in panels.items():
            clicked[what] = [click(page, each) for _ in range(ROUNDS)]
            page.wait_for_function(ANSWERED, arg="[data-slot]")
        browser.close()
    print(f"{name}: first view {statistics.median(opened):.2f} s")
    for what, times in clicked.items():
        print(f"from a click to {what}: {statistics.median(times):.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
