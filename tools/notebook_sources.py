"""The notebooks as their sources have them: notebooks/NAME.py, in the percent format of jupytext."""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

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
