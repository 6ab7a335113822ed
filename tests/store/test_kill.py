"""Harvests that are killed with -9, or interrupted, at random moments lose nothing and store nothing twice."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hookline


def met_by(script: str, folder: Path, kills: int) -> Any:
    """What a script that kills harvests has printed."""
    here = Path(__file__).parents[1]
    paths = [str(here), str(Path(hookline.__file__).parent.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(here / script), str(folder), str(kills)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, 80])
def test_workers_that_are_killed_are_replaced_by_others(tmp_path, kills) -> None:
    assert met_by("kill_workers.py", tmp_path, kills)["kills"] == kills


@pytest.mark.parametrize("kills", [1, pytest.param(60, marks=pytest.mark.slow)])
def test_kills_and_interrupts_leave_the_same_store_in_the_end(tmp_path, kills) -> None:
    met = met_by("kill_harvests.py", tmp_path, kills)
    assert [each["kills"] for each in met.values()] == [kills, kills]
    assert kills < 50 or len(met["SIGKILL"]) > 4, met  # moments of different kinds were met
