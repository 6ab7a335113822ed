"""Build the wheel and the source distribution, check them, and try the wheel in a new environment.

    python tools/dist.py                      # in dist/; what is pinned in constraints.txt is installed
    python tools/dist.py --packages FOLDER    # quick: the new environment uses the packages of this folder instead

The environment has nothing but the wheel and its dependencies: no checkout, no extras. In it, the command line answers,
the demo runs, and a model is loaded, verified and edited.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_BYTES = {".whl": 10_000_000, ".gz": 15_000_000}
"""A larger file has something in it that does not belong there."""
SMOKE = """
import hookline, sys
from hookline import edits
model = hookline.load("tinyworld")
assert not model.verify().failed()
prompt = "When Mary and John went to the store, John gave a drink to"
with model.hooks([("blocks.3.attn.hook_z", edits.zero(head=4))]):
    edited = model(prompt)
assert not edited.equal(model(prompt))
assert "site-packages" in hookline.__file__, hookline.__file__
print(hookline.__version__)
"""


def built(folder: Path, tools: Path) -> list[Path]:
    """The two files, built in a folder and checked."""
    run(tools / "bin/python", "-m", "build", "--outdir", folder, ROOT)
    files = sorted(folder.iterdir())
    run(tools / "bin/python", "-m", "twine", "check", "--strict", *files)
    return files


def check_contents(path: Path) -> list[str]:
    """The names in a file; AssertionError if something is missing or does not belong there."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
        strange = [name for name in names if not re.match(r"hookline/|hookline-[^/]+\.dist-info/", name)]
        wanted = ["hookline/py.typed", "hookline/demo/assets/tinyworld/model.safetensors", "hookline/demo/story.md"]
    else:
        with tarfile.open(path) as archive:
            names = [name.partition("/")[2] for name in archive.getnames()]
        strange = [name for name in names if re.match(r"out/|\.venv|.*\.pyc$|.*/__pycache__", name)]
        wanted = ["pyproject.toml", "LICENSE", "README.md", "src/hookline/__init__.py", "tests/conftest.py"]
    missing = [name for name in wanted if name not in names]
    assert not strange, f"{path.name} has {strange[:5]}"
    assert not missing, f"{path.name} lacks {missing}"
    assert path.stat().st_size < MOST_BYTES[path.suffix], f"{path.name} has {path.stat().st_size:,} bytes"
    return names


def environment(path: Path, packages: Path | None) -> Path:
    """A new virtual environment, perhaps with the packages of another."""
    venv.create(path, with_pip=True, clear=True)
    if packages is not None:
        site = next((path / "lib").glob("python*/site-packages"))
        # A .pth file that runs nothing: editable installs of the other environment do not come along.
        (site / "borrowed.pth").write_text(f"{packages.resolve()}\n")
    return path


def try_wheel(wheel: Path, packages: Path | None) -> None:
    """Install the wheel alone, and use it as a newcomer does, from an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        place = environment(Path(folder) / "env", packages)
        pip = [place / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if packages is None:
            run(*pip, "-c", ROOT / "constraints.txt", "torch", "numpy")
            run(*pip, "-c", ROOT / "constraints.txt", wheel)
            run(place / "bin/python", "-m", "pip", "check")
        else:
            run(*pip, "--no-deps", "--force-reinstall", "--ignore-installed", wheel)
        work = Path(folder) / "work"
        work.mkdir()
        run(place / "bin/hookline", "--version", cwd=work)
        run(place / "bin/python", "-c", SMOKE, cwd=work)
        run(place / "bin/hookline", "demo", cwd=work)
        print(f"demo.html has {(work / 'out/demo.html').stat().st_size:,} bytes")


def run(*words: object, cwd: Path | None = None) -> None:
    """Run a command without the checkout on its path; exit if it fails."""
    print("$", *(getattr(word, "name", word) if word != SMOKE else "…" for word in words), flush=True)
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=given, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}\nfailed with {done.returncode}")


def main() -> None:
    """Build, check, try, and print sizes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--packages", type=Path, help="a site-packages folder with the dependencies")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tools = environment(Path(folder) / "tools", None)
        run(tools / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "build", "twine")
        files = built(Path(folder) / "dist", tools)
        for path in files:
            names = check_contents(path)
            print(f"{path.name}: {path.stat().st_size:,} bytes, {len(names)} files")
        try_wheel(next(path for path in files if path.suffix == ".whl"), asked.packages)
        asked.out.mkdir(exist_ok=True)
        for path in files:
            shutil.copy2(path, asked.out)


if __name__ == "__main__":
    main()
