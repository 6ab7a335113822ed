"""Every leaf input and output of architectures that everyone uses, against torch hooks placed by hand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from zoo import architectures, checks

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

FOLDER = Path(sys.prefix) / "zoo"
"""Where `make test-all` puts torchvision, which transformers in this process must not see."""


def check(built: architectures.Built, hooks: int = 20) -> None:
    module, inputs = built
    findings = checks.check_leaves(module, (), inputs, hooks)
    assert findings.compared["edit input returned"] + findings.compared["edit input in place"] > 10
    assert findings.compared["gradient"] > 10
    assert findings.problems == []
    assert findings.refused == {}
    assert findings.left_out == {}


@pytest.mark.parametrize("name", architectures.SMALL)
def test_edits_and_gradients_at_every_leaf_of_small_networks(name) -> None:
    torch.manual_seed(0)
    check(architectures.SMALL[name](), hooks=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures.TRANSFORMERS)
def test_edits_and_gradients_at_every_leaf_of_transformers(name) -> None:
    torch.manual_seed(0)
    check(architectures.TRANSFORMERS[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures.TORCHVISION)
def test_edits_and_gradients_at_every_leaf_of_torchvision(name) -> None:
    if not (FOLDER / "torchvision").is_dir():
        pytest.skip("torchvision without dependencies: `make test-all` installs it")
    paths = os.pathsep.join([str(FOLDER), *sys.path])
    program = [sys.executable, "-W", "ignore", architectures.__file__, name]
    run = subprocess.run(program, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stdout.splitlines() if line.startswith(("PROBLEM", "REFUSED"))] == []
    assert int(re.findall(r"CHECKED (\d+)", run.stdout)[0]) > 100
