"""Every error and warning text in the source, and the phrases that its prose must not have.

python tests/messages.py           prints the messages
python tests/messages.py --write   updates tests/messages.golden
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "hookline"
GOLDEN = ROOT / "tests" / "messages.golden"
UPDATE = "python tests/messages.py --write"

BANNED = {
    r"\bnot to be had\b": "not available",
    r"\b(gone|go|goes|going) on with\b": "resume, continue",
    r"\b(that|what) sees?\b": "vision tower, vision-language model",
    r"\b(is|are) no (model|point|hook|tensor|module)s?\b": "is not a model, is not a point",
    r"\btold (of|by|apart)\b": "reported, identified, distinguished",
    r"\bstands? for\b": "matches, means, is short for",
    r"\bdye(s|d|ing)?\b": "NaN propagation",
    r"\b(comes?|came) by\b": "fires, is called",
    r"\bmend(s|ed|ing)?\b": "fixed",
    r"(?<![a-z])pictures?(?![a-z])": "image; plot, where it is drawn",
}
"""Phrases that readers stumble over (regular expressions, any case, across line ends), and what to write instead."""

BANNED_IN_DOCS = {
    r"(?<!there\s)\b(is|are) no\b(?! (longer|more than)\b)": "is not a; has no",
    r"(?<!one\s)\bof which\b": "whose, where",
    r"\bworked out\b": "computed",
    r"\bas ever\b": "as before",
    r"\blet go\b": "freed, released",
    r"\b(be it|whoever|whichever way)\b": "even if; regardless of",
    r"\bone's own\b": "your own",
    r"\bswitch(es|ed|ing)?( \w+){0,3} off\b": "ablate, disable",
    r"\bleft alone\b": "unchanged, unsteered",
    r"\b(has|have) not(?=[,.;:)])": "does not have",
    r"\btells? nothing\b": "says nothing, is not informative",
    r"\b(is|are|was|were|be) refused\b": "raises an error",
    r"\bverbs?\b": "method, function",
    r"\blikewise\b": "the same",
    r"\band the like\b": "and similar functions",
    r"\bis about (several|the prompt)\b": "covers several tokens",
    r"\bwhat (flows|goes|comes|it is made of|is (there|made|added))\b": "the activation, the input, the output",
    r"\basked for\b": "requested",
    r"\b(told of|put together)\b": "reported, combined",
    r"\b(colour|behaviour|honour|favour|neighbour)\w*": "American spelling: -or",
    r"\b\w+(al|im|t)is(e|ed|es|ing|ation)\b(?<!otherwise)": "American spelling: -ize",
    r"\b(afterwards|towards|grey|centred?)\b": "American spelling",
}
"""More of them, for all that is not in the package."""


def messages(path: Path) -> list[str]:
    """The texts that a module raises or warns with, in its order; {…} has the source of each value in them."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    calls = [call for call in calls if call.args and _is_of_messages(call.func)]
    texts = [_text(call.args[0]) for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]
    return [text for text in texts if text is not None]


def all_messages() -> str:
    """One section a module, one line a message."""
    sections = []
    for path in sorted(PACKAGE.rglob("*.py")):
        found = [text.replace("\n", "\\n") for text in messages(path)]
        if found:
            sections.append("\n".join([f"[{path.relative_to(PACKAGE).as_posix()}]", *found]) + "\n")
    return "\n".join(sections)


def _is_of_messages(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name.endswith(("Error", "Warning", "NotCompiled")) or name in ("warn", "_warn", "error", "hook_error")


def _text(node: ast.expr) -> str | None:
    """A string as written, with the sources of its values; None where nothing of it is written there."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) or "" for part in parts)
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = _text(left), _text(right)
            if texts == (None, None):
                return None
            sources = ("{" + ast.unparse(side) + "}" for side in (left, right))
            return "".join(text or source for text, source in zip(texts, sources, strict=True))
        case ast.IfExp(test=test, body=body, orelse=other) if (_text(body), _text(other)) != (None, None):
            return f"{{{_text(body)} | {_text(other)}: {ast.unparse(test)}}}"
    return None


def prose_files() -> list[str]:
    """The files whose phrases are checked, from the repository's root."""
    patterns = ("*.md", "docs/*.md", "docs/recipes/*.md", "examples/**/*.*", "training/*.md")
    patterns += ("benchmarks/*.py", "notebooks/*.py", "peers/*.py", "tools/*.py")
    paths = [*(path for pattern in patterns for path in ROOT.glob(pattern)), *PACKAGE.rglob("*.py")]
    prose = [path for path in paths if path.suffix in (".md", ".py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in prose)


def banned_in(file: str) -> Iterator[str]:
    """Each banned phrase in a file: its line, the phrase, what to write."""
    text = (ROOT / file).read_text(encoding="utf-8")
    is_source = (ROOT / file).is_relative_to(PACKAGE)
    for pattern, better in (BANNED if is_source else BANNED | BANNED_IN_DOCS).items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{file}:{line}: {' '.join(match[0].split())!r}; write: {better}"


def main(arguments: list[str]) -> None:
    """Print the messages, or write them."""
    if arguments == ["--write"]:
        GOLDEN.write_text(all_messages(), encoding="utf-8")
    else:
        sys.stdout.write(all_messages())


if __name__ == "__main__":
    main(sys.argv[1:])
