"""Turns in every chat template of a folder: `python tests/chat/prove.py FOLDER …`, such as transformers' tests.

Templates are the strings of Python files, of JSON files, and the .jinja files that loop over `messages`.
"""

from __future__ import annotations

import ast
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hookline

sys.path.insert(0, str(Path(__file__).parents[1]))
from chat.families import FAMILIES
from chat.proof import tried


def templates_in(folder: Path) -> dict[str, str]:
    """Every template below a folder, by where it was first."""
    templates: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        for text in _texts(path) if path.suffix in (".py", ".json", ".jinja") else ():
            if "{%" in text and "messages" in text and "endfor" in text and text not in templates.values():
                templates[f"{path.relative_to(folder)} ({len(text)} characters)"] = text
    return templates


def _texts(path: Path) -> Iterator[str]:
    source = path.read_text(errors="replace")
    if "{%" not in source:
        return
    if path.suffix == ".jinja":
        yield source
    elif path.suffix == ".json":
        yield from _strings(json.loads(source))
    else:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.BinOp):  # "…" + "…"
                try:
                    value = ast.literal_eval(node)
                except (ValueError, TypeError):
                    continue
                yield value if isinstance(value, str) else ""


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(child)


def main(folders: list[str]) -> int:
    warnings.simplefilter("ignore")
    model = hookline.load("tinyworld")
    templates = dict(FAMILIES) | {name: text for folder in folders for name, text in templates_in(Path(folder)).items()}
    counts: Counter[str] = Counter()
    for name, template in templates.items():
        outcomes = tried(model, template)
        right = [case for case, problems in outcomes.items() if problems == []]
        wrong = {case: problems for case, problems in outcomes.items() if problems}
        counts["templates"] += 1
        counts["templates without any conversation"] += not right and not wrong
        counts["conversations right"] += len(right)
        counts["conversations rejected by the template"] += list(outcomes.values()).count(None)
        counts["conversations wrong"] += len(wrong)
        for case, problems in wrong.items():
            print(f"{name}\n    {case}: {problems[0]} (and {len(problems) - 1} more)")
    print(*[f"{count:6} {what}" for what, count in counts.items()], sep="\n")
    return bool(counts["conversations wrong"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
