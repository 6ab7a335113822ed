"""Pages from disk: what they have inside, and what can be chosen again in a page that was saved."""

import torch
from browsers import chromium, clean_page
from stores import tinyworld

from hookline.explore import explore, saved
from hookline.explore.question import Question
from hookline.explore.views import answer, attention_views

PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"
EDITS = [
    {"kind": "zero", "point": "blocks.3.attn.hook_z", "head": 4, "on": True},
    {"kind": "scale", "point": "blocks.0.hook_mlp_out", "amount": 0.5, "on": False},
]


def test_the_attention_of_all_heads_is_that_of_each() -> None:
    asked = {"view": "attention", "prompt": PROMPT, "edits": EDITS[:1]}
    found = attention_views(tinyworld(), Question.of(asked))
    assert [*found] == [(layer, head) for layer in range(4) for head in range(8)]
    for layer, head in ((0, 0), (2, 5), (3, 7)):
        assert found[layer, head] == answer(tinyworld(), Question.of({**asked, "layer": layer, "head": head}))


def test_a_page_has_each_of_its_edits_on_and_off() -> None:
    data = saved.page_data(tinyworld(), "tinyworld", [saved.Step({"prompt": PROMPT, "edits": EDITS})])
    kept = [asked["edits"] for asked, _ in data["answers"] if asked["view"] == "lens"]
    on = [{**edit, "on": True} for edit in EDITS]
    assert len(kept) == 4
    assert all(each in kept for each in ([], on[:1], on[1:], on))
    for asked, found in data["answers"]:
        expected = answer(tinyworld(), Question.of(asked))
        assert {**found, "script": None} == {**expected, "script": None}


def test_states_that_ask_the_same_are_answered_once() -> None:
    steps = [saved.Step({"prompt": PROMPT}), saved.Step({"prompt": PROMPT, "measure": "ablation"}, "title")]
    data = saved.page_data(tinyworld(), "tinyworld", steps)
    assert len(data["steps"]) == 2
    assert sum(asked["view"] == "next" for asked, _ in data["answers"]) == 1
    assert all(asked["view"] != "patching" for asked, _ in data["answers"]), "there is no second prompt"


def test_of_a_long_prompt_one_head_is_saved(monkeypatch) -> None:
    monkeypatch.setattr(saved, "MOST_SAVED", 32 * 14**2 - 1)
    data = saved.page_data(tinyworld(), "tinyworld", [saved.Step({"prompt": PROMPT})])
    [asked] = [asked for asked, _ in data["answers"] if asked["view"] == "attention"]
    assert (asked["layer"], asked["head"]) == (3, 0)


def test_what_was_looked_at_can_be_chosen_in_the_saved_page(tmp_path) -> None:
    with (
        torch.no_grad(),
        explore(tinyworld(), PROMPT, OTHER, browser=False) as explorer,
        chromium() as browser,
        clean_page(browser) as page,
    ):
        page.goto(explorer.address)
        head, grid = page.get_by_label("head", exact=True).first, page.locator("[data-slot=attention] canvas")
        grid.wait_for()
        with page.expect_response("**/ask"):
            head.fill("4")
            head.press("Enter")
        page.wait_for_timeout(300)
        with page.expect_download() as found:
            page.get_by_role("button", name="Save as one page").click()
        found.value.save_as(tmp_path / "saved.html")

        page.context.set_offline(True)
        page.goto((tmp_path / "saved.html").as_uri())
        page.wait_for_selector("[data-slot=lens] canvas")
        pictures = []
        for number in ("0", "4"):
            head.fill(number)
            head.press("Enter")
            assert page.locator(".status").inner_text() == ""
            pictures.append(grid.evaluate("canvas => canvas.toDataURL()"))
        assert pictures[0] != pictures[1]
        head.fill("6")
        head.press("Enter")
        assert "needs a new run" in page.locator(".status").inner_text()
        assert head.input_value() == "4"
        assert page.get_by_label("each head").is_disabled(), "one measure was looked at"
