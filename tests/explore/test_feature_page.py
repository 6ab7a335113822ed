"""Features and the list of edits in a real browser, where Chromium and playwright are installed."""

import json

import pytest
import torch
from browsers import chromium, clean_page, settled
from browsers import opened as load
from dictionaries import CAPITAL, ITALY, POINT, TEXTS, countries
from stores import tinyworld

import hookline
from hookline.edits import zero
from hookline.explore import explore

pytestmark = pytest.mark.slow  # `make test` has one path through the page, in test_browser.py


@pytest.fixture
def page():
    with chromium() as browser, clean_page(browser) as found:
        yield found


@pytest.fixture
def opened(page, tmp_path):
    countries().save(tmp_path / "countries")
    hookline.harvest(tinyworld(), TEXTS, POINT, tmp_path / "store", progress=False)
    given = {"saes": tmp_path / "countries", "store": tmp_path / "store"}
    with explore(tinyworld(), CAPITAL, browser=False, **given) as explorer:
        load(page, explorer)
        yield page


def rows(page, slot) -> list[str]:
    labels = page.locator(f"[data-slot={slot}] .row")
    return labels.evaluate_all("rows => rows.map(row => row.getAttribute('aria-label'))")


def first(page) -> str:
    return rows(page, "next")[0].partition(":")[0]


def edits(page) -> list[str]:
    return [each.strip() for each in page.locator(".edits li label").all_inner_texts()]


def pinned(page, feature: int) -> None:
    page.locator(f"[data-slot=features] .row[aria-label^='{feature}']").click()
    page.wait_for_selector("[data-slot=contexts] .context")


@torch.no_grad()
def percent(*hooks) -> str:
    """The probability of Rome, as the page writes it."""
    probs = tinyworld().run_with_hooks(CAPITAL, fwd_hooks=[*hooks])[0, -1].softmax(-1)
    return f"{100 * float(probs[tinyworld().to_single_token(' Rome')]):.1f} %"


def test_pin_a_feature_switch_it_off_and_undo(opened, tmp_path) -> None:
    page, off = opened, countries().spliced(edits=[zero(neuron=ITALY, pos=3)])
    assert percent() != percent(off)
    assert rows(page, "next")[0] == f"·Rome: {percent()}"
    page.locator("[data-pos='3']").click()
    settled(page)
    features = countries().encode(tinyworld().cache(CAPITAL)[POINT])[0, 3].tolist()
    assert rows(page, "features")[0] == f"{ITALY}: {features[ITALY]:.2f}"
    pinned(page, ITALY)
    assert "Italy" in page.locator("[data-slot=contexts] .token.here").first.inner_text()
    page.wait_for_selector("[data-slot=feature] .row")
    assert page.locator("[data-slot=feature] .row").count() == 16
    page.locator("[data-pos='4']").click()
    settled(page)
    panel = page.locator("[data-slot=feature]")
    assert "position 3" in panel.locator("label").inner_text()
    panel.get_by_role("button", name="Disable", exact=True).click()
    settled(page)
    assert edits(page) == ["disable: countries, feature 1, position 3"]
    assert rows(page, "next")[0] == f"·Rome: {percent()}, {percent(off)}"
    with page.expect_download() as found:
        page.get_by_role("button", name="Save as one page").click()
    found.value.save_as(tmp_path / "saved.html")
    page.get_by_role("button", name="Undo").click()
    settled(page)
    assert rows(page, "next")[0] == f"·Rome: {percent()}"

    page.context.set_offline(True)
    page.goto((tmp_path / "saved.html").as_uri())
    page.wait_for_selector("[data-slot=features] canvas")
    assert page.locator("[data-slot=contexts] .context").count() > 0
    assert page.locator(".error").count() == 0


def test_the_list_is_reordered_switched_saved_and_loaded(opened, tmp_path) -> None:
    page = opened
    page.locator("[data-pos='3']").click()
    settled(page)
    pinned(page, ITALY)
    panel = page.locator("[data-slot=feature]")
    panel.get_by_label("factor or value").fill("0")
    panel.get_by_role("button", name="Scale by").click()
    settled(page)
    panel.get_by_label("factor or value").fill("6")
    panel.get_by_role("button", name="Set to").click()
    settled(page)
    page.locator("[data-pos='4']").click()
    settled(page)
    scaled, put = "scale: countries, feature 1, position 3", "set: countries, feature 1, position 3"
    assert edits(page) == [scaled, put]
    before = rows(page, "next")
    page.get_by_role("button", name=f"later: {scaled}").click()  # now the last one makes it 0
    settled(page)
    assert edits(page) == [put, scaled]
    after = rows(page, "next")
    assert after != before
    page.locator(".edits li input[type=checkbox]").last.uncheck()
    settled(page)
    assert rows(page, "next") == before
    with page.expect_download() as found:
        page.get_by_role("button", name="Save list").click()
    found.value.save_as(tmp_path / "edits.json")
    saved = json.loads((tmp_path / "edits.json").read_text())
    assert [(each["kind"], each["feature"], each["on"]) for each in saved] == [("set", 1, True), ("scale", 1, False)]
    page.get_by_role("button", name="Remove all").click()
    settled(page)
    assert first(page) == "·Rome"
    page.locator(".edits input[type=file]").set_input_files(tmp_path / "edits.json")
    page.wait_for_selector(".edits li")
    settled(page)
    assert rows(page, "next") == before
    page.locator(".edits li input[type=checkbox]").last.check()
    settled(page)
    assert rows(page, "next") == after

    (tmp_path / "bad.json").write_text('[{"kind": "boom"}]')
    page.locator(".edits input[type=file]").set_input_files(tmp_path / "bad.json")
    page.get_by_text("bad.json is not a list of edits").wait_for()


def test_every_view_offers_what_it_shows_for_editing(opened) -> None:
    page = opened
    selection = page.locator(".edits .selection code")
    for slot, point in (
        ("lens", "blocks.3.hook_resid_post"),
        ("heads", "blocks.0.attn.hook_z"),
        ("point", "blocks.0.hook_resid_post"),
    ):
        page.locator(f"[data-slot={slot}] canvas").focus()
        page.keyboard.press("Enter")
        assert selection.inner_text() == point
    page.get_by_role("button", name="Select this head").click()
    assert selection.inner_text() == "blocks.0.attn.hook_z"  # the head that was selected in the map of heads
    for label, point in (("embed", "hook_embed"), ("2 MLP", "blocks.2.hook_mlp_out")):
        page.locator(f"[data-slot=attribution] .row[aria-label^='{label}']").click()
        assert selection.inner_text() == point
    page.get_by_role("button", name="Prompt mean").click()
    settled(page)
    assert edits(page) == ["replace with the prompt’s mean: blocks.2.hook_mlp_out, all positions"]
    page.locator(".edits .selection select").select_option("blocks.2.hook_attn_out")
    page.get_by_role("button", name="Zero", exact=True).click()
    settled(page)
    assert page.locator("[data-slot=heads] .error").count() == 0
    assert "edits of attention outputs" in page.locator("[data-slot=heads]").inner_text()
    assert page.locator(".error").count() == 0
