"""What will behave differently in a source text: names that the compatibility package does not have, and differences.

Nothing is listed here. Absent names are those that the package fails to provide, with its own error messages; the other
differences are the table of the library's page in docs/, which tools/make_differences.py copies into the package. The
code at the start of a row is what to look for:

    `generate`                        an attribute, a function that is called, or a part of a dotted string
    `cfg.n_ctx`                       this attribute of this object
    `run_with_cache(incl_bwd=True)`   a call with this argument
    `level=`, `prepend_bos=True`      an argument of any call
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from types import ModuleType
from typing import Any, NamedTuple

from hookline.migrate.import_changes import LIBRARIES, PREFIX, library_of

TABLE = "differences.md"
_LEADING_CODE = re.compile(r"(?:`[^`]+`(?:, | and )?)+")
_DOTTED = re.compile(r"[A-Za-z_][\w*]*(?:\.[\w*]+)+|hook_\w+")


class LineFinding(NamedTuple):
    """A difference at a line."""

    line: int
    subject: str
    text: str


@dataclass(frozen=True)
class Pattern:
    """A use of a name, as the first column of the table writes it."""

    name: str
    owner: str | None = None
    keywords: tuple[tuple[str, Any], ...] = ()
    kind: str = "name"  # or "call", "keyword"

    def matches(self, node: ast.AST) -> bool:
        """Return whether a node of a syntax tree is such a use; `ast.keyword` is the argument of a call."""
        match node:
            case ast.keyword():
                return self.kind == "keyword" and _has((node,), self.keywords)
            case ast.Call(func=function):
                if self.kind == "name":
                    return self.owner is None and isinstance(function, ast.Name)
                return self.kind == "call" and _has(node.keywords, self.keywords)
            case ast.Attribute():
                return self.kind == "name" and self.owner in (None, _last_name(node.value))
            case _:
                return self.kind == "name" and self.owner is None


def parse_pattern(code: str) -> Pattern:
    """Return the pattern of one piece of code in the first column of the table."""
    if keyword_match := re.fullmatch(r"(\w+)=(\w*)", code):
        value = ast.literal_eval(keyword_match[2]) if keyword_match[2] else ...
        return Pattern(keyword_match[1], keywords=((keyword_match[1], value),), kind="keyword")
    match ast.parse(code, mode="eval").body:
        case ast.Name(id=name):
            return Pattern(name)
        case ast.Attribute(value=owner, attr=name):
            return Pattern(name, _last_name(owner))
        case ast.Call(func=function, keywords=keywords):
            arguments = tuple((keyword.arg or "", ast.literal_eval(keyword.value)) for keyword in keywords)
            return Pattern(_last_name(function), keywords=arguments, kind="call")
    raise ValueError(f"{code} is not a name, an attribute, a call or an argument")


class Uses:
    """Which names of the libraries a program has: those that its imports bind, in all of its trees together."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self.bound: dict[str, tuple[str, tuple[str, ...]]] = {}
        for tree in trees:
            for node in ast.walk(tree):
                self._bind(node)
        self.libraries = sorted({module.partition(".")[0] for module, _ in self.bound.values()})

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.ImportFrom) and (module := _of_library(node)):
            for alias in node.names:
                self.bound[alias.asname or alias.name] = module, (alias.name,)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                module = alias.name.removeprefix(PREFIX)
                if library := library_of(module):
                    self.bound[alias.asname or library] = (module if alias.asname else library), ()

    def findings(self, tree: ast.Module) -> list[LineFinding]:
        """Return the differences in one tree, by line."""
        findings = set()
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            findings |= set(_absent_imports(node))
            findings |= set(_mentions(node))
            if self.libraries:
                findings |= set(_listed(node, self.libraries))
                if id(node) not in inner:
                    findings |= set(self._absent_attributes(node))
        return sorted(findings)

    def _absent_attributes(self, node: ast.AST) -> Iterator[LineFinding]:
        """A dotted name that begins with an imported one, and leads to nothing."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names, node = [node.attr, *names], node.value
        if names and isinstance(node, ast.Name) and node.id in self.bound:
            module, first = self.bound[node.id]
            if (reason := absence(module, first)) is None and (reason := absence(module, (*first, *names))) is not None:
                yield LineFinding(node.lineno, ".".join((node.id, *names)), reason)


@cache
def absence(module: str, names: tuple[str, ...]) -> str | None:
    """Return why `module.names[0].names[1]…` of a library is not in the compatibility package; None if it is."""
    library, *parents = module.split(".")
    value: Any = import_module(PREFIX + library)
    for parent in parents:
        try:
            value = import_module(f"{value.__name__}.{parent}")
        except ImportError:
            return _missing(value, parent)
    for name in names:
        if name == "*" or not isinstance(value, ModuleType | type):
            return None
        if (reason := _missing(value, name)) is not None:
            return reason
        value = getattr(value, name)
    return None


def _missing(value: Any, name: str) -> str | None:
    try:
        getattr(value, name)
    except AttributeError:
        if isinstance(value, ModuleType) and _is_module(f"{value.__name__}.{name}"):
            return None
        return f"{value.__name__} has no {name}"
    except ImportError as error:
        return str(error)
    return None


def _is_module(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True


@cache
def _rows(libraries: tuple[str, ...]) -> dict[str, list[tuple[Pattern, str, str]]]:
    """The rows of the tables by the names of their patterns: the pattern, the row's subject, what differs."""
    rows = defaultdict(list)
    for library in libraries:
        table = files(f"{PREFIX}{library}") / TABLE
        for line in table.read_text(encoding="utf-8").splitlines() if table.is_file() else ():
            subject, theirs, ours = (cell.strip() for cell in line.strip("| ").split(" | "))
            if leading := _LEADING_CODE.match(subject):
                for code in re.findall(r"`([^`]+)`", leading[0]):
                    pattern = parse_pattern(code)
                    rows[pattern.name].append((pattern, subject, f"{ours} ({library}: {theirs})"))
        for name, instead in _absent_methods(library).items():
            rows[name].append((Pattern(name), f"`{name}`", f"not available: {instead}"))
    return rows


def _absent_methods(library: str) -> dict[str, str]:
    if library != "transformer_lens":
        return {}
    from hookline.compat.transformer_lens._impl.hooked_transformer import NOT_HERE

    return NOT_HERE


def _listed(node: ast.AST, libraries: list[str]) -> Iterator[LineFinding]:
    """The rows of the tables that are about this node."""
    rows = _rows(tuple(libraries))
    for name, line in _names_in(node):
        for pattern, subject, text in rows.get(name, ()):
            if pattern.matches(node):
                yield LineFinding(line, subject, text)


def _names_in(node: ast.AST) -> Iterator[tuple[str, int]]:
    """The names that a node of a syntax tree uses, with their lines."""
    match node:
        case ast.Attribute(attr=name, end_lineno=line):
            yield name, line or node.lineno
        case ast.Call(func=function):
            yield _last_name(function), function.end_lineno or node.lineno
        case ast.keyword(arg=str(name)):
            yield name, node.lineno
        case ast.Constant(value=str(text)) if _DOTTED.fullmatch(text):
            yield from ((part, node.lineno) for part in dict.fromkeys(text.split(".")))


def _absent_imports(node: ast.AST) -> Iterator[LineFinding]:
    if isinstance(node, ast.ImportFrom) and (module := _of_library(node)):
        if (reason := absence(module, ())) is not None:
            yield LineFinding(node.lineno, module, reason)
            return
        for alias in node.names:
            if (reason := absence(module, (alias.name,))) is not None:
                yield LineFinding(alias.lineno, f"{module}.{alias.name}", reason)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            module = alias.name.removeprefix(PREFIX)
            if library_of(module) and (reason := absence(module, ())) is not None:
                yield LineFinding(alias.lineno, module, reason)


_MENTION = re.compile(rf"(?:{'|'.join(LIBRARIES)})(?:\.[\w.]*)?|.*\b(?:import|from) +({'|'.join(LIBRARIES)})\b.*", re.S)


def _mentions(node: ast.AST) -> Iterator[LineFinding]:
    """Modules that are imported, patched or looked up by a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _MENTION.fullmatch(node.value):
        yield LineFinding(node.lineno, "a string with a module's name", "not changed; an import by it is not rewritten")


def _of_library(node: ast.ImportFrom) -> str | None:
    module = (node.module or "").removeprefix(PREFIX)
    return module if not node.level and library_of(module) else None


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _last_name(value)
    return ""


def _has(keywords: Any, requested: tuple[tuple[str, Any], ...]) -> bool:
    """Return whether all wanted arguments are among those of a call; `...` is any value."""
    arguments = {keyword.arg: keyword.value for keyword in keywords}
    for name, value in requested:
        if name not in arguments:
            return False
        written = arguments[name]
        if value is not ... and isinstance(written, ast.Constant) and written.value != value:
            return False
    return True
