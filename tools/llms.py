"""Write llms.txt, the list of pages for language models: each page with its title and its first sentence.

python tools/llms.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
INTRODUCTION = """# hookline

> A Python library that opens up neural networks: read, cache, edit, ablate and trace the activations inside any PyTorch
> model, above all those of Hugging Face transformers, by name and without changing the model.

- Start with `model = hookline.load("tinyworld")`, which is in the package, or `hookline.hook(any_module)`.
- `[*model.hook_dict]` has the names that hooks and caches take; an error for a wrong name suggests the right one.
- `model.verify()` checks every point of a model, and `hookline doctor --json` the machine. Commands take `--json`;
  docs/cli.md has the exit statuses.
"""
SECTIONS = {"Recipes": "recipes/", "Guides": "", "Coming from other libraries": "from-", "Experiments": "experiments"}


def about(page: Path) -> str:
    """The line of a page: its title, and the first sentence below it."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    title = re.search(r"^# (.*)$", text, re.MULTILINE)
    assert title is not None, f"{page} has no title"
    paragraphs = (" ".join(each.split()) for each in text[title.end() :].split("\n\n"))
    prose = next((each for each in paragraphs if re.match(r"[\w`*\"“[(]", each)), title[1])
    sentence = re.split(r"(?<=[.:?]) ", re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", prose))[0].rstrip(".:")
    end = "" if sentence.endswith("?") else "."
    return f"- [{title[1]}]({page.relative_to(ROOT)}): {sentence}{end}"


def listed() -> str:
    """The text of llms.txt."""
    docs = ROOT / "docs"
    pages = [ROOT / "README.md", *sorted([*docs.glob("*.md"), *docs.glob("recipes/*.md")])]
    parts = [INTRODUCTION]
    for section, start in SECTIONS.items():
        others = [each for each in SECTIONS.values() if each and each != start]
        names = {page: page.relative_to(docs if docs in page.parents else ROOT).as_posix() for page in pages}
        mine = [page for page, name in names.items() if name.startswith(start) and not name.startswith(tuple(others))]
        parts.append(f"## {section}\n\n" + "\n".join(map(about, mine)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(listed(), encoding="utf-8")
