"""The page in a real browser. The first test is the short path of `make test`; the others run in `make test-all`."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from browsers import OTHER, PROMPT, ask, bars, chromium, clean_page, go_to, opened, says, settled
from stores import tinyworld
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import hookline
from hookline.experiments import ablation, logit_attribution, logit_lens, metrics, patching
from hookline.explore import explore, export_page, session, views


@pytest.fixture(scope="module")
def browser():
    with chromium("--host-resolver-rules=MAP rebound.example 127.0.0.1") as found:
        yield found


@pytest.fixture
def page(browser):
    with clean_page(browser) as found:
        yield found


@pytest.fixture
def explorer():
    with explore(tinyworld(), PROMPT, OTHER, browser=False) as found:
        yield found


def test_from_a_prompt_to_an_edit_and_back(page, explorer, tmp_path) -> None:
    """Load, hover, pin, edit, save, undo, type another prompt; then the saved page, from disk and without a network."""
    opened(page, explorer)
    prob = tinyworld()(PROMPT)[0, -1].softmax(-1).max()
    assert bars(page)["·Mary"] == f"{100 * prob:.1f} %"
    page.locator("[data-slot=lens] canvas").hover(position={"x": 200, "y": 60})
    assert page.locator(".tip").is_visible()
    assert page.locator(".chip.lit").count() == 1
    go_to(page, "heads", 3, 4)
    page.keyboard.press("Enter")
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
    ask(page, OTHER)
    settled(page)
    assert next(iter(bars(page))) == "·John"

    page.context.set_offline(True)
    page.goto((tmp_path / "saved.html").as_uri())
    page.wait_for_selector("[data-slot=lens] canvas")
    assert next(iter(bars(page))) == "·John"
    assert page.locator(".error").count() == 0


@pytest.mark.slow
def test_the_numbers_are_the_librarys(page, explorer) -> None:
    model = tinyworld()
    opened(page, explorer)
    lens = logit_lens.lens_tokens(model, PROMPT, top=10, pos=None)
    lines = "\n".join(go_to(page, "lens", 1, 5))  # layer 2
    assert lens.tokens[3][5][0].replace(" ", "·") in lines
    assert f"{100 * lens.probs[3, 5, 0]:.1f} %" in lines
    by_head = logit_attribution.direct_logit_attribution(model, PROMPT, " Mary", " John", of="heads")
    assert go_to(page, "heads", 3, 4)[-1].endswith(f"{by_head.values[3, 4]:.3f}")
    parts = logit_attribution.direct_logit_attribution(model, PROMPT, " Mary", " John")
    assert bars(page, "attribution")["3 MLP"] == f"{parts.values[-1]:.2f}"
    pattern = model.cache(PROMPT)["pattern", 3][0, 0]
    assert f"{100 * pattern[13, 1]:.1f} %" in go_to(page, "attention", 13, 1)[-1]
    metric = metrics.logit_diff(" Mary", " John")
    restored = patching.sweep(model, PROMPT, OTHER, metric, points="resid_pre", progress=False).normalized
    assert f"{100 * restored.values[1, 9]:.1f} %" in go_to(page, "patching", 1, 9)[-1]
    stream = model.cache(PROMPT)["resid_post", 0][0]
    assert float(go_to(page, "point", 2, 7)[-1].replace("−", "-")) == pytest.approx(float(stream[2, 7]), abs=1e-4)
    page.locator("[data-slot=heads] select").select_option("ablation")
    settled(page)
    page.wait_for_function("() => !document.querySelector('[data-slot=heads].busy')")
    lost = ablation.ablate(model, PROMPT, metric, progress=False)
    page.wait_for_timeout(500)
    assert go_to(page, "heads", 3, 4)[-1].replace("−", "-").endswith(f"{lost.values[3, 4] - lost.info['clean']:.3f}")


@pytest.mark.slow
def test_hovering_lights_up_everywhere(page, explorer) -> None:
    opened(page, explorer)
    frame = "done => requestAnimationFrame(() => requestAnimationFrame(done))"  # painted in the next one
    image = f"canvas => new Promise({frame}).then(() => canvas.toDataURL())"
    page.locator("[data-slot=patching] canvas").scroll_into_view_if_needed()
    before = page.locator("[data-slot=patching] canvas").evaluate(image)
    page.locator("[data-pos='9']").hover()
    assert page.locator("[data-slot=patching] canvas").evaluate(image) != before
    page.locator("[data-slot=heads] canvas").hover(position={"x": 90, "y": 40})
    lit = page.locator("[data-slot=attribution] .row.lit")
    assert lit.count() == 1
    assert "attention" in lit.get_attribute("aria-label")


@pytest.mark.slow
def test_the_keyboard_reaches_everything(page, explorer) -> None:
    opened(page, explorer)
    seen = set()
    for _ in range(150):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("() => document.activeElement.ariaLabel || document.activeElement.innerText"))
    grids = page.locator("canvas").evaluate_all("all => all.map(canvas => canvas.ariaLabel)")
    assert len(grids) >= 5
    assert {"Prompt", "Second prompt", "Copy as Python", "Save as one page", *grids} <= seen
    page.locator("[data-slot=point] canvas").focus()
    page.keyboard.press("End")
    scrolled, room = page.locator("[data-slot=point] .scroll").evaluate(
        "it => [it.scrollLeft, it.scrollWidth - it.clientWidth]"
    )
    assert scrolled >= room - 12
    box = page.locator(".tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 1280


CONTRAST = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const linear = x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const back = node => {
    const found = rgb(getComputedStyle(node).backgroundColor);
    return (found[3] ?? 1) > 0 ? found : node.parentElement ? back(node.parentElement) : [255, 255, 255];
  };
  const ratio = node => {
    const isDrawn = node instanceof SVGElement, style = getComputedStyle(node);
    const paper = light(back(isDrawn ? node.closest("section") : node));
    const ink = light(rgb(isDrawn ? style.fill : style.color));
    return (Math.max(paper, ink) + 0.05) / (Math.min(paper, ink) + 0.05);
  };
  const all = [...document.querySelectorAll("h1, h2, p, label, button, li, span, text, input, textarea, select")];
  const isSeen = node => (node.textContent.trim() || node.value) && node.getClientRects().length > 0;
  const low = all.filter(node => isSeen(node) && !node.closest(":disabled") && ratio(node) < 4.5);
  return low.map(node => `${node.textContent.slice(0, 30)} ${ratio(node)}`);
}"""


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_text_is_readable_and_nothing_is_wider_than_the_screen(browser, explorer, theme, width) -> None:
    with clean_page(browser, viewport={"width": width, "height": 844}, color_scheme=theme) as page:
        opened(page, explorer)
        go_to(page, "heads", 3, 4)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Zero", exact=True).click()
        settled(page)
        assert page.evaluate(CONTRAST) == []  # WCAG AA: 4.5
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_a_long_prompt_is_drawn_as_far_as_it_is_seen(page, explorer) -> None:
    opened(page, explorer)
    count = tinyworld().cfg.n_ctx
    ask(page, " ".join(["Mary"] * (count - 2)))
    settled(page)
    for slot in ("lens", "attention", "point"):
        assert page.locator(f"[data-slot={slot}] .error").count() == 0
        width, height = page.locator(f"[data-slot={slot}] canvas").evaluate("it => [it.clientWidth, it.clientHeight]")
        assert width <= 1280
        assert height <= 800
    tip = go_to(page, "attention", 40, 3)
    assert tip


@pytest.mark.slow
def test_markup_stays_text(page) -> None:
    bad = [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(2)>",
        "</script>",
        "&lt;b&gt;",
        '"><svg onload=alert(3)>',
    ]
    vocabulary = {text: at for at, text in enumerate(["a", "b", "c", *bad])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", additional_special_tokens=bad)
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None}
    network = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=32, n_embd=16, n_layer=2, n_head=2, **ends)).eval()
    with explore(
        hookline.hook(network, tokenizer), "".join(bad), name="</script><script>alert(4)</script>", browser=False
    ) as found:
        opened(page, found)
        scripts = page.locator("script").count()
        assert {"<script>alert(1)</script>", "</script>"} <= set(bars(page))
        assert any("<script>" in line for line in go_to(page, "lens", 0, 0))
        assert page.locator(".chip").all_inner_texts() == bad
        assert page.locator("script").count() == scripts
        assert page.locator("main img, header img, main b script").count() == 0


class Forever:
    """Makes a view run until it is canceled; the others are answered as always."""

    def __init__(self, monkeypatch, view: str) -> None:
        self.view, self.started, self.true = view, threading.Event(), views.answer
        self.is_on = True
        monkeypatch.setattr(session, "answer", self)

    def __call__(self, model, asked):
        if self.is_on and asked.view == self.view:
            self.started.set()
            while True:
                model(asked.prompt)
        return self.true(model, asked)


@pytest.mark.slow
def test_what_takes_long_shows_progress_and_can_be_canceled(page, explorer, monkeypatch) -> None:
    forever = Forever(monkeypatch, "patching")
    page.goto(explorer.address)
    assert forever.started.wait(60)
    page.wait_for_selector("progress")
    page.get_by_role("button", name="Cancel").click()
    page.wait_for_selector("text=canceled")
    forever.is_on = False
    page.get_by_role("button", name="Run").click()
    settled(page)
    assert page.locator("[data-slot=patching] canvas").count() == 1


@pytest.mark.slow
def test_a_newer_question_cancels_an_older_one(page, explorer, monkeypatch) -> None:
    forever = Forever(monkeypatch, "lens")
    page.goto(explorer.address)
    assert forever.started.wait(60)
    forever.is_on = False
    ask(page, OTHER)
    settled(page)
    assert next(iter(bars(page))) == "·John"


@pytest.mark.slow
def test_two_tabs_at_once(browser, explorer) -> None:
    with clean_page(browser) as one, clean_page(browser) as two:
        for page in (one, two):
            page.goto(explorer.address)
        ask(two, OTHER)
        for page, name in ((one, "·Mary"), (two, "·John")):
            settled(page)
            assert next(iter(bars(page))) == name


@pytest.mark.slow
def test_what_goes_wrong_is_said_and_the_page_goes_on(page, explorer, monkeypatch) -> None:
    opened(page, explorer)
    go_on = json.dumps({"prompt": PROMPT, "other": "Mary"})
    page.evaluate("state => { location.hash = encodeURIComponent(state) }", go_on)
    says(page, "patching", "tokens")
    assert page.locator("[data-slot=next] .error").count() == 0
    ask(page, "word " * 500)
    says(page, "next", "tokens")

    def out_of_memory(model, asked):
        if asked.view == "attention":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
        return views.answer(model, asked)

    with monkeypatch.context() as patched:
        patched.setattr(session, "answer", out_of_memory)
        ask(page, PROMPT)
        says(page, "attention", "not enough memory")
        settled(page)
    page.get_by_role("button", name="Run").click()
    settled(page)
    assert page.locator("[data-slot=attention] canvas").count() == 1


@pytest.mark.slow
def test_a_server_that_has_ended_is_told(browser, explorer) -> None:
    context = browser.new_context()
    page = context.new_page()
    opened(page, explorer)
    explorer.close()
    page.get_by_role("button", name="Run").click()
    says(page, "next", "the server does not answer")
    context.close()


@pytest.fixture
def foreign():
    """A page of another site on this machine; `foreign.heard` has what its script found out."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>another site</title>")

        def log_message(self, *_) -> None:
            pass

    site = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{site.server_port}/"
    site.shutdown()
    site.server_close()


@pytest.mark.slow
def test_other_sites_get_nothing(browser, explorer, foreign) -> None:
    """Another origin that knows the address, a name made to point to this machine, and an address without the token."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(foreign)
    post = """async ([address, mode]) => { try {
        const headers = mode === "cors" ? { "Content-Type": "application/json" } : {};
        const options = { method: "POST", mode, headers, body: "{}" };
        const reply = await fetch(address + "cancel", options);
        return `${reply.status} ${await reply.text()}`;
    } catch (error) { return error.name; } }"""
    assert page.evaluate(post, [explorer.address, "cors"]) == "TypeError"
    assert page.evaluate(post, [explorer.address, "no-cors"]) == "TypeError"
    page.evaluate(
        "src => document.body.append(Object.assign(document.createElement('iframe'), { src }))", explorer.address
    )
    page.wait_for_timeout(300)
    assert page.frames[-1].locator("header").count() == 0
    rebound = explorer.address.replace("127.0.0.1", "rebound.example")
    assert page.goto(rebound).status == 403
    assert page.goto(explorer.address[:-2] + "/").status == 403
    assert page.goto(explorer.address).status == 200
    context.close()


@pytest.mark.slow
def test_an_exported_page_opens_from_disk(page, tmp_path) -> None:
    with torch.no_grad():
        path = export_page(tinyworld(), tmp_path / "page.html", PROMPT, OTHER)
    page.context.set_offline(True)
    page.goto(path.as_uri())
    for slot in ("lens", "heads", "attention", "patching", "point"):
        page.wait_for_selector(f"[data-slot={slot}] canvas")
    assert page.locator(".error").count() == 0


@pytest.mark.slow
def test_the_link_that_a_browser_is_started_with(page, explorer) -> None:
    page.goto(explorer._server.link)
    page.wait_for_url(f"{explorer.address}**")
    page.wait_for_selector("[data-round]")
    settled(page)
    assert page.evaluate("document.referrer") == ""
