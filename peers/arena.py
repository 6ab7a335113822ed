"""The exercises of ARENA's interpretability chapter, with TransformerLens and with hookline in its place.

    python peers/stack.py FOLDER                    # makes the environments `there` and `here`
    python peers/arena.py FOLDER COURSE/chapter1_transformer_interp

The solutions of each part that uses TransformerLens are run cell by cell in both environments, on random weights
(`arena_hub.py`, `arena_doubles.py`) and with training shortened, the same in both. For each part the table has the
number of cells, how many run with TransformerLens, how many of these run with hookline, how many variables that these
cells set hold numbers, and in how many they are the same within 1e-3 of the largest. Results with TransformerLens are
kept in FOLDER, unless `--again` is given. Both versions of the course can be given: ARENA 2.0 and 3.0. A cell that
needs something else from the network fails in both.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = ["scikit-learn", "networkx", "tabulate", "rich", "openai", "torchinfo", "umap-learn", "hdbscan", "nbformat",
            "peft", "ipywidgets", "jaxtyping", "importlib-metadata", "frozendict"]  # fmt: skip
"""What the course imports, besides the packages of `stack.py`; circuitsvis and sae-vis without their requirements."""
SHORTEN = [
    "epochs|max_steps_per_epoch|steps|total_training_steps|n_epochs|max_new_tokens=4",
    *("N_SAMPLES|num_games=96", "N=8"),
]
STEPS = {"part1_": 20, "part33": 4, "part41": 12, "part42": 30, "part52": 8, "part53": 12, "part54": 20,
         "part3_": 12, "part5_": 8, "part6_": 12, "part7_": 20, "training": 20}  # fmt: skip
"""The number of steps of loops with a progress bar, where they are many."""
WIDE = "part1_"
"""The part whose exercises expect the width of GPT-2."""


def main() -> None:
    """Run the parts in both environments, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="has the environments of peers/stack.py")
    options.add_argument("chapter", type=Path, help="the chapter's folder, with `exercises` in it")
    options.add_argument("--only", default="", metavar="TEXT", help="only parts with this in their path")
    options.add_argument("--again", action="store_true", help="run the parts with TransformerLens again too")
    options.add_argument("--limit", default="120", help="seconds for a cell (default 120)")
    given = options.parse_args()
    folder, chapter = given.folder.resolve(), given.chapter.resolve()
    home = folder / "arena-hf"
    if not home.exists():
        prepare(folder, home)
    print(f"{'part':56}{'cells':>7}{'there':>7}{'here':>7}{'numbers':>9}{'same':>7}", flush=True)
    total = [0] * 5
    for demo in parts(chapter):
        if given.only not in demo.as_posix():
            continue
        found = [run(folder, home, name, demo, given) for name in ("there", "here")]
        row, notes = compare(*found)
        total = [ours + more for ours, more in zip(total, row, strict=True)]
        name = demo.relative_to(chapter / "exercises").parent.as_posix()
        print(f"{name:56}" + line(row), *notes, sep="\n    ", flush=True)
    print(f"{'all':56}{line(total)}")


def line(row: list[int]) -> str:
    """The numbers of a row of the table."""
    return "".join(f"{number:{width}}" for number, width in zip(row, (7, 7, 7, 9, 7), strict=True))


def prepare(folder: Path, home: Path) -> None:
    """Install what the course imports, and make the models."""
    for name in ("there", "here"):
        pip = [folder / name / "bin" / "pip", "install", "-q", "-c", HERE.parent / "constraints.txt"]
        subprocess.run([*pip, *PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", "circuitsvis", "sae-vis==0.3.7"], check=True)
    subprocess.run([folder / "there" / "bin" / "python", HERE / "arena_hub.py", home], check=True)


def parts(chapter: Path) -> list[Path]:
    """The solutions, and the notebooks of the monthly problems, that use TransformerLens or sae-lens."""
    exercises = chapter / "exercises"
    found = [*exercises.glob("part*/solutions.py"), *exercises.glob("monthly*/*/training_model.ipynb")]
    uses = ("transformer_lens", "sae_lens")
    return sorted(
        demo
        for demo in found
        if any(name in path.read_text(encoding="utf-8") for path in (demo, *demo.parent.glob("*.py")) for name in uses)
    )


def run(folder: Path, home: Path, name: str, demo: Path, given: argparse.Namespace) -> list[Any]:
    """What happens to each cell of a part in an environment."""
    results = folder / "arena" / f"{demo.parent.name}-{name}.json"
    results.parent.mkdir(exist_ok=True)
    if name == "there" and results.exists() and not given.again:
        return next(iter(json.loads(results.read_text(encoding="utf-8")).values()))
    home = home / "wide" if demo.parent.name.startswith(WIDE) else home
    names = (demo.parent.name, demo.name)
    steps = next((number for part, number in STEPS.items() if any(name.startswith(part) for name in names)), 150)
    env = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "ARENA_STEPS": str(steps)}
    stand_in = ["-m", "hookline.compat.transformer_lens"] if name == "here" else []
    command = [folder / name / "bin" / "python", *stand_in, HERE / "demo_cells.py", demo, "--limit", given.limit]
    command += [
        *(flag for each in SHORTEN for flag in ("--shorten", each)),
        "--before",
        HERE / "arena_doubles.py",
        "--results",
        results,
    ]
    with results.with_suffix(".log").open("w", encoding="utf-8") as log:
        subprocess.run(command, env=os.environ | env, stdout=log, stderr=log, check=True)
    return next(iter(json.loads(results.read_text(encoding="utf-8")).values()))


def compare(there: list[Any], here: list[Any]) -> tuple[list[int], list[str]]:
    """A row of the table, and what differs: cells that pass only there, and variables with other numbers."""
    ours = {index: (state, reason, numbers) for index, state, reason, numbers in here}
    passed = [(index, numbers) for index, state, _, numbers in there if state == "pass"]
    notes, counts = [], [len(there), len(passed), 0, 0, 0]
    for index, expected in passed:
        state, reason, numbers = ours.get(index, ("fail", "the process ended", {}))
        if state != "pass":
            notes.append(f"cell {index}, only there: {reason}")
            continue
        counts[2] += 1
        both = [name for name in expected if name in numbers]
        other = [name for name in both if not is_same(expected[name], numbers[name])]
        counts[3] += len(both)
        counts[4] += len(both) - len(other)
        notes += [f"cell {index}, {name}: {expected[name][:4]} there, {numbers[name][:4]} here" for name in other]
    return counts, notes


def is_same(first: list[float], second: list[float]) -> bool:
    """Whether numbers of two variables are the same within rounding."""
    if len(first) != len(second) or first[0] != second[0]:
        return False
    finite = [abs(value) for value in first[1:] if abs(value) < float("inf")]
    bound = 1e-3 * max(finite, default=0.0)
    pairs = zip(first[1:], second[1:], strict=True)
    return all(one == two or abs(one - two) <= bound or (one != one and two != two) for one, two in pairs)


if __name__ == "__main__":
    main()
