"""Type checkers reject misspelled options and know what is returned; signatures list what they accept."""

import inspect
import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import hookline
from hookline import HooklineError
from hookline.errors import HooklineDeprecationWarning
from hookline.experiments.core.measure import CellOptions, Options
from hookline.functions.listed_options import lists, option_names

ROOT = Path(__file__).parent.parent
CALLS = ROOT / "tests" / "checked_calls.py"
EXPERIMENTS = {
    "patching": ["sweep"],
    "ablation": ["ablate", "cumulative"],
    "steering": ["sweep_layers"],
    "paths": ["path_patch"],
}
"""Those that have every option of a grid of cells."""


def bad_lines() -> list[int]:
    return [number for number, line in enumerate(CALLS.read_text().split("\n"), 1) if "# type: ignore" in line]


@pytest.mark.slow
def test_pyright_rejects_exactly_the_bad_calls(tmp_path) -> None:
    checker = next((name for name in ("pyright", "basedpyright") if find_spec(name)), None)
    if checker is None:
        pytest.skip("pyright is not installed: pip install pyright, or basedpyright, which brings node along")
    settings = {"include": ["calls.py"], "extraPaths": [str(ROOT / "src")], "enableTypeIgnoreComments": False}
    (tmp_path / "calls.py").write_text(CALLS.read_text())
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings | {"typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", checker, "-p", str(tmp_path), "--pythonpath", sys.executable, "--outputjson"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    problems = json.loads(answer.stdout)["generalDiagnostics"]
    errors = sorted({problem["range"]["start"]["line"] + 1 for problem in problems if problem["severity"] == "error"})
    assert errors == bad_lines(), problems


def test_mypy_checks_the_file_of_calls() -> None:
    """`make lint` runs mypy; an ignore that is not needed is an error in its strict mode."""
    settings = (ROOT / "pyproject.toml").read_text()
    assert 'files = ["src", "tests/checked_calls.py"]' in settings
    assert "strict = true" in settings
    assert len(bad_lines()) > 10


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in EXPERIMENTS.items() for name in names]
)
def test_the_signature_of_an_experiment_lists_its_options(module: str, name: str) -> None:
    function = getattr(import_module(f"hookline.experiments.{module}"), name)
    parameters = inspect.signature(function).parameters
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    defaults = Options()
    for option in option_names(CellOptions):
        assert parameters[option].default == getattr(defaults, option)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (hookline.load, ["attn_implementation", "gguf_file", "revision", "device_map", "device", "dtype"]),
        (hookline.HookedModel.generate, ["do_sample", "temperature", "top_k", "top_p", "seed", "images", "num_beams"]),
        (hookline.HookedModel.stream, ["do_sample", "temperature", "seed"]),
        (hookline.HookedModel.generate_with_cache, ["names_filter", "temperature", "dtype"]),
        (hookline.HookedModel.run_with_cache, ["input", "return_type", "names_filter", "pos_slice", "prepend_bos"]),
        (hookline.HookedModel.run_with_hooks, ["input", "return_type", "fwd_hooks", "stop_at_layer"]),
        (hookline.HookedModel.cache, ["input", "names_filter", "stop_early"]),
        (hookline.HookedModel.compile, ["backend", "mode", "options", "points", "limit", "patience"]),
        (hookline.HookedModel.explore, ["server", "port", "saes"]),
    ],
)
def test_signatures_list_options(function, options) -> None:
    parameters = inspect.signature(function).parameters
    assert [option for option in options if option not in parameters] == []
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_the_listed_options_of_compile_are_those_it_takes() -> None:
    from hookline.compiled.options import CompileOptions

    listed = inspect.signature(hookline.HookedModel.compile).parameters
    taken = inspect.signature(CompileOptions).parameters
    assert {name: listed[name].default for name in taken} == {name: taken[name].default for name in taken}


def test_a_misspelled_option_raises_before_anything_runs() -> None:
    tinyworld = hookline.load("tinyworld")
    ran = []
    handle = tinyworld.module.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(HooklineError) as info:
        tinyworld.generate("Mary went", max_tokns=3)
    handle.remove()
    assert "'max_new_tokens'" in str(info.value)
    assert ran == []
    with pytest.raises(HooklineError, match="zzz"):
        tinyworld.generate("Mary went", zzz=3)
    with pytest.raises(HooklineError, match="attn_implementation"):
        hookline.load("no/such/model", attn_implementaton="eager")


def test_options_are_listed_after_the_parameters() -> None:
    @lists(CellOptions, Options)
    def measured(model, *, batch_size=4, **options) -> None: ...

    parameters = inspect.signature(measured).parameters
    assert list(parameters) == ["model", "batch_size", "progress", "per_example", "resume"]
    assert parameters["batch_size"].default == 4
    assert parameters["progress"].default is True


class Wide(torch.nn.Module):
    """A network with more layers than are listed, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(150):
            setattr(self, f"layer_{number}", torch.nn.Linear(2, 2))

    def encode(self, x):
        return self.layer_0(x)


@pytest.mark.parametrize("name", ["tinyworld", "tinysight", "plain", "wide"])
def test_dir_lists_what_people_type(name: str) -> None:
    networks = {"plain": lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), "wide": Wide}
    model = hookline.hook(networks[name]()) if name in networks else hookline.load(name)
    names = [listed for listed in dir(model) if not listed.startswith("_")]
    assert len(names) <= 100
    assert {"run_with_cache", "run_with_hooks", "hooks", "points", "module", "to", "eval"} <= {*names}
    assert all(hasattr(model, listed) for listed in names)
    assert "register_forward_hook" not in names
    assert callable(model.register_forward_hook)


def test_dir_lists_the_parts_and_methods_of_the_users_class() -> None:
    network = torch.nn.Module()
    network.fc1 = torch.nn.Linear(2, 2)
    assert "fc1" in dir(hookline.hook(network))
    narrow = type("Narrow", (torch.nn.Module,), {"encode": Wide.encode})()
    assert "encode" in dir(hookline.hook(narrow))
    names = dir(hookline.load("tinyworld"))
    assert {"blocks", "unembed", "generate", "lm_head", "__class__"} <= {*names}
    assert "W_Q" not in names


def test_old_names_warn_and_still_work() -> None:
    from hookline.experiments import ablation, edges, metrics

    with pytest.warns(HooklineDeprecationWarning, match="edge_scores"):
        assert edges.edges is edges.edge_scores
    model = hookline.load("tinyworld")
    options = {"of": "mlps", "layers": [0], "progress": False}
    metric = metrics.logit_diff(" Mary", " John")
    with pytest.warns(HooklineDeprecationWarning, match="positions"):
        old = ablation.ablate(model, "Mary went", metric, pos=-1, **options)
    assert torch.equal(old.values, ablation.ablate(model, "Mary went", metric, positions=-1, **options).values)
