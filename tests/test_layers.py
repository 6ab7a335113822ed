"""The packages form layers: each imports only those before it in this list; lazy imports and those for types count."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookline import engine

PACKAGE = Path(__file__).parent.parent / "src" / "hookline"
LAYERS = (
    *(
        "errors",
        "progress",
        "files",
        "types",
        "values",
        "functions",
        "engine",
        "pages",
        "text",
        "positions",
        "hooks",
        "edits",
        "transformer",
    ),
    *("weights", "vision", "residual", "rerun", "compiled"),
    *("model_options", "run_methods", "generation", "model", "loading"),
    *("store", "sae", "experiments", "training", "compat", "migrate", "evaluation", "explore", "demo", "doctor", "cli"),
)
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
SEVERAL_PLACES = ("compat",)
"""Packages whose modules have other libraries' names."""
PUBLIC = {"_points": "index", "_anatomy": "anatomy", "_device": "device", "_text": "text"}
"""Private attributes that only `self` may read, and the public ones of a model."""
OF_EACH_METHOD = ("fit", "probe")
"""What several methods or tricks call the same: people type the module's name before it, as in `probes.fit`."""


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """The packages of ours that a module imports, with the lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "hookline":
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("hookline."):
                    yield node.lineno, alias.name.split(".")[1]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_package_imports_only_those_before_it(layer: str) -> None:
    allowed = {*LAYERS[: LAYERS.index(layer) + 1], "__version__"}
    upward = [
        f"{name}:{line} imports {other}"
        for name, path in MODULES.items()
        if name.split(".")[0] == layer
        for line, other in imported(path)
        if other not in allowed
    ]
    assert not upward, "\n".join(upward)


def test_nothing_imports_past_the_contract_of_the_engine() -> None:
    past = [
        f"{name}:{node.lineno} imports {ast.unparse(node)}"
        for name, path in MODULES.items()
        if name.split(".")[0] != "engine"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hookline.engine."))
        or (isinstance(node, ast.ImportFrom) and node.module == "hookline.engine" and not within_contract(node))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("hookline.engine") for alias in node.names))
    ]
    assert past == []


def within_contract(node: ast.ImportFrom) -> bool:
    return {alias.name for alias in node.names} <= {*engine.__all__}


def test_every_name_of_the_contract_says_what_it_is_for() -> None:
    described = [name for name in engine.__all__ if f"`{name}`" in (engine.__doc__ or "")]
    assert described == list(engine.__all__)
    own_text = [name for name in engine.__all__ if name not in ("FIRST", "pass_state")]  # values of documented classes
    assert [name for name in own_text if not (getattr(engine, name).__doc__ or "").strip()] == []


def test_only_the_engine_knows_what_is_private_of_torch() -> None:
    within = [
        f"{name}:{node.lineno} imports {node.module}"
        for name, path in MODULES.items()
        if name.startswith("engine._torch.")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("hookline.")
        and not (node.module or "").startswith(("hookline.engine._torch", "hookline.errors", "hookline.functions"))
    ]
    assert within == []


def test_every_module_is_in_a_layer() -> None:
    assert {name.split(".")[0] for name in MODULES} == {*LAYERS, "__init__", "__main__"}


def test_no_two_modules_have_one_name() -> None:
    found = defaultdict(list)
    for name in MODULES:
        *parents, stem = name.split(".")
        if stem not in ("__init__", "__main__") and (not parents or parents[0] not in SEVERAL_PLACES):
            found[stem].append(name)
    assert [names for names in found.values() if len(names) > 1] == []


def test_no_public_name_is_defined_twice() -> None:
    found = defaultdict(set)
    for name, path in MODULES.items():
        if name.split(".")[0] in {*SEVERAL_PLACES, "cli"}:  # commands are named like what they run
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(name)
    assert {name: places for name, places in found.items() if len(places) > 1 and name not in OF_EACH_METHOD} == {}


def test_models_are_read_by_their_public_attributes() -> None:
    private = [
        f"{name}:{node.lineno} reads {ast.unparse(node)}: use {PUBLIC[node.attr]}"
        for name, path in MODULES.items()
        if name.split(".")[0] != "engine"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in PUBLIC
        and ast.unparse(node.value) not in ("self", "super()")
    ]
    assert not private, "\n".join(private)
