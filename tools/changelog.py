"""Join the files of changelog.d into CHANGELOG.md.

    python tools/changelog.py                 # print what the next release would say
    python tools/changelog.py --write 0.2.0   # write it below a heading with today's date, and delete the files

A file is named after an issue and a topic (`14-plots.md`) and has one bullet for each change; topics become headings,
and files with the same topic go below the same one.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"(\d+)-([a-z0-9-]+)\.md")
UNRELEASED = "## Unreleased\n"
NOTE = "\nChanges since the last release are in [changelog.d](changelog.d), one file for each.\n"


def fragments(folder: Path) -> list[Path]:
    """The files of changes, by issue and topic; ValueError for one that cannot be joined."""
    found = [path for path in folder.glob("*.md") if path.name != "README.md"]
    for path in found:
        if NAME.fullmatch(path.name) is None:
            raise ValueError(f"{path.name} is not named after an issue and a topic, as 14-plots.md is")
        if not path.read_text(encoding="utf-8").strip():
            raise ValueError(f"{path.name} is empty")
    return sorted(found, key=lambda path: (int(path.name.partition("-")[0]), path.name))


def joined(folder: Path) -> str:
    """All changes, below one heading for each topic."""
    topics: dict[str, list[str]] = defaultdict(list)
    for path in fragments(folder):
        topics[path.stem.partition("-")[2]].append(path.read_text(encoding="utf-8").strip())
    return "\n".join(
        f"**{topic.replace('-', ' ').capitalize()}**\n\n{chr(10).join(texts)}\n"
        for topic, texts in sorted(topics.items())
    )


def released(changes: str, folder: Path, version: str, day: date) -> str:
    """The text of CHANGELOG.md after a release: what was unreleased is below the version, and the next begins empty."""
    start, _, rest = changes.partition(UNRELEASED)
    if not rest:
        raise ValueError(f"CHANGELOG.md has no heading {UNRELEASED.strip()!r}")
    now, heading, earlier = rest.partition("\n## ")
    kept = now.replace(NOTE, "").strip()
    parts = [part for part in (kept, joined(folder).strip()) if part]
    text = "\n\n".join([f"{start}{UNRELEASED}{NOTE}", f"## {version} ({day.isoformat()})", *parts])
    return f"{text}\n{heading}{earlier}".rstrip() + "\n"


def main() -> None:
    """Print the changes, or release them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", metavar="VERSION", help="write CHANGELOG.md, and delete the files")
    asked = parser.parse_args()
    folder, page = ROOT / "changelog.d", ROOT / "CHANGELOG.md"
    if asked.write is None:
        print(joined(folder), end="")
        return
    text = released(page.read_text(encoding="utf-8"), folder, asked.write, date.today())
    page.write_text(text, encoding="utf-8")
    for path in fragments(folder):
        path.unlink()


if __name__ == "__main__":
    main()
