"""Every Python block in the README and the docs runs, top to bottom."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_code_runs(page) -> None:
    code = "\n".join(blocks(page))
    exec(compile(code, page, "exec"), {"__name__": page})


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / link).exists(), link


def test_the_table_in_the_quickstart_is_what_is_printed(capsys) -> None:
    text = (ROOT / "docs/quickstart.md").read_text()
    table = re.search(r"^```\n(point .*?)^```", text, re.DOTALL | re.MULTILINE)
    exec("\n".join(blocks("docs/quickstart.md")[:2]), {"__name__": "quickstart"})
    assert table is not None
    assert capsys.readouterr().out.strip() == table[1].strip()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
