"""Check the built docs site: nothing comes from elsewhere, no link is broken, and search finds what people look for.

    python tools/check_site.py out/site

`make site` runs it after MkDocs, which checks the links that are written in Markdown.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SEARCHED = ("hook_z", "KV cache", "UnknownPointError")
"""What search must find."""
LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "link": "href",
}
"""The elements that load something, and their attribute."""
IN_STYLE = re.compile(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)")


class Page(HTMLParser):
    """The links, loaded files and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the element links to, loads, or is called."""
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.loaded |= styled(given.get("style", ""))
        self._in_style = tag == "style"
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag in LOADS and LOADS[tag] in given:
            self.loaded.add(given[LOADS[tag]])

    def handle_data(self, data: str) -> None:
        """Note what a style sheet in the page loads."""
        if self._in_style:
            self.loaded |= styled(data)


def styled(css: str) -> set[str]:
    """What a style sheet loads."""
    return {first or second for first, second in IN_STYLE.findall(css)}


def is_elsewhere(address: str) -> bool:
    """Whether an address is on another host."""
    return bool(urlsplit(address).netloc)


@cache
def page_of(path: Path) -> Page:
    """The parsed page."""
    return Page(path.read_text(encoding="utf-8"))


def broken(path: Path, address: str) -> bool:
    """Whether a link in a page leads to a file or an anchor that does not exist."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return False
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return True
    anchor = unquote(parts.fragment)
    return bool(anchor) and target.suffix == ".html" and anchor not in page_of(target).anchors


def problems(site: Path) -> Iterator[str]:
    """Everything that is wrong with a built site."""
    page_of.cache_clear()
    for path in sorted(site.rglob("*.html")):
        page, name = page_of(path), path.relative_to(site)
        yield from (f"{name} loads {each} from elsewhere" for each in sorted(page.loaded) if is_elsewhere(each))
        if name.name != "404.html":  # its addresses begin at the root of a server
            found = sorted(page.links | {each for each in page.loaded if not each.startswith("data:")})
            yield from (f"{name} links to {each}, which does not exist" for each in found if broken(path, each))
    for path in sorted(site.rglob("*.css")):
        for each in sorted(styled(path.read_text(encoding="utf-8"))):
            if is_elsewhere(each):
                yield f"{path.relative_to(site)} loads {each} from elsewhere"
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    texts = " ".join(f"{entry['title']} {entry['text']}" for entry in index["docs"]).lower()
    yield from (f"search does not find {each!r}" for each in SEARCHED if each.lower() not in texts)


def main(folder: str) -> None:
    """Print the problems, and exit with 1 if there are any."""
    found = list(problems(Path(folder)))
    print("\n".join(found) or f"{folder}: links, search and files are all right")
    sys.exit(bool(found))


if __name__ == "__main__":
    main(sys.argv[1])
