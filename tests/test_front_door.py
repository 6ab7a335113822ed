"""The names in `hookline` itself, and one level down."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from processes import forked

import hookline

FRONT = {
    *("load", "hook", "HookedModel", "HookedModule", "HookedRootModule", "HookPoint", "ActivationCache"),
    *("at", "last", "token", "harvest", "edits", "experiments"),
    *("HooklineError", "HookError", "UnknownPointError", "NeverFiredWarning"),
}
ONE_LEVEL_DOWN = {"hooks", "positions", "errors", "store", "sae", "weights", "vision", "training"}
PUBLIC = sorted(ONE_LEVEL_DOWN | {"edits", "experiments"})
CHECKS = tuple((f"import hookline; print(type(hookline.{name}).__name__)", ()) for name in PUBLIC)
EDITS = {
    *("zero", "mean", "replace", "add", "scale", "noise", "freeze", "project_out", "reflect", "cap"),
    *("save", "load", "DataEdit"),
}
POSITIONS = {"at", "last", "token", "image_tokens", "turn", "span", "sentence", "new_tokens", "step", "Positions"}


def test_the_front_door() -> None:
    assert set(hookline.__all__) == FRONT | ONE_LEVEL_DOWN
    assert dir(hookline) == sorted({*hookline.__all__, "__version__"})
    assert set(dir(hookline.edits)) == EDITS
    assert set(dir(hookline.positions)) == POSITIONS
    for name in ("at", "last", "token"):
        assert getattr(hookline, name) is getattr(hookline.positions, name)
    with pytest.raises(AttributeError, match="nonsense"):
        hookline.nonsense


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_is_there_without_a_further_import(name: str) -> None:
    found = forked(CHECKS)[PUBLIC.index(name)]
    assert found.stdout.strip() == "module", found.stderr
    module = getattr(hookline, name)
    assert isinstance(module, ModuleType)
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public)
    assert set(dir(module)) == set(module.__all__)


def test_the_version_is_written_once() -> None:
    text = (Path(hookline.__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{hookline.__version__}"' not in text
    assert importlib.metadata.version("hookline") == hookline.__version__


def test_importing_is_cheap() -> None:
    """Transformers and the experiments are loaded with their first use."""
    check = "import sys, hookline; print([n for n in sys.modules if n in ('transformers', 'hookline.experiments')])"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_hooked_model_has_few_methods_of_its_own() -> None:
    """At most 39 beside those of any hooked module; the weights' names are attributes of `model.weights`.

    Among them are the verbs of compiled runs (compile, compiled, generate_with_cache and stream), and
    the attributes that other packages read: anatomy, device, index and text.
    """
    mine = [each for each in hookline.HookedModel.__mro__ if each not in hookline.HookedModule.__mro__]
    own = {name for each in mine for name in vars(each) if not name.startswith("_")}
    assert len(own) <= 39, sorted(own)
