"""The page in a real browser: Chromium, driven by playwright, where both are installed."""

import json
import shutil

import pytest
import torch
from stores import tinyworld

from hookline.explore import explore, export_page

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the explorer's page")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt install chromium")

PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser):
    """A page, on which nothing may go wrong and nothing foreign be requested."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    found, wrong = context.new_page(), []
    found.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("dialog", lambda dialog: wrong.append(dialog.message))
    allowed = ("http://127.0.0.1:", "file:", "data:", "blob:")
    found.on("request", lambda request: None if request.url.startswith(allowed) else wrong.append(request.url))
    yield found
    context.close()
    assert wrong == []


@pytest.fixture
def explorer():
    with explore(tinyworld(), PROMPT, OTHER, browser=False) as found:
        yield found


def bars(page) -> dict[str, str]:
    """The rows under "Next token": the likeliest first."""
    labels = page.locator("[data-slot=next] .row").evaluate_all(
        "rows => rows.map(row => row.getAttribute('aria-label'))"
    )
    return dict(label.rsplit(": ", 1) for label in labels)


def settled(page) -> None:
    """Wait until every panel has the answer of the current state."""
    page.wait_for_function(
        "() => [...document.querySelectorAll('[data-slot]')].every("
        "panel => panel.dataset.answered === document.getElementById('explorer').dataset.round)"
    )


def opened(page, explorer) -> None:
    page.goto(explorer.address)
    page.wait_for_selector("[data-round]")
    settled(page)
    assert page.locator("canvas").count() == 5


def head(page, layer: int, number: int) -> None:
    """Select a head in the map by the keyboard."""
    grid = page.locator("[data-slot=heads] canvas")
    grid.focus()
    for key, times in (("ArrowDown", layer), ("ArrowRight", number)):
        for _ in range(times):
            page.keyboard.press(key)
    page.keyboard.press("Enter")


def test_from_a_prompt_to_an_edit_and_back(page, explorer, tmp_path) -> None:
    opened(page, explorer)
    prob = tinyworld()(PROMPT)[0, -1].softmax(-1).max()
    assert bars(page)["·Mary"] == f"{100 * prob:.1f} %"
    head(page, 3, 4)
    page.get_by_role("button", name="Zero", exact=True).click()
    settled(page)
    assert next(iter(bars(page))) == "·John"
    assert page.locator("[data-slot=generate] .changed").count() == 1
    assert "blocks.3.attn.hook_z" in page.evaluate("decodeURIComponent(location.hash)")
    with page.expect_download() as found:
        page.get_by_role("button", name="Save as one page").click()
    found.value.save_as(tmp_path / "saved.html")
    page.get_by_role("button", name="Undo").click()
    settled(page)
    assert next(iter(bars(page))) == "·Mary"

    page.context.set_offline(True)
    page.goto((tmp_path / "saved.html").as_uri())
    page.wait_for_selector("[data-slot=lens] canvas")
    assert next(iter(bars(page))) == "·John"
    assert page.locator(".error").count() == 0


def test_hovering_lights_up_everywhere(page, explorer) -> None:
    opened(page, explorer)
    image = "canvas => canvas.toDataURL()"
    before = page.locator("[data-slot=patching] canvas").evaluate(image)
    page.locator("[data-pos='9']").hover()
    assert page.locator("[data-slot=patching] canvas").evaluate(image) != before
    page.locator("[data-slot=lens] canvas").hover(position={"x": 200, "y": 60})
    assert page.locator(".tip").is_visible()
    assert page.locator(".chip.lit").count() == 1


def test_markup_stays_text(page, explorer) -> None:
    opened(page, explorer)
    scripts = page.locator("script").count()
    page.get_by_label("Prompt", exact=True).fill("<script>alert(1)</script><img src=x onerror=alert(2)>")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('[data-pos]').length > 14")
    settled(page)  # the server must not close while it is asked
    assert page.locator("script").count() == scripts
    assert page.locator("main img, header img").count() == 0


def test_a_bad_prompt_is_told_and_the_page_goes_on(page, explorer) -> None:
    page.goto(explorer.address)
    page.wait_for_selector("[data-slot=lens] canvas")
    bad = json.dumps({"prompt": PROMPT, "other": "Mary"})
    page.evaluate("bad => { location.hash = encodeURIComponent(bad) }", bad)
    page.wait_for_selector("[data-slot=patching] .error")
    assert page.locator("[data-slot=next] .error").count() == 0


def test_an_exported_page_opens_from_disk(page, tmp_path) -> None:
    with torch.no_grad():
        path = export_page(tinyworld(), tmp_path / "page.html", PROMPT, OTHER)
    page.context.set_offline(True)
    page.goto(path.as_uri())
    for slot in ("lens", "heads", "attention", "patching", "point"):
        page.wait_for_selector(f"[data-slot={slot}] canvas")
    assert page.locator(".error").count() == 0
