"""Harvests that are killed with -9, or interrupted, at random moments lose nothing and store nothing twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hookline


@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_kills_and_interrupts_leave_the_same_store_in_the_end(tmp_path, kills) -> None:
    here = Path(__file__).parents[1]
    paths = [str(here), str(Path(hookline.__file__).parent.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(here / "kill_harvests.py"), str(tmp_path), str(kills)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    met = json.loads(done.stdout.splitlines()[-1])
    assert [each["kills"] for each in met.values()] == [kills, kills]
    assert kills < 50 or len(met["SIGKILL"]) > 4, met  # moments of different kinds were met
