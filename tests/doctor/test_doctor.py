"""The doctor: what it reports about this machine, and that it notices devices and models with wrong numbers."""

import json
from dataclasses import replace
from math import inf, nan

import pytest
import torch
import tqdm.auto
from typer.testing import CliRunner

import hookline
from hookline.cli import app
from hookline.doctor import Diagnosis, diagnose
from hookline.doctor.device_numbers import DeviceNumbers, activations, device_numbers, errors_by_family
from hookline.doctor.diagnosis import model_facts
from hookline.doctor.environment import compiling, package_versions

FAMILY = "blocks.*.attn.hook_q"


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose(hookline.load("tinyworld"))


@pytest.fixture(scope="module")
def exact() -> dict[str, torch.Tensor]:
    return activations("cpu", torch.float64)


def test_this_machine_is_good(found) -> None:
    assert found.problems() == []
    assert {each.dtype for each in found.numbers} == {"float32", "bfloat16", "float16"}
    assert found.versions["torch"] == torch.__version__
    assert found.model["attention"] == "sdpa"
    assert set(found.model["points"]) == {"proved", "unavailable"}
    assert found.devices["cpu"]["memory_gb"]["total"] > 0
    assert str(found).endswith("none")


def test_every_family_of_points_is_compared(found, exact) -> None:
    model = hookline.load("tinyworld")
    assert {*exact} == {"logits", *model.hook_dict}
    families = found.numbers[0].errors
    assert {"logits", FAMILY, "hook_tokens", "blocks.*.attn.hook_attn_scores"} <= {*families}
    assert families["hook_tokens"] == 0
    assert 0 < families[FAMILY] < 1e-5


@pytest.mark.parametrize("factor", [1.01, nan, inf])
def test_one_wrong_layer_is_noticed(found, exact, factor) -> None:
    wrong = activations("cpu", torch.float32)
    wrong["blocks.2.attn.hook_q"] *= factor
    limits = found.numbers[0].limits
    numbers = DeviceNumbers("other:0", "float32", errors_by_family(wrong, exact), limits)
    assert numbers.bad_families() == [FAMILY]
    bad = replace(found, numbers=(*found.numbers, numbers))
    (problem,) = bad.problems()
    assert FAMILY in problem
    json.dumps(bad.to_json(), allow_nan=False)


def test_a_device_is_held_to_the_error_of_the_cpu() -> None:
    on_cpu, again = (each for each in device_numbers(["cpu:0"]) if each.dtype == "float32")
    assert again.errors == on_cpu.errors
    assert again.limits[FAMILY] < on_cpu.limits[FAMILY] < 1e-4
    assert again.bad_families() == []


def test_a_device_that_cannot_run_is_reported() -> None:
    numbers = [each for each in device_numbers(["meta"]) if each.device == "meta"]
    assert all(each.why and not each.bad_families() for each in numbers)


def test_failing_points_are_problems(found, monkeypatch) -> None:
    model = hookline.load("tinyworld")
    site = model.index.specs["blocks.1.hook_mlp_out"].site
    wrong = hookline.HookPoint.at_site("blocks.1.hook_attn_out", site, model.index.permanent)
    monkeypatch.setitem(model.index.hook_dict, "blocks.1.hook_attn_out", wrong)
    problems = replace(found, model=model_facts(model)).problems()
    assert [problem for problem in problems if problem.startswith("blocks.1.hook_attn_out: ")]


def test_a_trick_that_does_not_hold_is_a_problem(found) -> None:
    assert set(found.tricks.values()) == {""}
    broken = replace(found, tricks=found.tricks | {"copy_on_write": "it was removed"})
    (problem,) = broken.problems()
    assert "copy_on_write" in problem
    assert "it was removed" in str(broken)


def test_the_environment(monkeypatch) -> None:
    assert package_versions()["python"]
    assert not [name for name in package_versions() if name.endswith("[dev]")]
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert compiling([])["cpu"].startswith("not available")


def test_the_command(tmp_path) -> None:
    run = CliRunner().invoke(app, ["doctor", "--json"])
    assert run.exit_code == 0
    assert json.loads(run.stdout)["problems"] == []
    assert CliRunner().invoke(app, ["doctor", str(tmp_path / "no_such")]).exit_code == 3


def test_progress_is_shown(monkeypatch) -> None:
    shown = []

    class Bar(tqdm.auto.tqdm):
        def __init__(self, **options) -> None:
            shown.append(options | {"updates": 0})
            super().__init__(**options | {"disable": True})

        def update(self, n: float = 1) -> None:
            shown[-1]["updates"] += n

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    model = hookline.load("tinyworld")
    model.verify()
    model.verify(progress=False)
    (bar,) = shown
    assert bar["desc"] == f"verifying {len(model.hook_dict)} points"
    assert 0.7 * bar["total"] < bar["updates"] <= bar["total"], "the total is about right"
