"""Run hookline with the oldest and the newest versions that pyproject.toml promises, and print what fails.

    python tools/matrix.py                                       # every combination, in environments made with uv
    python tools/matrix.py --python 3.12 --torch 2.8.0 --transformers 5.23.0
    python tools/matrix.py --env path/to/environment             # one that exists, with its versions
    python tools/matrix.py --torch-backend ''                    # torch as PyPI has it, where its own index is blocked

An environment is kept in `--folder` and used again. uv takes a Python from PATH, or downloads it. Versions that no
index has, and Pythons that cannot be had, are rows of the table too. Each combination runs a smoke test and then tests:
ALL of them at the corners (`Versions.is_corner`), a FEW elsewhere; `--tests all`, `--tests few` or `--tests PATH` is
for every row. What pytest prints is in a file next to each environment. The exit status is 1 if anything fails.

PyPI has torch for CUDA, which also runs on a machine without a GPU: the whole table then takes 30 GB of disk, since uv
links files that environments share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
NEWEST = {"torch": "2.15.0", "transformers": "5.23.0"}
"""The newest versions that were tried; constraints.txt pins what the project is developed with."""
OLDEST = {"3.14": {"torch": "2.9.0"}}
"""Where a Python needs more than pyproject.toml says: torch 2.8 has no wheels for 3.14."""
BETWEEN = (("3.12", "2.11.0", "5.17.0"),)
"""Combinations between the oldest and the newest: what the tests with a GPU run on."""
ALL = (
    *("tests/test_front_door.py", "tests/test_load.py", "tests/test_model.py", "tests/test_cli.py"),
    *("tests/engine", "tests/hooks", "tests/compiled", "tests/transformer", "tests/weights", "tests/vision"),
    "tests/demo",
)
FEW = ("tests/test_front_door.py", "tests/test_load.py", "tests/test_model.py", "tests/hooks", "tests/weights")
"""Every part of a model that a version may change, without the time of compilers, processes and large tables."""
NEEDED = ("pytest", "hypothesis", "pillow", "matplotlib", "pandas", "xarray")
"""What the tests need besides hookline and torch; accelerate comes without its dependencies, which torch is one of."""
SMOKE = """
import json, platform, sys, torch, transformers, hookline
from hookline.engine import tricks
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
print(json.dumps(found | {"failed": failed, "tricks": {name: why for name, why in tricks().items() if why}}))
"""


class Versions(NamedTuple):
    """A combination to try."""

    python: str
    torch: str
    transformers: str

    @property
    def is_corner(self) -> bool:
        """Whether all tests run: the newest of all with each Python, the oldest with the first and the last."""
        newest, old = tuple(NEWEST.values()), tuple(oldest(name, self.python) for name in NEWEST)
        is_oldest = self[1:] == old and self.python in (PYTHONS[0], PYTHONS[-1])
        return self[1:] == newest or is_oldest or self in BETWEEN


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


def combinations(pythons: list[str], asked: dict[str, list[str] | None]) -> list[Versions]:
    """What to try: the versions requested of each package with each Python; with none requested, those between too."""
    pairs = {
        python: itertools.product(*(versions_of(name, python, asked[name]) for name in NEWEST)) for python in pythons
    }
    found = [Versions(python, *pair) for python in pythons for pair in pairs[python]]
    return found if any(asked.values()) else found + [Versions(*each) for each in BETWEEN if each[0] in pythons]


def made(folder: Path, versions: Versions, backend: str) -> Path | str:
    """An environment with these versions, or why there is none."""
    uv, path = shutil.which("uv"), folder / "-".join(versions)
    if uv is None:
        return "uv is not installed: pip install uv"
    if (path / ".ready").exists():
        return path
    install = [uv, "pip", "install", "--quiet", "--python", str(path)]
    torch, transformers = f"torch=={versions.torch}", f"transformers=={versions.transformers}"
    for step in (
        [uv, "venv", "--quiet", "--clear", "--python", versions.python, str(path)],
        [*install, *(["--torch-backend", backend] if backend else []), torch],
        [*install, "--no-deps", "accelerate"],
        [*install, *NEEDED, "psutil", torch, transformers, "--editable", str(ROOT)],
    ):
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            hint = "; --torch-backend '' takes torch from PyPI" if "--torch-backend" in step else ""
            return f"not installed: {' '.join(done.stderr.split())[-160:]}{hint}"
    (path / ".ready").touch()
    return path


def tried(path: Path, tests: tuple[str, ...], seconds: float) -> Row:
    """Run the smoke test and the tests in an environment."""
    python = str(path / "bin" / "python")
    given = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    given.pop("PYTHONDONTWRITEBYTECODE", None)  # or each test that starts a process compiles all of torch
    smoke = subprocess.run([python, "-c", SMOKE], capture_output=True, text=True, env=given)
    if smoke.returncode:
        return Row(*installed(python), " ".join(smoke.stderr.split())[-200:])
    found = json.loads(smoke.stdout.splitlines()[-1])
    problems = [f"{len(found['failed'])} points failed: {found['failed']}"] if found["failed"] else []
    problems += [f"the trick {name} does not hold: {why}" for name, why in found["tricks"].items()]
    row = Row(found["python"], found["torch"], found["transformers"], "; ".join(problems) or "ok")
    command = [python, "-m", "pytest", "-m", "not slow", "-p", "no:randomly", "-p", "no:cacheprovider", "-rfEs", *tests]
    log = path.with_name(f"{path.name}.log")
    try:
        with log.open("w", encoding="utf-8") as file:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=given, timeout=seconds)
    except subprocess.TimeoutExpired:
        return row._replace(tests=f"error: not finished after {seconds:.0f} s")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))), flush=True)
    ends = [line.strip("= ") for line in lines if re.search(r"\d (passed|failed|errors?)\b.* in [\d.]+s", line)]
    return row._replace(tests=ends[-1] if ends else f"error: no tests ran, see {log}")


def installed(python: str) -> list[str]:
    """The versions of an environment in which hookline does not run."""
    code = "import platform; from importlib.metadata import version as v; "
    code += "print(platform.python_version(), v('torch'), v('transformers'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.split() or ["?"] * 3


def chosen(asked: list[str] | None, is_corner: bool) -> tuple[str, tuple[str, ...]]:
    """What the table calls the tests of a row, and their paths."""
    name = ("all" if is_corner else "few") if asked is None else " ".join(asked)
    return name, {"all": ALL, "few": FEW}.get(name) or tuple(asked or ())


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    """Try what was requested, one after the other."""
    for path in asked.env:
        name, tests = chosen(asked.tests, is_corner=True)
        row = tried(path, tests, asked.seconds)
        yield row._replace(tests=f"{name}: {row.tests}")
    for versions in [] if asked.env else combinations(asked.python, {name: getattr(asked, name) for name in NEWEST}):
        path = made(asked.folder, versions, asked.torch_backend)
        if isinstance(path, str):
            yield Row(*versions, path)
            continue
        name, tests = chosen(asked.tests, versions.is_corner)
        row = tried(path, tests, asked.seconds)
        yield row._replace(tests=f"{name}: {row.tests}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+")
    parser.add_argument("--transformers", nargs="+")
    parser.add_argument("--torch-backend", default="cpu", help="what uv installs torch for; '' for what PyPI has")
    parser.add_argument("--env", nargs="+", type=Path, default=[], help="environments that exist")
    parser.add_argument("--tests", nargs="+", help="all, few or paths; by default all at the corners, few elsewhere")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "matrix")
    parser.add_argument("--seconds", type=float, default=3600)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, and tests need it
    found = []
    for row in rows(parser.parse_args()):
        print("| " + " | ".join(row) + " |", flush=True)
        found.append(row)
    print("\n| Python | torch | transformers | smoke test | tests |\n|---|---|---|---|---|")
    for row in found:
        print("| " + " | ".join(row) + " |")
    sys.exit(not all(row.is_good for row in found))


if __name__ == "__main__":
    main()
