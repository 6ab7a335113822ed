"""The page of a vision-language model in a real browser, where Chromium and playwright are installed."""

import pytest
from browsers import chromium, clean_page, settled
from browsers import opened as load

import hookline
from hookline.demo.tinysight import first_images
from hookline.explore import explore
from hookline.explore.image_files import data_url

pytestmark = pytest.mark.slow  # `make test` has one path through the page, in test_browser.py

PROMPT = "<image> What color is the circle?"
RED, GREEN = first_images()
PIXELS = "canvas => canvas.toDataURL()"


@pytest.fixture
def page():
    with chromium() as browser, clean_page(browser) as found:
        yield found


@pytest.fixture
def opened(page):
    with explore(hookline.load("tinysight"), PROMPT, images=[RED], browser=False) as explorer:
        load(page, explorer)
        yield page


def answer(page) -> str:
    """The likeliest next token."""
    return page.locator("[data-slot=next] .row").first.get_attribute("aria-label").partition(":")[0]


def patch(box: dict, row: int, column: int) -> dict:
    """The middle of a region of the image."""
    return {"x": box["width"] * (column + 0.5) / 6, "y": box["height"] * (row + 0.5) / 6}


def changes(page, canvas, before: str) -> None:
    """Wait until something else is drawn."""
    page.wait_for_function(
        f"([canvas, before]) => ({PIXELS})(canvas) !== before", arg=[canvas.element_handle(), before]
    )


def test_from_an_upload_to_a_patched_region_and_a_saved_page(opened, tmp_path) -> None:
    page, image = opened, opened.locator("[data-slot=image] canvas")
    GREEN.save(tmp_path / "green.png")
    page.get_by_label("image for the second prompt").set_input_files(tmp_path / "green.png")
    settled(page)
    assert page.get_by_label("Second prompt", exact=True).input_value() == PROMPT
    assert answer(page) == "·red"

    page.set_viewport_size({"width": 1280, "height": 2400})  # grids are drawn where they can be seen
    lens = page.locator("[data-slot=lens] canvas")
    page.wait_for_timeout(300)
    before = lens.evaluate(PIXELS)
    box = image.bounding_box()
    image.hover(position=patch(box, 1, 1))
    assert "attention" in page.locator(".tip").inner_text()
    assert page.locator(".chip.lit").inner_text() == "▦ image × 36"
    changes(page, lens, before)
    page.mouse.move(0, 0)
    page.wait_for_timeout(300)
    before = image.evaluate(PIXELS)
    lens.hover(position={"x": 180, "y": 60})  # the image's column
    changes(page, image, before)

    page.locator("[data-slot=image] input[type=number]").first.fill("0")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('[data-slot=attention] canvas')?.ariaLabel.includes('0.0')")
    for row in range(3):
        for column in range(3):
            image.click(position=patch(box, row, column), modifiers=["Shift"])
    page.get_by_role("button", name="Patch", exact=True).click()
    settled(page)
    assert answer(page) == "·green"
    assert "positions 1–3, 7–9, 13–15" in page.locator(".edits li").inner_text()

    with page.expect_download() as found:
        page.get_by_role("button", name="Save as one page").click()
    found.value.save_as(tmp_path / "saved.html")
    page.context.set_offline(True)
    page.goto((tmp_path / "saved.html").as_uri())
    page.wait_for_selector("[data-slot=image] canvas")
    assert answer(page) == "·green"
    assert page.locator(".thumb img").count() == 2
    assert page.locator(".error").count() == 0
    before = image.evaluate(PIXELS)
    page.get_by_label("color by").select_option("lens")
    changes(page, image, before)


def test_an_image_is_one_chip_that_can_be_expanded(opened) -> None:
    assert opened.locator("[data-pos]").count() == 8
    opened.locator(".fold").click()
    assert opened.locator("[data-pos]").count() == 43
    opened.reload()
    settled(opened)
    assert opened.locator("[data-pos]").count() == 43
    opened.get_by_role("button", name="fold images").click()
    assert opened.locator("[data-pos]").count() == 8


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_an_image_that_is_dropped_or_pasted_replaces_the_only_one(opened, how) -> None:
    opened.evaluate(
        """([how, text]) => {
            const given = new DataTransfer(), bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
            given.items.add(new File([bytes], "green.png", { type: "image/png" }));
            const more = { bubbles: true, cancelable: true, dataTransfer: given, clipboardData: given };
            const event = how === "drop" ? new DragEvent(how, more) : new ClipboardEvent(how, more);
            document.querySelector(".prompt textarea").dispatchEvent(event);
        }""",
        [how, data_url(GREEN).partition(",")[2]],
    )
    opened.wait_for_function("() => document.querySelector('[data-slot=next] .row')?.ariaLabel.startsWith('·green')")
    settled(opened)
    assert opened.locator(".thumb").count() == 1
    assert opened.get_by_label("Prompt", exact=True).input_value() == PROMPT


def test_a_bad_image_is_reported_and_the_page_goes_on(opened, tmp_path) -> None:
    (tmp_path / "bad.png").write_bytes(b"this is no image")
    (tmp_path / "note.txt").write_text("this is no image")
    choose = opened.get_by_label("image for the prompt")
    choose.first.set_input_files(tmp_path / "note.txt")
    opened.wait_for_function("() => document.querySelector('.status').innerText.includes('note.txt')")
    choose.first.set_input_files(tmp_path / "bad.png")
    opened.wait_for_selector("[data-slot=next] .error")
    opened.get_by_label("remove image 1 of the prompt").click()
    settled(opened)
    assert opened.get_by_label("Prompt", exact=True).input_value() == "What color is the circle?"
    assert opened.locator("[data-slot=next] .error").count() == 0
    assert opened.locator("[data-slot=image] canvas").count() == 0


def test_points_of_the_tower_are_linked_with_the_image(opened) -> None:
    opened.locator("input.name").fill("vision.blocks.1.hook_resid_post")
    opened.keyboard.press("Enter")
    opened.wait_for_function("() => document.querySelector('[data-slot=point] canvas')?.ariaLabel.includes('vision')")
    image, point = (opened.locator(f"[data-slot={slot}] canvas") for slot in ("image", "point"))
    before = image.evaluate(PIXELS)
    point.hover(position={"x": 100, "y": 200})
    assert image.evaluate(PIXELS) != before
    assert opened.locator(".chip.lit").count() == 0
