"""Every message is in one golden file, so that a change of wording shows there alone; no file has a banned phrase."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import messages
import numpy
import pytest
import torch

from hookline.errors import a_type, how_many


def test_the_golden_file_has_every_message() -> None:
    now, golden = messages.all_messages().splitlines(), messages.GOLDEN.read_text(encoding="utf-8").splitlines()
    added, gone = [line for line in now if line not in golden], [line for line in golden if line not in now]
    changes = [f"- {line}" for line in gone] + [f"+ {line}" for line in added]
    assert now == golden, "\n".join([f"messages changed; read them, then: {messages.UPDATE}", *changes])


@pytest.mark.parametrize("file", messages.prose_files())
def test_no_banned_phrase(file) -> None:
    assert "\n".join(messages.banned_in(file)) == ""


def test_messages_are_found_however_they_are_put_together(tmp_path) -> None:
    source = """
raise HooklineError(f"no {name!r} in {len(points)} points")
raise errors.StoreError("one " + f"{path}: " + why)
warn("a" if x else f"b{y}", stacklevel=2)
raise ValueError(made_elsewhere)
print("not a message")
"""
    (tmp_path / "a.py").write_text(source)
    assert messages.messages(tmp_path / "a.py") == [
        "no {name} in {len(points)} points",
        "one {path}: {why}",
        "{a | b{y}: x}",
    ]


def test_numbers_and_types_have_the_right_plural_and_article() -> None:
    assert [how_many(n, "row") for n in (0, 1, 2, 2000)] == ["no rows", "1 row", "2 rows", "2,000 rows"]
    assert [*map(a_type, (1, [], numpy.ones(1), torch.ones(1)))] == ["an int", "a list", "an ndarray", "a Tensor"]


def plain_words(pattern: str) -> int:
    """How many words of prose the longest alternative of a regular expression has: no names, and nothing in quotes."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", " ", pattern.replace(".*", " ").replace("\\", ""))
    word = re.compile(r"(?<![\w.=/*-])[A-Za-z][a-z]+(?:-[a-z]+)*(?![\w=/(\[-]|\.\w)")
    return max(len(word.findall(alternative)) for alternative in text.split("|"))


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("no feature is active at 'Paris'", 5),
        (r"names_filter.*'fc1'", 0),
        (r"layer 2.*W_dec|\(tp_size=2\)", 1),
        (r"old\(\) is deprecated .* use new\(\)", 3),
    ],
)
def test_words_of_prose(pattern, count) -> None:
    assert plain_words(pattern) == count


def matches() -> Iterator[tuple[str, str]]:
    """The `match=` of the tests that are written in place: file and line, and the pattern with {} for values."""
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "match":
                text = messages._text(node.value)
                if text is not None:
                    yield f"{path.name}:{node.lineno}", re.sub(r"\{.*?\}", "{}", text)


def test_tests_match_names_and_not_the_wording() -> None:
    """The wording is in the golden file; one or two words may tell two errors of a type apart."""
    patterns = [*matches()]
    assert len(patterns) > 1000
    assert [f"{place}: {pattern}" for place, pattern in patterns if plain_words(pattern) > 2] == []
