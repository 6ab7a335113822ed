"""How long the first steps take, each in new processes: imports, the first model, and answers of the command line.

    python benchmarks/startup.py [--runs 7]

The table has medians in seconds, and the ratio to `import torch` in the same round, so that a busy machine shows in
both. What transformers needs to import the model's code is a row of its own: `hookline.load` cannot be faster.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

TORCH = "import torch"
CODE = "import torch, transformers.models.gpt2.modeling_gpt2, transformers.models.auto.tokenization_auto"
STEPS = {
    "python": "pass",
    TORCH: TORCH,
    "import hookline": "import hookline",
    "import hookline, and use it": "import hookline; hookline.load",
    "import torch and transformers' GPT-2": CODE,
    'import hookline; hookline.load("tinyworld")': 'import hookline; hookline.load("tinyworld")',
}
COMMANDS = {
    "hookline --help": ["--help"],
    "hookline --version": ["--version"],
    "hookline plan --help": ["plan", "--help"],
}
LOAD = f"{CODE}; import time, hookline; hookline.load; start = time.perf_counter(); hookline.load('tinyworld')"
"""Only the last part is timed: `load`, after everything that it needs is imported."""


def seconds(*words: str) -> float:
    """How long a process takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def load_alone() -> float:
    """How long `load` takes in a new process that has imported transformers' code of the model."""
    code = f"{LOAD}; print(time.perf_counter() - start)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def measured(runs: int) -> dict[str, list[float]]:
    """All steps, one after the other, `runs` times; the first round only fills the caches of files."""
    times: dict[str, list[float]] = {}
    for number in range(runs + 1):
        found = {name: seconds("-c", code) for name, code in STEPS.items()}
        found |= {name: seconds("-m", "hookline", *words) for name, words in COMMANDS.items()}
        found['hookline.load("tinyworld") alone'] = load_alone()
        if number or not runs:
            for name, each in found.items():
                times.setdefault(name, []).append(each)
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="one round, to see that it runs")
    asked = parser.parse_args()
    times = measured(0 if asked.smoke else asked.runs)
    print(f"{'medians of new processes':<46} {'seconds':>8} {'fastest':>8} {'to torch':>9}")
    for name, each in times.items():
        ratio = statistics.median(one / torch for one, torch in zip(each, times[TORCH], strict=True))
        print(f"{name:<46} {statistics.median(each):>8.2f} {min(each):>8.2f} {ratio:>9.2f}")


if __name__ == "__main__":
    main()
