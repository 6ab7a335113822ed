"""Tensor-parallel models: every point, edit, gradient and weight is that of the model in one process."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sharded_models
import tiny_models
import torch
import torch.distributed as dist
from sharded_models import IDS, pair, run

from hookline import HooklineError, UnknownPointError
from hookline.experiments import metrics, patching
from hookline.transformer import shard_lenses


def short_path(folder: str) -> dict[str, object]:
    """What one process of two finds on one model: `test_a_tensor_parallel_model` says what it must be."""
    whole, sharded = pair("llama", folder)
    found: dict[str, object] = {"differences": list(sharded_models.differences(whole, sharded))}
    with torch.no_grad():
        native = "model.layers.1.mlp.down_proj.input"
        caches = [model.cache(IDS, names_filter=native)[native] for model in (whole, sharded)]
        found["native"] = torch.allclose(*caches, atol=1e-5)
        try:
            sharded.point("model.layers.1.mlp.act_fn")
        except UnknownPointError as error:
            found["inside"] = str(error)
        sweeps = [
            patching.sweep(
                model, IDS[:1], IDS[1:], metrics.logit_diff(5, 7), points="z", over=("layer", "head"), progress=False
            ).values
            for model in (whole, sharded)
        ]
        found["sweep"] = torch.allclose(*sweeps, atol=1e-4)
    found["other hooks"] = _said(lambda: _hook_by_rank(sharded))
    sharded.add_hook(f"blocks.{dist.get_rank()}.hook_resid_post", lambda x, hook: x)
    found["other permanent hooks"] = _said(lambda: sharded(IDS))
    sharded.reset_hooks()
    with torch.no_grad():
        found["goes on"] = torch.allclose(whole(IDS), sharded(IDS), atol=1e-5)
    return found


def _hook_by_rank(model) -> None:
    """Each process hooks another layer."""
    model.run_with_hooks(IDS, fwd_hooks=[(f"blocks.{dist.get_rank()}.hook_resid_post", lambda x, hook: x)])


def _said(act) -> str:
    try:
        act()
    except HooklineError as error:
        return str(error)
    return ""


def test_a_tensor_parallel_model(tmp_path) -> None:
    for found in run(short_path, 2, str(tmp_path)):
        assert found["differences"] == []
        assert found["native"] is True
        assert "act_fn" in found["inside"]
        assert found["sweep"] is True
        assert "blocks.0.hook_resid_post" in found["other hooks"]
        assert "blocks.1.hook_resid_post" in found["other hooks"]
        assert "blocks.1.hook_resid_post" in found["other permanent hooks"]
        assert found["goes on"] is True


def refusals(folder: str) -> list[str]:
    """What is not available on a sharded model."""
    _, sharded = pair("llama", folder)
    return [_said(sharded.process_weights)]


@pytest.mark.slow
def test_what_is_not_available(tmp_path) -> None:
    for said in run(refusals, 2, str(tmp_path)):
        assert all("sharded over processes" in each for each in said)


PLANNED = [kind for kind in tiny_models.CAUSAL if sharded_models.has_plan(kind)]
"""The architectures with a plan for tensor parallelism."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_architecture_with_a_plan(part, tmp_path) -> None:
    found = run(sharded_models.all_differences, 2, PLANNED[part::8], str(tmp_path))
    for differences in found:
        wrong = {kind: each for kind, each in differences.items() if each and not each[0].startswith(OTHERS)}
        assert wrong == {}


OTHERS = ("transformers: ", "refused: ", "no classic points")


@pytest.mark.slow
def test_the_script_in_the_docs(tmp_path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```py\n(# tensor_parallel.py\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "tensor_parallel.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "tensor_parallel.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.count("torch.Size([1, 4, 4, 8])") == 2
    assert said.count("tensor(True)") == 2


def one_stays_away(folder: str) -> tuple[str, float]:
    """A run that the second process does not begin; it waits until the first has noticed."""
    _, sharded = pair("llama", folder)
    began, said = time.monotonic(), ""
    if dist.get_rank() == 0:
        said = _said(lambda: sharded.run_with_cache(IDS))
        Path(folder, "noticed").touch()
    else:
        while not Path(folder, "noticed").exists():
            time.sleep(0.1)
    return said, time.monotonic() - began


@pytest.mark.slow
def test_a_process_that_does_not_come_ends_in_an_error(tmp_path) -> None:
    (said, _), _ = run(one_stays_away, 2, str(tmp_path))
    assert str(shard_lenses.TIMEOUT.seconds) in said
