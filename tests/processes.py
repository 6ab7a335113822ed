"""Programs in processes of their own that need not each import torch: that takes seconds."""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"
FORKS = """
import gc, json, os, sys, tempfile, traceback
import torch
assert not any(name.split(".")[0] == "hookline" for name in sys.modules)
done = []
gc.freeze()
for program, arguments in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (child := os.fork()):
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            sys.argv, status = ["-c", *arguments], 0
            try:
                exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
            except SystemExit as exit:
                status = exit.code or 0
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)  # taking down an interpreter takes as long as these programs
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0), err.seek(0)
        done.append((status, out.read().decode(), err.read().decode()))
json.dump(done, sys.stdout)
"""


@cache
def forked(programs: Sequence[tuple[str, tuple[str, ...]]]) -> list[subprocess.CompletedProcess]:
    """Run each program with its arguments in a fork of one process, which has imported torch."""
    environment = {"PYTHONPATH": str(SRC), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORKS]
    asked = json.dumps(programs)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    ended = zip(programs, json.loads(done.stdout), strict=True)
    return [subprocess.CompletedProcess(program, *each) for program, each in ended]
