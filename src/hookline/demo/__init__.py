"""The demo: a guided tour of tinyworld, in the terminal and as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

import torch

from hookline.demo.chapters import find_all
from hookline.demo.page import page
from hookline.demo.story import story
from hookline.engine.tensorfile import make_folder, write_bytes
from hookline.load import load


def demo(out: Path = Path("out")) -> Path:
    """Print the tour of tinyworld, write `demo.html` to the folder `out`, and return its path."""
    make_folder(out, "the page of the demo")
    print("Loading tinyworld, the model that ships with the package.")
    model = load("tinyworld")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # fastest for a model this small
    try:
        chapters = story(find_all(model))
    finally:
        torch.set_num_threads(threads)
    for number, chapter in enumerate(chapters, 1):
        print(f"\n{number}. {chapter}")
    path = out / "demo.html"
    write_bytes(path, page(chapters).encode(), "the page of the demo")
    print(f"\nThe same with figures: {path}")
    return path
