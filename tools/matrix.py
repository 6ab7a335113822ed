"""Run hookline with the oldest and the newest versions that pyproject.toml promises, and print what fails.

    python tools/matrix.py                                       # every combination, in environments made with uv
    python tools/matrix.py --python 3.12 --torch 2.8.0 --transformers 5.22.2
    python tools/matrix.py --env path/to/environment             # one that exists, with its versions

An environment is kept in `--folder` and used again. Versions that no index has, and Pythons that uv cannot install, are
rows of the table too. Each combination runs a smoke test and then the chosen tests; the exit status is 1 if any fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
NEWEST = {"torch": "2.15.0", "transformers": "5.22.2"}
"""The newest versions that were tried; constraints.txt pins what the project is developed with."""
OLDEST = {"3.14": {"torch": "2.9.0"}}
"""Where a Python needs more than pyproject.toml says: torch 2.8 has no wheels for 3.14."""
TESTS = (
    *("tests/test_front_door.py", "tests/test_load.py", "tests/test_model.py", "tests/test_cli.py"),
    *("tests/engine", "tests/hooks", "tests/transformer", "tests/weights", "tests/vision", "tests/demo"),
)
NEEDED = ("pytest", "hypothesis", "pillow", "matplotlib", "pandas", "xarray")
"""What the tests need besides hookline and torch; accelerate comes without its dependencies, which torch is one of."""
SMOKE = """
import json, platform, sys, torch, transformers, hookline
model = hookline.load("tinyworld")
said = model.to_str_tokens(model("When Mary and John went to the store, John gave a drink to")[0, -1].argmax())
assert said == [" Mary"], said
with model.hooks([("blocks.*.hook_resid_post", hookline.edits.zero())]):
    assert model("When Mary").abs().max() < 1e3
sight = hookline.load("tinysight")
from hookline.demo.tinysight import first_images
from hookline.explore import first_prompts
answer = sight.to_str_tokens(sight(first_prompts("tinysight")[0], images=[first_images()[0]])[0, -1].argmax())
assert answer == [" red"], f"tinysight sees {answer}: were all its weights loaded?"
failed = {each.name: each.why for one in (model, sight) for each in one.verify().failed()}
found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps(found | {"failed": failed}))
"""


class Row(NamedTuple):
    """What came out of one combination."""

    python: str
    torch: str
    transformers: str
    smoke: str
    tests: str = ""

    @property
    def is_good(self) -> bool:
        """Whether nothing failed."""
        return self.smoke == "ok" and "failed" not in self.tests and "error" not in self.tests


def oldest(name: str, python: str) -> str:
    """The oldest version of a package that pyproject.toml allows and this Python can have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lower = next(re.fullmatch(rf"{name}>=([\d.]+)", each) for each in project["dependencies"] if each.startswith(name))
    assert lower is not None, f"{name} has no lower bound"
    return OLDEST.get(python, {}).get(name) or lower[1] + ".0" * (2 - lower[1].count("."))


def versions_of(name: str, python: str, asked: list[str] | None) -> list[str]:
    """The versions of a package to try with a Python: those requested, or the oldest and the newest."""
    return asked or [oldest(name, python), NEWEST[name]]


def made(folder: Path, python: str, torch: str, transformers: str, backend: str) -> Path | str:
    """An environment with these versions, or why there is none."""
    uv, path = shutil.which("uv"), folder / f"{python}-{torch}-{transformers}"
    if uv is None:
        return "uv is not installed: pip install uv"
    if (path / ".ready").exists():
        return path
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(path)]
    for_torch = ["--torch-backend", backend] if backend else []
    for step in (
        [uv, "venv", "--quiet", "--clear", "--python", python, str(path)],
        [*install, *for_torch, f"torch=={torch}"],
        [*install, "--no-deps", "accelerate"],
        [*install, *NEEDED, "psutil", f"torch=={torch}", f"transformers=={transformers}", "--editable", str(ROOT)],
    ):
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            return f"not installed: {' '.join(done.stderr.split())[-160:]}"
    (path / ".ready").touch()
    return path


def tried(path: Path, tests: list[str], seconds: float) -> Row:
    """Run the smoke test and the tests in an environment."""
    python = str(path / "bin" / "python")
    given = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    smoke = subprocess.run([python, "-c", SMOKE], capture_output=True, text=True, env=given)
    if smoke.returncode:
        return Row(*versions(python), " ".join(smoke.stderr.split())[-200:])
    found = json.loads(smoke.stdout.splitlines()[-1])
    points = f"{len(found['failed'])} points failed: {found['failed']}" if found["failed"] else "ok"
    row = Row(found["python"], found["torch"], found["transformers"], points)
    command = [python, "-m", "pytest", "-m", "not slow", "-p", "no:randomly", *tests]
    try:
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=given, timeout=seconds)
    except subprocess.TimeoutExpired:
        return row._replace(tests=f"error: not finished after {seconds:.0f} s")
    print("\n".join(line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))))
    return row._replace(tests=run.stdout.strip().splitlines()[-1])


def versions(python: str) -> list[str]:
    """The versions of an environment in which hookline does not run."""
    code = "import platform; from importlib.metadata import version as v; "
    code += "print(platform.python_version(), v('torch'), v('transformers'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.split() or ["?"] * 3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+")
    parser.add_argument("--transformers", nargs="+")
    parser.add_argument("--torch-backend", default="cpu", help="what uv installs torch for; '' for what the index has")
    parser.add_argument("--env", nargs="+", type=Path, default=[], help="environments that exist")
    parser.add_argument("--tests", nargs="*", default=TESTS)
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "matrix")
    parser.add_argument("--seconds", type=float, default=3600)
    asked = parser.parse_args()
    rows = [tried(path, list(asked.tests), asked.seconds) for path in asked.env]
    for python in asked.python if not asked.env else ():
        both = (versions_of(name, python, getattr(asked, name)) for name in NEWEST)
        for torch, transformers in itertools.product(*both):
            path = made(asked.folder, python, torch, transformers, asked.torch_backend)
            rows.append(
                tried(path, list(asked.tests), asked.seconds)
                if isinstance(path, Path)
                else Row(python, torch, transformers, path)
            )
    print("| Python | torch | transformers | smoke test | tests |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.python} | {row.torch} | {row.transformers} | {row.smoke} | {row.tests} |")
    sys.exit(not all(row.is_good for row in rows))


if __name__ == "__main__":
    main()
