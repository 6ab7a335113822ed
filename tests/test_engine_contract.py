"""What of the engine is used outside it, its state, its files, and words that say nothing: limits that only fall."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "hookline"
TREES = {path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
ENGINE = {path: tree for path, tree in TREES.items() if path.parts[0] == "engine"}

MOST_NAMES = 40
"""Names of the engine that other packages import."""
MOST_THREAD_LOCALS = 5
MOST_FILES = 26
"""Files that lie in `engine/` itself."""
MOST_WORDS = 6
"""Variables called by one of these words, of 1,000."""
WORDS = (
    "each",
    "found",
    "given",
    "asked",
    "known",
    "own",
    "kept",
    "here",
    "some",
    "wanted",
    "these",
    "there",
    "former",
)


def names_used_outside() -> Iterator[str]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if (
                path not in ENGINE
                and isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("hookline.engine")
            ):
                yield from (alias.name for alias in node.names)


def thread_locals() -> Iterator[str]:
    for tree in ENGINE.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "threading.local":
                yield ast.unparse(node)


def test_few_names_of_the_engine_are_used_outside_it() -> None:
    assert len(set(names_used_outside())) <= MOST_NAMES


def test_the_engine_keeps_little_state_by_thread() -> None:
    assert len(list(thread_locals())) <= MOST_THREAD_LOCALS


def test_the_engine_is_not_a_flat_list_of_files() -> None:
    assert sum(len(path.parts) == 2 for path in ENGINE) <= MOST_FILES


def test_variables_say_what_they_hold() -> None:
    names = Counter(node.id for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Name))
    assert sum(names[word] for word in WORDS) <= MOST_WORDS * sum(names.values()) / 1_000
