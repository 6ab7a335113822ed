"""Write the screenshots of the explorer in docs/explorer.md: `python tools/make_screenshots.py`.

Needs Chromium, and playwright from PyPI. The files are under 150 kB each.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

import hookline
from hookline.explore import explore, first_prompts

DOCS = Path(__file__).parent.parent / "docs"
MOST_BYTES = 150_000
READY = """() => [...document.querySelectorAll("[data-slot]")].every(
    panel => panel.dataset.answered === document.getElementById("explorer").dataset.round)"""


def opened(browser: Any, address: str, theme: str, height: int) -> Any:
    """The page, with all its views."""
    page = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme=theme)
    page.set_default_timeout(120_000)
    page.goto(address)
    page.wait_for_selector("[data-round]")
    page.wait_for_function(READY)
    return page


def select_head(page: Any, layer: int, head: int) -> None:
    """Select a head in the map by the keyboard."""
    page.locator("[data-slot=heads] canvas").focus()
    for key, times in (("ArrowDown", layer), ("ArrowRight", head)):
        for _ in range(times):
            page.keyboard.press(key)
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.wait_for_function(READY)


def write(page: Any, name: str, top: str, bottom: str) -> None:
    """Save the part of the page from one panel to another."""
    boxes = [page.locator(each).bounding_box() for each in (top, bottom)]
    start = max(0, boxes[0]["y"] - 12 if top != "header" else 0)
    clip = {"x": 0, "y": start, "width": 1280, "height": boxes[1]["y"] + boxes[1]["height"] + 12 - start}
    shot = Image.open(io.BytesIO(page.screenshot(clip=clip, full_page=True)))
    image = shot.convert("RGB")
    has_scale = name != "explorer.png"  # 256 colors are too few for a scale
    (image if has_scale else image.quantize(256, dither=Image.Dither.NONE)).save(DOCS / name, optimize=True)
    size = (DOCS / name).stat().st_size
    assert size < MOST_BYTES, f"{name} has {size:,} bytes"
    print(f"{name}: {size:,} bytes")


def main() -> None:
    """Write the three screenshots."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    prompt, other = first_prompts("tinyworld")
    model = hookline.load("tinyworld")
    with explore(model, prompt, other, browser=False) as explorer, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = opened(browser, explorer.address, "light", 2200)
        select_head(page, 3, 4)
        write(page, "explorer-heads.png", "[data-slot=heads]", "[data-slot=attention]")
        page.get_by_role("button", name="Zero", exact=True).click()
        page.wait_for_function(READY)
        write(page, "explorer.png", "header", "[data-slot=lens]")
        page = opened(browser, explorer.address, "dark", 2200)
        write(page, "explorer-dark.png", "[data-slot=patching]", "[data-slot=point]")
        browser.close()


if __name__ == "__main__":
    main()
