"""Run the notebooks, and write their pages: `python docs/make_notebooks.py [NAME …]`, or `make notebooks` for all.

notebooks/NAME.py is the source, in the percent format of jupytext. From it are made

  notebooks/NAME.ipynb         without outputs, for Jupyter
  docs/notebooks/NAME.md       the text, the code and its output, with the figures beside it
  out/notebooks/NAME.ipynb     with outputs; not part of the repository

A cell with the tag "varies" prints numbers that differ between machines, such as those of a training. The title of a
cell describes its image. Screenshots of interactive pages need Chromium, and playwright from PyPI.
"""

from __future__ import annotations

import base64
import html
import io
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from PIL import Image

ROOT = Path(__file__).parent.parent
ORDER = (
    "first_look",
    "indirect_objects",
    "induction_heads",
    "steering",
    "sparse_autoencoder",
    "vision",
    "your_own_network",
    "watch_a_training",
    "from_transformerlens",
)
SET_UP = """import matplotlib.pyplot
%matplotlib inline
matplotlib.pyplot.rcParams["figure.dpi"] = 90"""
MOST_BYTES = 60_000


@dataclass
class Page:
    """A page of the docs: its Markdown, and the files beside it."""

    name: str
    text: str = ""
    files: dict[str, bytes] = field(default_factory=dict)

    def add(self, text: str) -> None:
        """Append a block."""
        self.text += text.strip("\n") + "\n\n"

    def file(self, content: bytes, ending: str) -> str:
        """Add a file, and return its name."""
        name = f"{self.name}-{len([each for each in self.files if each.count('.') == 1]) + 1}{ending}"
        self.files[name] = content
        return name

    def write(self, folder: Path) -> None:
        """Write the page and its files in place of those of an earlier run."""
        for old in folder.glob(f"{self.name}-*"):
            old.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.text.rstrip() + "\n", encoding="utf-8")
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def read(name: str) -> NotebookNode:
    """The notebook of a source file; ids of cells are their numbers, so the same source gives the same notebook."""
    notebook = jupytext.read(ROOT / f"notebooks/{name}.py")
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return notebook


def for_jupyter(name: str) -> str:
    """The notebook without outputs, as text; its first cell installs the checkout that it is in, and what it needs."""
    notebook = read(name)
    for cell in notebook.cells:
        cell.source = cell.source.replace("](../", "](../docs/")  # as seen from notebooks/
    needs = re.findall(r"# needs: (.*)", "\n".join(cell.source for cell in notebook.cells))
    install = "\n".join(['%pip install -q "..[plot,vision]"', *(f"%pip install -q {each}" for each in needs)])
    notebook.cells.insert(1, new_code_cell(install, id="install", metadata={"tags": ["install"]}))
    return nbformat.writes(notebook) + "\n"


def executed(name: str) -> NotebookNode:
    """The notebook with outputs; a cell that raises stops it."""
    notebook = read(name)
    notebook.cells.insert(0, new_code_cell(SET_UP))
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    del notebook.cells[0]
    return notebook


def page_of(name: str, notebook: NotebookNode) -> Page:
    """The page of an executed notebook."""
    page = Page(name)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            page.add(f"```python\n{cell.source}\n```")
            if printed := "".join(each.text for each in cell.outputs if each.get("name") == "stdout"):
                page.add(f"```\n{printed.rstrip()}\n```")
            for output in cell.outputs:
                _add_output(page, cell, output)
        else:
            page.add(cell.source)
        if number == 0:
            page.add(" · ".join(f"[{name}.{ending}](../../notebooks/{name}.{ending})" for ending in ("ipynb", "py")))
    return page


def _add_output(page: Page, cell: NotebookNode, output: NotebookNode) -> None:
    """Add what a cell shows: an image, an interactive page or the repr of its last value, but no progress bars."""
    data, drawn = output.get("data", {}), any("image/png" in each.get("data", {}) for each in cell.outputs)
    about = cell.metadata.get("title", "")
    if "image/png" in data:
        page.add(f"![{about}]({page.file(compact(base64.b64decode(data['image/png'])), '.png')})")
    elif "<iframe" in data.get("text/html", ""):
        _, document, frame = data["text/html"].split('"', 2)
        there = page.file(html.unescape(document).encode(), ".html")
        page.add(f"[![{about}]({there}.png)]({there})")
        page.files[f"{there}.png"] = re.findall(r"height: (\d+)px", frame)[0].encode()  # replaced by a screenshot
    elif output.output_type == "execute_result" and not drawn:  # the value of a cell that draws is matplotlib's Axes
        page.add(f"```\n{data['text/plain']}\n```")


def compact(image: bytes) -> bytes:
    """The image with at most 256 colors."""
    written = io.BytesIO()
    Image.open(io.BytesIO(image)).convert("RGB").quantize(256).save(written, "png", optimize=True)
    return written.getvalue()


def take_screenshots(page: Page) -> None:
    """Replace the heights of interactive pages by screenshots."""
    pages = [name for name in page.files if name.endswith(".html")]
    if not pages:
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"))
        for name in pages:
            (Path(folder) / name).write_bytes(page.files[name])
            view = browser.new_page(viewport={"width": 860, "height": int(page.files[f"{name}.png"])})
            view.goto(f"file://{folder}/{name}")
            view.wait_for_timeout(500)
            page.files[f"{name}.png"] = compact(view.screenshot())
        browser.close()


def index() -> str:
    """The page that lists the notebooks."""
    lines = ["# Notebooks", "", "Each takes about a minute on two CPU cores, and needs no GPU.", ""]
    for name in ORDER:
        title, question, *_ = read(name).cells[0].source.split("\n\n")
        lines.append(f"- [{title.removeprefix('# ')}]({name}.md): {question}".replace("\n", " "))
    return "\n".join(lines) + "\n"


def main(*names: str) -> None:
    """Make these notebooks, or all."""
    folder = ROOT / "docs/notebooks"
    (ROOT / "out/notebooks").mkdir(parents=True, exist_ok=True)
    for name in names or ORDER:
        notebook: Any = executed(name)
        page = page_of(name, notebook)
        take_screenshots(page)
        page.write(folder)
        (ROOT / f"notebooks/{name}.ipynb").write_text(for_jupyter(name), encoding="utf-8")
        nbformat.write(notebook, ROOT / f"out/notebooks/{name}.ipynb")
        large = {name: len(file) for name, file in page.files.items() if len(file) > MOST_BYTES}
        print(f"{name}: {len(page.files)} files beside the page{f', too large: {large}' if large else ''}")
    (folder / "index.md").write_text(index(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
