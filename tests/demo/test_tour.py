"""The demo: what it finds, what its page has inside, and a walk through the page in a real browser."""

import base64
import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browsers import chromium, clean_page
from stores import tinyworld

import hookline
from hookline import demo
from hookline.demo import chapters
from hookline.demo.story import likeliest, story

STEPS = 12


@pytest.fixture(scope="module")
def found() -> chapters.Findings:
    with torch.no_grad():
        return chapters.find_all(hookline.load("tinyworld"))


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> tuple[Path, str]:
    """The page of the demo, and what it prints."""
    with redirect_stdout(StringIO()) as out:
        path = demo.demo(tmp_path_factory.mktemp("tour") / "new")
    return path, out.getvalue()


@pytest.fixture(scope="module")
def page_file(printed) -> Path:
    return printed[0]


@pytest.fixture(scope="module")
def data(page_file) -> dict[str, Any]:
    """What the page has inside."""
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', page_file.read_text("utf-8"), re.S)
    return json.loads(inside[1])


def values(packed: dict[str, Any]) -> torch.Tensor:
    array = np.frombuffer(base64.b64decode(packed["f32"]), "<f4").reshape(packed["shape"])
    return torch.tensor(array.copy())


def saved(data, step: int, view: str, **more: Any) -> dict[str, Any]:
    """The answer to a question in the state of a step, counted from 1."""
    state = data["steps"][step - 1]["state"]
    wanted = {"view": view, "prompt": state["prompt"], "edits": [each for each in state.get("edits", []) if each["on"]]}
    wanted |= more
    [answer] = [answer for asked, answer in data["answers"] if all(asked.get(key) == wanted[key] for key in wanted)]
    return answer


def test_the_demo_finds_the_head_of_the_giver(found) -> None:
    assert found.giver == (3, 4) == chapters.highest(found.lost) == chapters.highest(found.added_by_heads)
    assert found.restored[found.giver] > 0.9
    assert (found.restored.flatten().sort().values[:-1] < 0.1).all()
    assert found.lost[found.giver] > found.logit_diff, "without it the other name leads"
    assert found.attention.pattern[-1].argmax() == 9, "the second John"
    assert found.pushed["John"] < found.pushed["Mary"] < 0


def test_the_demo_finds_where_the_answer_appears(found) -> None:
    assert [word for word, _ in found.lens] == ["to", "to", "to", "to", "Mary"], "the word that was just read"
    assert sum(found.added.values()) == pytest.approx(found.logit_diff, abs=0.1)
    assert set(sorted(found.added, key=found.added.get)[-2:]) == {"3_attn_out", "3_mlp_out"}
    assert found.added["3_mlp_out"] > 4 > 0 > found.added_without["3_mlp_out"], "it builds on the head"
    assert found.stream[:, 9].min() > 0.9
    assert found.stream[:, [at for at in range(14) if at != 9]].abs().max() < 0.1


def test_the_demo_changes_answers(found) -> None:
    assert found.predictions[0][0] == "Mary"
    assert likeliest(found.without_giver, 1)[0] == "John"
    assert [likeliest(found.corrected, at)[0] for at in (0, 1)] == ["Rome", "Paris"]


def test_the_demo_finds_the_heads_that_repeat_and_agree(found) -> None:
    assert found.induction[found.repeater] > 0.5
    half = len(found.stripe.words) // 2
    queries = torch.arange(half + 1, 2 * half)
    assert found.stripe.pattern[queries, queries - half + 1].mean() > 0.8
    assert set(found.agreeing) == {(3, 7), (3, 3)}
    assert found.opinion.last[0] == "Rome"
    whole, _, without = found.shares["the truth, after a wrong opinion"]
    assert whole < 0.1 < 0.8 < without
    assert min(found.shares["the truth, after no opinion"]) == 1


def test_the_demos_code_runs(found, capsys) -> None:
    space: dict[str, Any] = {}
    for step, _ in story(found):
        exec(step.code, space)
    assert space["text"].endswith(" John.")
    assert space["answer"] == " Paris"
    assert torch.allclose(space["stripe"], found.stripe.pattern, atol=1e-5)
    assert torch.allclose(space["cache"]["pattern", 3][0, 4], found.attention.pattern, atol=1e-5)
    assert torch.allclose(space["without_each"].values, found.logit_diff - found.lost, atol=1e-4)
    assert torch.allclose(space["by_head"].values, found.restored, atol=1e-4)
    assert torch.allclose(space["by_position"].values, found.stream, atol=1e-4)
    assert {tuple(head) for head in space["found"].heads[:2]} == set(found.agreeing), "one country is enough for these"
    assert capsys.readouterr().out.count("http://127.0.0.1:") == 2


def test_the_demo(printed, data) -> None:
    path, out = printed
    assert (path.parent.name, path.name) == ("new", "demo.html")
    assert re.search(rf"took \d+\.\d s\. .* {re.escape(str(path))}\n$", out)
    *lines, _ = out.splitlines()
    assert max(map(len, lines)) <= 120
    numbered = [line for line in lines if re.match(r"\d+\. ", line)]
    assert numbered == [f"{at}. {step['title']}" for at, step in enumerate(data["steps"], 1)]
    html = path.read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(?!data:,")', html) == [], "one page that needs nothing else"
    assert len(html) < 2_000_000
    assert str(Path(__file__).parents[2]) not in html


def test_the_page_has_the_numbers_of_the_library(data, found) -> None:
    """The views come from the explorer, the findings from the experiments: they must agree."""
    close = {"atol": 1e-4, "rtol": 1e-4}
    grids = {
        (3, "attribution"): found.added_by_heads,
        (4, "ablation"): -found.lost,
        (9, "induction"): found.induction,
    }
    for (step, measure), grid in grids.items():
        assert data["steps"][step - 1]["state"].get("measure", "attribution") == measure
        torch.testing.assert_close(values(saved(data, step, "heads", measure=measure)["values"]), grid, **close)
    for step, sweep, grid in ((7, "stream", found.stream), (8, "heads", found.restored)):
        torch.testing.assert_close(values(saved(data, step, "patching", measure=sweep)["values"]), grid, **close)
    for step, attention in ((5, found.attention), (9, found.stripe), (10, found.opinion)):
        head = {key: data["steps"][step - 1]["state"][key] for key in ("layer", "head")}
        torch.testing.assert_close(values(saved(data, step, "attention", **head)["values"]), attention.pattern, **close)
    for step, added in ((3, found.added), (6, found.added_without)):
        parts = saved(data, step, "attribution")
        assert dict(zip(parts["components"], values(parts["values"]).tolist(), strict=True)) == pytest.approx(
            added, abs=1e-4
        )
    lens = saved(data, 2, "lens")
    assert [lens["words"][row[-1][0]].strip() for row in lens["cells"]] == [word for word, _ in found.lens]
    assert values(lens["probs"])[:, -1, 0].tolist() == pytest.approx([prob for _, prob in found.lens], abs=1e-5)


def test_the_page_has_the_probabilities_of_the_library(data, found) -> None:
    for step, change in ((6, found.without_giver), (11, found.corrected)):
        answer = saved(data, step, "next")
        pairs = zip(values(answer["before"]).tolist(), values(answer["after"]).tolist(), strict=True)
        shown = {text: list(pair) for text, pair in zip(answer["texts"], pairs, strict=True)}
        for word, shares in change:
            if f" {word}" in shown:
                assert shown[f" {word}"] == pytest.approx(shares, abs=1e-5)
        assert {f" {likeliest(change, at)[0]}" for at in (0, 1)} <= shown.keys()


def test_a_step_says_in_its_text_what_its_views_show(data, found) -> None:
    texts = [step["text"] for step in data["steps"]]
    assert len(texts) == STEPS
    model = tinyworld()
    with torch.no_grad():
        probs = [model(chapters.PROMPT), model.run_with_hooks(chapters.PROMPT, fwd_hooks=chapters.off([found.giver]))]
        mary, john = (each[0, -1].softmax(-1) for each in probs)
    assert f"Mary, with {mary[model.to_single_token(' Mary')]:.0%}" in texts[0]
    assert f"John ({john[model.to_single_token(' John')]:.0%})" in texts[5]
    assert f"{found.restored.max():.0%}" in texts[7]
    for text in texts:
        assert len(re.findall(r"[.?!](?:\s|$)", text.partition("\n")[0])) <= 4, f"two or three sentences, not: {text}"
        assert not re.search(r"[{}]|nan|None", text)


def test_every_step_can_be_shown(data) -> None:
    """Each edit of a step can be switched on and off, and each head looked at."""
    for at, step in enumerate(data["steps"], 1):
        assert step["look"]
        assert step["code"]
        edited = step["state"].get("edits", [])
        for kept in ([], *([edit] for edit in edited), edited):
            kept = [{**edit, "on": True} for edit in kept]
            for view in ("next", "tokens", "generate", "lens", "attribution", "point"):
                assert saved(data, at, view, edits=kept)["view"] == view
            assert saved(data, at, "attention", edits=kept, layer=2, head=7)["point"] == "blocks.2.attn.hook_pattern"
    script = saved(data, 6, "next")["script"]
    assert "edits.zero(head=4)" in script


@pytest.fixture
def page(page_file):
    """The page from disk, without a network; nothing may go wrong, and nothing be requested."""
    with chromium() as browser, clean_page(browser, own=("file:",), offline=True) as found:
        found.goto(page_file.as_uri())
        found.wait_for_selector("[data-slot=lens] canvas")
        yield found


def first_bar(page) -> str:
    return page.locator("[data-slot=next] .row").first.get_attribute("aria-label")


def test_a_walk_through_the_tour(page, data, found) -> None:
    (word, prob), (without, other) = found.predictions[0], likeliest(found.without_giver, 1)
    assert first_bar(page) == f"·{word}: {100 * prob:.1f} %"
    for at, step in enumerate(data["steps"]):
        if at:
            page.keyboard.press("ArrowRight")
        assert page.locator(".guide h2").inner_text() == step["title"]
        assert page.locator(".guide .said").inner_text().split("\n\n")[1] == step["text"].partition("\n")[0]
        assert page.locator(".about").count() == len(step["look"])
        assert page.locator("main > :nth-child(1)").evaluate("node => node.className").split()[-1] == "about"
        assert page.locator(".error, .note").count() == 0
        assert page.get_by_text("not part of this saved page").count() == 0
        assert page.locator("[data-slot=next] .row").count() >= 10
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if at == 5:
            assert first_bar(page).startswith(f"·{without}: ")
            assert first_bar(page).endswith(f", {100 * other:.1f} %")
    page.keyboard.press("ArrowRight")
    assert page.locator(".hint.grow").inner_text() == f"Step {STEPS} of {STEPS}"
    page.get_by_role("button", name="Back").click()
    page.reload()
    assert page.locator(".guide h2").inner_text() == data["steps"][-2]["title"], "the step is in the address"
    page.go_back()
    assert page.locator(".guide h2").inner_text() == data["steps"][-1]["title"]


def test_what_needs_no_run_works_in_the_tour(page) -> None:
    page.get_by_role("button", name="Step 6").click()
    assert first_bar(page).startswith("·John")
    box = page.get_by_role("checkbox")
    box.uncheck()
    assert first_bar(page).startswith("·Mary")
    box.check()
    assert first_bar(page).startswith("·John")

    picture = "canvas => canvas.toDataURL()"
    page.get_by_role("button", name="Step 5").click()
    attention = page.locator("[data-slot=attention] canvas")
    before = attention.evaluate(picture)
    page.get_by_label("head", exact=True).first.fill("3")
    page.keyboard.press("Enter")
    assert attention.evaluate(picture) != before
    page.get_by_label("each head").select_option("induction")
    assert page.get_by_text("on random repeated tokens").count() == 1

    row = page.locator("[data-slot=next] .row").nth(2)
    row.click()
    assert "needs a new run" in page.locator(".status").inner_text()
    assert first_bar(page).startswith("·Mary")
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate("document.querySelector('[data-theme]').dataset.theme") == "dark"
    page.get_by_role("button", name="Next →").click()
    assert page.evaluate("document.querySelector('[data-theme]').dataset.theme") == "dark"


def test_the_tour_on_a_phone(page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for step in range(1, STEPS + 1):
        page.get_by_role("button", name=f"Step {step}:").click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        guide, first = (page.locator(place).bounding_box() for place in (".guide", "main > :first-child"))
        assert guide["y"] >= 844 / 2, "half of the screen is for the views"
        assert -1 <= first["y"] < guide["y"], "the view that the step is about is in sight"
