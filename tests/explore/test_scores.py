"""The scores of a probe in the explorer: they are the library's, follow edits, and are in saved pages."""

import pytest
import torch
from browsers import chromium, clean_page, opened
from questions import PROMPT, ZERO, ask, unpacked
from stores import tinyworld

from hookline import HooklineError, edits
from hookline.experiments import probes
from hookline.explore import explore, export_page
from hookline.explore.attached_probe import AttachedProbe
from hookline.explore.saved import Step, page_data

POINT = "blocks.{}.hook_resid_post"
TEXTS = ["Mary gave a drink", "John went to the store", "John gave a drink", "Mary went to the store"] * 4
LABELS = ["drink" in text for text in TEXTS]


@pytest.fixture(scope="module")
def model():
    return tinyworld()


@pytest.fixture(scope="module")
def fitted(model):
    texts = [f"{name}{text}" for name, text in zip("ABCDEFGHIJKLMNOP", TEXTS, strict=True)]
    return {
        pool: probes.fit(model, texts, LABELS, pool=pool, layers=[1, 3], controls=1) for pool in (None, "attention")
    }


def expected(probe, layer, x):
    """The score at each token: of a pool, that of the text up to it."""
    ends = range(1, len(x) + 1)
    scores = [
        probe.scores(layer, x[:end]) if probe.queries is not None else probe.scores(layer, x[end - 1]) for end in ends
    ]
    return torch.stack([of_classes[1] - of_classes[0] for of_classes in scores])


@pytest.mark.parametrize("pool", [None, "attention"])
def test_scores_are_those_of_the_probe(model, fitted, pool, tmp_path) -> None:
    probe = fitted[pool]
    probe.save(tmp_path / "probe.safetensors")
    for given in (probe, tmp_path / "probe.safetensors", str(tmp_path / "probe.safetensors")):
        attached = AttachedProbe(model, given)
        assert attached.about() == {"points": [POINT.format(1), POINT.format(3)], "first": probes.Monitor(probe).point}
        data = ask(model, "scores", point=POINT.format(3), probe=attached)
        x = model.cache(PROMPT)[POINT.format(3)][0]
        torch.testing.assert_close(unpacked(data["values"]), expected(probe, 3, x), atol=1e-3, rtol=1e-4)
    assert ask(model, "scores", probe=attached)["point"] == attached.first


def test_scores_follow_the_edits(model, fitted) -> None:
    attached = AttachedProbe(model, probes.Monitor(fitted[None], 3))
    data = ask(model, "scores", edits=(ZERO,), probe=attached)
    with model.hooks([(ZERO.point, edits.zero(head=4))]):
        x = model.cache(PROMPT)[POINT.format(3)][0]
    torch.testing.assert_close(unpacked(data["values"]), expected(fitted[None], 3, x), atol=1e-3, rtol=1e-4)
    assert not torch.equal(unpacked(data["values"]), unpacked(ask(model, "scores", probe=attached)["values"]))


def test_a_direction_is_a_dot_product(model) -> None:
    direction = torch.randn(128, generator=torch.Generator().manual_seed(0))
    data = ask(model, "scores", probe=AttachedProbe(model, {POINT.format(2): direction}))
    x = model.cache(PROMPT)[POINT.format(2)][0]
    torch.testing.assert_close(unpacked(data["values"]), x @ direction, atol=1e-3, rtol=1e-4)


def test_a_saved_page_has_the_scores_at_each_point(model, fitted, tmp_path) -> None:
    attached = AttachedProbe(model, fitted[None])
    data = page_data(model, "tinyworld", [Step({"prompt": PROMPT})], probe=attached)
    answers = {question["point"]: view for question, view in data["answers"] if question["view"] == "scores"}
    assert [*answers] == [POINT.format(1), POINT.format(3)]
    for point, view in answers.items():
        assert view == ask(model, "scores", point=point, probe=attached)
    assert data["model"]["probe"] == attached.about()
    page = export_page(model, tmp_path / "page.html", PROMPT, probe=fitted[None]).read_text()
    assert '"view": "scores"' in page


@pytest.mark.slow
def test_tokens_are_colored_by_score(model, fitted, tmp_path) -> None:
    saved = export_page(model, tmp_path / "page.html", PROMPT, probe=fitted["attention"])
    with chromium() as browser, clean_page(browser) as page:
        with explore(model, PROMPT, probe=fitted["attention"], browser=False) as explorer:
            opened(page, explorer)
            live = colors(page)
        page.goto(saved.as_uri())
        page.wait_for_selector("[data-slot=scores] .token")
        assert colors(page) == live
        assert len(live) == model.to_tokens(PROMPT).shape[1]
        assert len(set(live)) > 3
        page.locator("[data-slot=scores] select").select_option(POINT.format(3))
        assert page.locator(".status").inner_text() == ""
        assert page.locator(".error").count() == 0


def colors(page) -> list[str]:
    tokens = page.locator("[data-slot=scores] .token")
    return tokens.evaluate_all("tokens => tokens.map(token => token.style.background)")


def test_what_is_refused(model, fitted) -> None:
    with pytest.raises(HooklineError, match="probe"):
        AttachedProbe(model, torch.ones(128))
    with pytest.raises(HooklineError, match="one axis"):
        AttachedProbe(model, {POINT.format(0): torch.ones(2, 128)})
    with pytest.raises(HooklineError, match="vector"):
        AttachedProbe(model, {"blocks.0.attn.hook_z": torch.ones(128)})
    with pytest.raises(HooklineError, match="scores at"):
        ask(model, "scores", point=POINT.format(0), probe=AttachedProbe(model, fitted[None]))
    with pytest.raises(HooklineError, match="64 dimensions"):
        ask(model, "scores", probe=AttachedProbe(model, {POINT.format(0): torch.ones(64)}))
    with pytest.raises(HooklineError, match="need a probe"):
        ask(model, "scores")
