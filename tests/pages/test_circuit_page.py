"""The page of a circuit in a real browser: its nodes, its edges, and that what it shows is text."""

import pytest
import torch
from browsers import chromium, clean_page

from hookline.errors import HooklineError
from hookline.experiments.circuits import Circuit, circuit
from hookline.experiments.edges import EdgeScores

SCORES = EdgeScores(
    torch.tensor([3.0, -2.0, 1.0, 0.5]),
    ["embed", "L0H1", "embed", "mlp0"],
    ["L0H1.v", "mlp0", "mlp0", "logits"],
    "<img src=x onerror=alert(1)>",
)


@pytest.fixture(scope="module")
def page():
    with chromium() as browser, clean_page(browser) as found:
        yield found


def test_edges_are_chosen_and_listed(page, tmp_path) -> None:
    html = circuit(SCORES, 1).plot_html(title="</script><script>alert(1)</script>")
    page.goto(html.save(tmp_path / "circuit.html").as_uri())
    assert page.locator("h1").inner_text() == "</script><script>alert(1)</script>"
    assert page.locator("img").count() == 0
    assert sorted(page.locator(".nodes .unit text").all_text_contents()) == ["L0H1", "embed", "logits", "mlp0"]
    assert page.locator(".edge").count() == 4
    page.get_by_role("button", name="mlp0", exact=True).click()
    assert page.locator(".links li").all_inner_texts() == ["L0H1\n−2.00", "embed\n1.00", "logits\n0.500"]
    slider = page.get_by_label("number of edges")
    slider.fill("0")
    slider.dispatch_event("change")
    assert page.locator(".edge").count() == 1
    assert page.locator("output").inner_text() == "1"


def test_an_empty_circuit_has_a_page_and_a_large_one_is_refused(page, tmp_path) -> None:
    page.goto(circuit(SCORES, 0).plot_html().save(tmp_path / "empty.html").as_uri())
    assert page.locator(".edge").count() == 0
    count = 6000
    many = EdgeScores(torch.ones(count), [f"L0H{at}" for at in range(count)], ["logits"] * count)
    with pytest.raises(HooklineError, match="5,000"):
        Circuit(many, torch.ones(count, dtype=torch.bool)).plot_html()
