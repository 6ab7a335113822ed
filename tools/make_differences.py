"""Copy the tables of differences into the package, where `hookline migrate` reads them.

python tools/make_differences.py
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = {"transformer_lens": "from-transformerlens.md"}


def table(page: str) -> str:
    """Return the rows of the table in the section `Differences` of a page."""
    section = (ROOT / "docs" / page).read_text(encoding="utf-8").split("\n## Differences\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return "\n".join(rows[1:]) + "\n"


def target(library: str) -> Path:
    """Return the copy of a library's table."""
    return ROOT / "src/hookline/compat" / library / "differences.md"


if __name__ == "__main__":
    for library, page in PAGES.items():
        target(library).write_text(table(page), encoding="utf-8")
