"""Pages of notebooks in a real browser, where Chromium and playwright are installed: figures, and the widget."""

import json
from dataclasses import replace

import pytest
import torch
from browsers import OTHER, PROMPT, chromium, clean_page
from stores import tinyworld

from hookline.experiments import figures
from hookline.experiments.result import Result
from hookline.explore.session import Session
from hookline.pages.document import widget_module


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser):
    """A page without a network."""
    options = {"viewport": {"width": 1000, "height": 800}, "offline": True}
    with clean_page(browser, own=("file:", "data:", "blob:"), **options) as found:
        yield found


def opened(page, figure, tmp_path) -> None:
    page.goto(figure.save(tmp_path / "figure.html").as_uri())
    page.wait_for_selector(".panel")
    assert page.locator(".panel:empty").count() == 0


def said(value: float, digits: int = 6) -> float:
    return pytest.approx(value, rel=10 ** (1 - digits))


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def tip(page) -> str:
    page.wait_for_selector(".tip:visible")
    return page.locator(".tip").inner_text()


def heads(**info) -> Result:
    torch.manual_seed(0)
    coords = {"layer": [0, 1, 2], "head": [0, 1, 2, 3]}
    return Result(torch.randn(3, 4), ("layer", "head"), coords, "logit_diff", info)


def test_a_heat_map_has_the_numbers_of_the_result(page, tmp_path) -> None:
    result = heads(clean=0.25)
    opened(page, result.plot_html(), tmp_path)
    page.locator("canvas").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    label, value = tip(page).splitlines()
    assert label == "layer 2, head 1"
    assert number(value) == said(float(result.values[2, 1]))


def test_panels_light_up_together(page, tmp_path) -> None:
    values = torch.rand(2, 3, 4)
    coords = {"metric": ["prob", "rank"], "layer": [0, 1, 2], "pos": ["0: When", "1: Mary", "2: <b>", "3: &"]}
    opened(page, Result(values, ("metric", "layer", "pos"), coords).plot_html(), tmp_path)
    assert page.locator("h2").all_inner_texts() == ["prob", "rank"]
    image = "canvas => canvas.toDataURL()"
    before = page.locator("canvas").nth(1).evaluate(image)
    page.locator("canvas").first.hover(position={"x": 100, "y": 80})
    assert page.locator("canvas").nth(1).evaluate(image) != before


def test_bars_have_the_numbers_of_the_result(page, tmp_path) -> None:
    row = heads(clean=0.25).sel(layer=1)
    opened(page, row.plot_html(), tmp_path)
    labels = page.locator(".row").evaluate_all("rows => rows.map(row => row.getAttribute('aria-label'))")
    assert [label.split(":")[0] for label in labels] == ["head 0", "head 1", "head 2", "head 3"]
    assert [number(label.split(":")[1]) for label in labels] == [said(x, 4) for x in row.values.tolist()]
    page.locator(".row").nth(2).hover()
    assert number(tip(page).splitlines()[1]) == said(float(row.values[2]))


def test_bars_of_counts_are_written_without_decimals(page, tmp_path) -> None:
    counts = Result(torch.tensor([26.0, 0.0, 1200.0]), ("head",), {"head": ["a", "b", "c"]})
    opened(page, counts.plot_html(), tmp_path)
    labels = page.locator(".row").evaluate_all("rows => rows.map(row => row.getAttribute('aria-label'))")
    assert [label.split(": ")[1] for label in labels] == ["26", "0", "1200"]


def test_curves_have_the_numbers_of_the_result(page, tmp_path) -> None:
    values = torch.tensor([[1.0, 0.5, float("nan")], [1.0, -0.75, 0.125]])
    coords = {"order": ["as ranked", "reversed"], "count": [0, 10, 100]}
    opened(page, Result(values, ("order", "count"), coords, info={"clean": 1.0}).plot_html(), tmp_path)
    page.locator(".curves").focus()
    page.keyboard.press("ArrowRight")
    assert tip(page).split() == ["count", "10", "as", "ranked", "0.500000", "reversed", "−0.750000"]
    page.keyboard.press("ArrowRight")
    assert tip(page).split()[-3:] == ["–", "reversed", "0.125000"]
    assert page.locator("circle").count() == 5
    assert page.locator(".keys").inner_text().split() == ["as", "ranked", "reversed"]


def test_attention_colors_the_text_by_what_a_token_looks_at(page, tmp_path) -> None:
    model = tinyworld()
    pattern = model.cache(PROMPT)["pattern", 3][0]
    texts = model.to_str_tokens(PROMPT)
    opened(page, figures.attention_map(texts, pattern), tmp_path)
    page.get_by_role("button", name="head 4", exact=True).click()
    page.locator("[data-pos='13']").hover()
    shares = page.locator("[data-pos]").evaluate_all("chips => chips.map(chip => parseFloat(chip.title))")
    assert shares == [pytest.approx(100 * x, abs=0.051) for x in pattern[4, 13].tolist()]
    assert page.locator("[aria-pressed=true]").inner_text() == "head 4"


def test_values_color_the_tokens(page, tmp_path) -> None:
    texts, values = ["a", " b", "<script>alert(1)</script>"], torch.tensor([[0.0, 1.5, 3.0], [-1.0, 0.0, 1.0]])
    opened(page, figures.colored_tokens(texts, values, names=["loss", "<b>change</b>"]), tmp_path)
    assert page.locator(".colored").inner_text() == "".join(texts)
    assert page.locator("script").count() == 2
    page.locator("[data-pos='1']").hover()
    assert tip(page).splitlines() == ["1: ·b", "loss: 1.50000", "<b>change</b>: 0.000000"]
    shade = "span => getComputedStyle(span).backgroundColor"
    first = page.locator("[data-pos='0']").evaluate(shade)
    page.get_by_role("button", name="<b>change</b>").click()
    assert page.locator("[data-pos='0']").evaluate(shade) != first


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_figure_in_a_frame(page, theme) -> None:
    figure = replace(heads()).plot_html(theme=theme, title="<i>title</i>")
    page.set_content(f"<body>{figure._repr_html_()}</body>")
    frame = page.frame_locator("iframe")
    assert frame.locator("h1").inner_text() == "<i>title</i>"
    assert frame.locator("[data-theme]").get_attribute("data-theme") == theme
    assert frame.locator("canvas").bounding_box()["height"] + 100 < page.locator("iframe").bounding_box()["height"]


RUDE = "* { color: red !important; font-size: 40px } button { display: none }"
FAKE = """
async ({ text, given, isDead }) => {
  const listeners = {};
  const model = {
    values: given, sent: 0,
    get: (name) => model.values[name],
    set: (name, value) => { model.values[name] = value; (listeners[`change:${name}`] ?? []).forEach((act) => act()); },
    save_changes() {},
    on: (name, act) => { (listeners[name] ??= []).push(act); },
    off: (name, act) => { listeners[name] = (listeners[name] ?? []).filter((each) => each !== act); },
    async send(message) {
      model.sent += 1;
      if (isDead) return;
      const reply = await window.kernel(JSON.stringify(message));
      (listeners["msg:custom"] ?? []).forEach((act) => act(JSON.parse(reply)));
    },
  };
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  const place = document.body.appendChild(document.createElement("div"));
  place.className = "output";
  const { default: widget } = await import(url);
  (window.widgets ??= []).push({ model, place, end: await widget.render({ model, el: place }) });
}
"""


@pytest.fixture
def notebook(page):
    """A page with rough manners, in which widgets are shown; returns a function that shows one."""
    session = Session(tinyworld(), "tinyworld")

    def kernel(text: str) -> str:
        message = json.loads(text)
        reply = session.ask(message["body"]).answered() if message["path"] == "ask" else {}
        return json.dumps({"id": message["id"], "tab": message["tab"], "reply": reply})

    page.goto(f"data:text/html,<meta charset=utf-8><style>{RUDE}</style><h1>A notebook</h1>")
    page.expose_function("kernel", kernel)

    def show(prompt: str, answers=None, **state) -> None:
        given = {"about": session.described, "answers": answers or [], "height": 600}
        given["state"] = {"prompt": prompt, "other": "", "edits": [], **state}
        page.evaluate(FAKE, {"text": widget_module(), "given": given, "isDead": bool(answers)})

    yield show
    session.close()


def settled(page, nth: int) -> None:
    page.wait_for_function(
        "nth => { const root = widgets[nth].place.firstChild.shadowRoot.firstChild;"
        " const panels = [...root.querySelectorAll('[data-slot]')];"
        " return panels.every(each => each.dataset.answered === root.dataset.round) }",
        arg=nth,
    )


def first_row(page, nth: int) -> str:
    return page.locator(".output").nth(nth).locator("[data-slot=next] .row").first.get_attribute("aria-label")


def test_two_widgets_in_one_notebook(page, notebook) -> None:
    notebook(PROMPT)
    notebook(OTHER)
    for nth, expected in enumerate(("·Mary", "·John")):
        settled(page, nth)
        assert first_row(page, nth).startswith(f"{expected}: ")
    assert page.evaluate("location.hash") == ""
    heights = page.locator(".widget").evaluate_all("nodes => nodes.map(node => node.getBoundingClientRect().height)")
    assert heights == [600, 600]


def test_styles_and_keys_stay_inside(page, notebook) -> None:
    plain = page.locator("h1").evaluate("node => getComputedStyle(node).margin")
    page.evaluate("addEventListener('keydown', () => { window.leaked = true })")
    notebook(PROMPT)
    settled(page, 0)
    assert page.get_by_role("button", name="Run").is_visible()
    assert page.locator(".widget").evaluate("node => getComputedStyle(node).color") != "rgb(255, 0, 0)"
    assert page.locator("body > h1").evaluate("node => getComputedStyle(node).margin") == plain
    page.get_by_label("Prompt", exact=True).fill(OTHER)
    page.keyboard.press("Enter")
    page.wait_for_function("() => widgets[0].model.values.state.prompt.includes('Mary gave')")
    settled(page, 0)
    assert first_row(page, 0).startswith("·John: ")
    assert page.evaluate("window.leaked") is None


def test_the_state_can_be_set_from_python(page, notebook) -> None:
    notebook(PROMPT)
    settled(page, 0)
    edit = {"kind": "zero", "point": "blocks.3.attn.hook_z", "head": 4, "on": True}
    page.evaluate(
        "edit => { const { model } = widgets[0]; model.set('state', { ...model.get('state'), edits: [edit] }) }", edit
    )
    page.wait_for_selector(".edits li")
    settled(page, 0)
    assert first_row(page, 0).startswith("·John: ")


def test_a_saved_notebook_shows_what_was_there(page, notebook) -> None:
    notebook(PROMPT)
    settled(page, 0)
    kept = page.evaluate("JSON.parse(JSON.stringify(widgets[0].model.values.answers))")
    assert {"next", "lens", "heads", "tokens"} <= {question["view"] for question, _ in kept}
    page.evaluate("widgets[0].end()")
    assert page.locator(".widget").count() == 0
    notebook(PROMPT, answers=kept)
    assert page.locator("canvas").count() == 4
    assert page.get_by_role("button", name="Run").count() == 0
    assert page.locator(".error").count() == 0
