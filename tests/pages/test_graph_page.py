"""The page of an attribution graph in a real browser: its numbers, pins, groups, and the file that it saves."""

import json

import pytest
from browsers import chromium, clean_page

import hookline
from hookline.experiments import graphs


@pytest.fixture(scope="module")
def page():
    with chromium() as browser, clean_page(browser) as found:
        yield found


def test_nodes_are_looked_into_pinned_grouped_and_saved(page, tmp_path) -> None:
    model = hookline.load("tinyworld")
    graph = graphs.attribution_graph(model, "The capital of Italy is", progress=False)
    page.goto(graph.plot_html().save(tmp_path / "graph.html").as_uri())
    assert page.locator(".nodes .node").count() == len(graph)
    logit = graph.of("logit")[0]
    page.locator(f'[data-id="{logit.id}"]').click()
    first = graph.into(logit).top(1)[0]
    shown = page.locator(".links li").first.inner_text()
    assert f"{abs(first.value):.2f}"[:3] in shown
    page.get_by_role("button", name="Pin its 5 largest inputs").click()
    assert page.locator(".subgraph .unit").count() == 6
    page.locator(".subgraph .unit.mlp").nth(0).click()
    page.locator(".subgraph .unit.mlp").nth(1).click()
    page.get_by_label("name of the group").fill("two")
    page.get_by_role("button", name="Group selected").click()
    assert page.locator(".subgraph .unit.group text").text_content() == "two (2)"
    page.reload()  # the state is in the address
    assert page.locator(".subgraph .unit").count() == 5
    with page.expect_download() as started:
        page.get_by_role("button", name="Save JSON").click()
    path = tmp_path / "saved.json"
    started.value.save_as(path)
    content = json.loads(path.read_text())
    assert len(content["qParams"]["pinnedIds"]) == 6
    for address in ("#%7B", "#5", "#%7B%22pinned%22%3A5%7D", "#%7B%22groups%22%3A%5B5%2C%5B%5D%5D%7D"):
        page.goto("about:blank")
        page.goto(graph.plot_html().save(tmp_path / "graph.html").as_uri() + address)
        assert page.locator(".nodes .node").count() == len(graph)
    found = graphs.AttributionGraph.load(path)
    assert found.edges.equal(graph.edges)
    assert len(found.groups["two"]) == 2
