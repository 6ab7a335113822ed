"""Harvests that are killed with -9, or interrupted, at random moments lose nothing and store nothing twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hookline


def stopped(folder: Path, kills: int, how: str) -> dict[str, int]:
    """What was met by that many harvests that were sent a signal."""
    here = Path(__file__).parent
    paths = [str(here), str(Path(hookline.__file__).parent.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(here / "kill_harvests.py"), str(folder), str(kills), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    met = json.loads(done.stdout.splitlines()[-1])
    assert met["kills"] == kills
    return met


@pytest.mark.parametrize("kills", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_kills_leave_the_same_bytes_in_the_end(tmp_path, kills) -> None:
    met = stopped(tmp_path, kills, "SIGKILL")
    assert kills < 50 or len(met) > 4, met  # moments of different kinds were met


@pytest.mark.parametrize("kills", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_interrupts_keep_every_finished_batch(tmp_path, kills) -> None:
    stopped(tmp_path, kills, "SIGINT")
