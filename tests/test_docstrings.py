"""The examples (`>>>`) in docstrings of public names run and print what they show.

They share the objects that the page docs/api.md defines, such as `model`, and run in an empty folder.
"""

import contextlib
import doctest
import importlib
import inspect
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from test_docs import source

import hookline

MODULES = [
    *("hookline", "hookline.edits", "hookline.positions", "hookline.hooks", "hookline.store", "hookline.sae"),
    "hookline.training",
    *("hookline.weights", "hookline.vision", "hookline.residual", "hookline.experiments.result"),
    *(f"hookline.experiments.{name}" for name in hookline.experiments.__all__),
]
WITHOUT = {
    *("oracle", "published", "releases"),  # these need a trained or a published model
    *("evaluate_by_position", "top_contexts", "train_many", "train_transcoders", "dashboard"),  # see docs/sae.md
    *("at", "token", "step"),  # those of their module
    *("cumulative", "load"),  # those of `ablate` and `save`
}
"""Public functions that need no example of their own."""


def public() -> Iterator[tuple[str, Any]]:
    """Every public function and class, and the public methods of these classes, by name."""
    for module in map(importlib.import_module, MODULES):
        yield module.__name__, module
        for name in getattr(module, "__all__", ()):
            each = getattr(module, name)
            if isinstance(each, ModuleType) or not callable(each):
                continue
            yield f"{module.__name__}.{name}", each
            for method in vars(each) if inspect.isclass(each) else ():
                if not method.startswith("_") and inspect.isfunction(getattr(each, method)):
                    yield f"{module.__name__}.{name}.{method}", getattr(each, method)
    for base in hookline.HookedModel.__mro__:
        if base.__module__.startswith("hookline"):
            methods = ((name, each) for name, each in vars(base).items() if inspect.isfunction(each))
            yield from ((f"{base.__name__}.{name}", each) for name, each in methods if not name.startswith("_"))


EXAMPLES: dict[int, tuple[str, Any]] = {}
for _name, _each in public():
    is_ours = inspect.getmodule(inspect.unwrap(_each)).__name__.startswith("hookline")  # some methods are torch's
    if is_ours and ">>>" in (inspect.getdoc(_each) or ""):
        EXAMPLES.setdefault(id(_each), (_name, _each))


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> dict[str, Any]:
    """What docs/api.md defines, and the modules of experiments."""
    names: dict[str, Any] = {}
    with contextlib.chdir(tmp_path_factory.mktemp("shared")):  # it writes a store
        exec(compile(source("docs/api.md"), "docs/api.md", "exec"), names)
    return names | {name: getattr(hookline.experiments, name) for name in hookline.experiments.__all__}


@pytest.mark.parametrize(("name", "each"), EXAMPLES.values(), ids=[name for name, _ in EXAMPLES.values()])
def test_examples_print_what_they_show(name, each, shared, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(each), dict(shared), name, None, 0)
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)


def test_the_most_used_functions_have_examples() -> None:
    """All functions of the front door, of the experiments and of autoencoders, and the main methods of a model."""
    shown = {name for name, _ in EXAMPLES.values()}
    for module in MODULES:
        names = importlib.import_module(module).__all__ if module != "hookline.residual" else ()
        for name in names:
            each = getattr(importlib.import_module(module), name)
            if inspect.isfunction(each) and name not in WITHOUT and "images" not in module:
                assert id(each) in EXAMPLES, f"{module}.{name} has no example"
    for method in ("run_with_cache", "run_with_hooks", "hooks", "generate", "to_tokens", "to_str_tokens", "points"):
        assert any(name.endswith(f".{method}") for name in shown), method


def test_an_example_that_prints_something_else_is_noticed(shared) -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert said
