"""The demo: a guided tour of tinyworld, in the terminal and as a page of the explorer that opens from disk."""

from __future__ import annotations

import time
from pathlib import Path
from textwrap import fill, indent

import torch

from hookline.demo.chapters import find_all
from hookline.demo.story import story
from hookline.explore.saved import page_data
from hookline.explore.views import MEASURES, SWEEPS
from hookline.files.tensorfile import make_folder, write_bytes
from hookline.loading import load
from hookline.pages.document import document


def demo(out: Path = Path("out")) -> Path:
    """Print the tour of tinyworld, write `demo.html` to the folder `out`, and return its path."""
    start = time.perf_counter()
    make_folder(out, "the page of the demo")
    print("Loading tinyworld, the model that ships with the package.")
    model = load("tinyworld")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # fastest for a model this small
    try:
        told = story(find_all(model))
        data = page_data(model, "tinyworld", [step for step, _ in told], measures=MEASURES, sweeps=SWEEPS)
    finally:
        torch.set_num_threads(threads)
    prompt = ""
    for number, (step, table) in enumerate(told, 1):
        print(f"\n{number}. {step.title}\n")
        if step.state["prompt"] != prompt:
            prompt = step.state["prompt"]
            print(f"  > {prompt.strip()}\n")
        print(fill(step.text.partition("\n")[0], 100))
        if table:
            print(f"\n{indent(table, '  ')}")
    path = out / "demo.html"
    write_bytes(path, document(data).encode(), "the page of the demo")
    print(f"\nThe tour took {time.perf_counter() - start:.1f} s. To look and to touch, open in a browser: {path}")
    return path
