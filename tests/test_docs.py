"""Every Python block in the README and the docs runs, top to bottom, and prints and draws what the page shows.

A page shows output in two ways. A comment on a line with `print(…)`, or on the lines after it, is what that line
prints. A code block without a language is what the Python blocks before it print. In both, "…" matches any text, and
spaces at the start and end of a line are ignored. An image that a page's code saves is compared with the image of
that name in docs/.
"""

import importlib.util
import io
import re
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest
from test_layers import LAYERS

ROOT = Path(__file__).parent.parent
WRITTEN = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/recipes/*.md")]
PAGES = ["README.md", *sorted(page.relative_to(ROOT).as_posix() for page in WRITTEN)]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def source(page: str) -> str:
    """The page with everything blank except its Python code, so that line numbers are those of the page."""
    text, kept = read(page), {}
    for block in BLOCK.finditer(text):
        if block[1] == "python":
            first = text.count("\n", 0, block.start(2))
            kept.update(enumerate(block[2].splitlines(), first))
    return "\n".join(kept.get(number, "") for number in range(text.count("\n") + 1))


def shown_in_comments(code: str) -> dict[int, str]:
    """The output that comments show, by the line of its `print`."""
    comments = {
        token.start[0]: token.string.removeprefix("#")
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.COMMENT
    }
    lines, shown = code.splitlines(), {}
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("print("):
            after = number + 1
            while after <= len(lines) and lines[after - 1].startswith("#"):
                after += 1
            output = [comments[each] for each in range(number, after) if each in comments]
            if output:
                shown[number] = "\n".join(output)
    return shown


def shown_in_blocks(page: str) -> dict[tuple[int, int], str]:
    """The output that blocks without a language show, by the first and last line of the code that prints it."""
    text, shown, first = read(page), {}, 1
    for block in BLOCK.finditer(text):
        if not block[1]:
            last = text.count("\n", 0, block.start())
            shown[first, last] = block[2]
            first = last
    return shown


def matches(shown: str, printed: str) -> bool:
    pattern = r"\n".join(".*".join(map(re.escape, line.strip().split("…"))) for line in shown.strip().splitlines())
    text = "\n".join(line.strip() for line in printed.splitlines())
    return re.search(rf"^{pattern}$", text, re.DOTALL | re.MULTILINE) is not None


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in read(page)])
def test_code_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch) -> None:
    printed: dict[int, str] = defaultdict(str)

    def record(*values: object, sep: str = " ", end: str = "\n") -> None:
        printed[sys._getframe(1).f_lineno] += sep.join(map(str, values)) + end

    monkeypatch.chdir(tmp_path)
    code = source(page)
    exec(compile(code, page, "exec"), {"__name__": page, "print": record})
    for line, shown in shown_in_comments(code).items():
        assert matches(shown, printed[line]), f"{page}:{line} prints:\n{printed[line]}"
    for (first, last), shown in shown_in_blocks(page).items():
        output = "".join(text for line, text in sorted(printed.items()) if first <= line <= last)
        assert matches(shown, output), f"{page}:{first}-{last} prints:\n{output}"
    for drawn in tmp_path.glob("*.png"):
        assert_same_image(drawn, ROOT / "docs" / drawn.name)


def assert_same_image(drawn: Path, shown: Path) -> None:
    """Fonts may differ a little between versions of matplotlib."""
    from matplotlib.image import imread

    one, other = imread(drawn), imread(shown)
    assert one.shape == other.shape, shown
    assert abs(one - other).mean() < 0.02, shown


def test_output_that_differs_is_noticed() -> None:
    code = "print(1)   # 1\nprint('a')\n# a\n# b…\nx = 2   # a note"
    assert shown_in_comments(code) == {1: " 1", 2: " a\n b…"}
    assert matches("a\nb…", "first\n  a\nb and c\n")
    assert not matches("a\nb", "a\nb and c\n")


def test_diagrams_show_the_points_of_the_models(tmp_path, monkeypatch) -> None:
    """`main` raises if a diagram, or the table in docs/points.md, differs from the models."""
    spec = importlib.util.spec_from_file_location("make_points", ROOT / "tools/make_points.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/points.md").write_text(read("docs/points.md"), encoding="utf-8")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    script.main()
    for drawn in (tmp_path / "docs").glob("*.svg"):
        assert drawn.read_text() == read(f"docs/{drawn.name}"), "run tools/make_points.py"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"])
def test_links_lead_somewhere(page) -> None:
    for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", read(page)):
        target = (ROOT / page).parent / link if link else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 150


def test_the_tree_of_packages_is_complete_and_in_order() -> None:
    tree = next(block[2] for block in BLOCK.finditer(read("docs/architecture.md")) if block[2].startswith("src/"))
    assert re.findall(r"^  (\w+)", tree, re.MULTILINE) == list(LAYERS)
