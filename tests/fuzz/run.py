"""Runs the fuzzer: `make fuzz MINUTES=30 SEED=1`, or `python tests/fuzz/run.py [--minutes 30] [--only deferred]`.

Programs are made from numbers, from `SEED` times a million on; what ran is counted in a file, so that runs add up.
Every failure is made smaller, printed as a script that runs alone, and kept in `out/fuzz`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

OUT = HERE.parents[1] / "out" / "fuzz"
RANGE = 1_000_000
"""How many programs a seed has."""
LONGEST = 120
"""Seconds after which a program hangs."""
EXPENSIVE = {"inductor": 4}
"""Executors that take long run one of so many programs for graphs."""


class Failure(NamedTuple):
    """A program whose runs differ, made smaller."""

    seed: int
    executor: str
    text: str
    script: str


def run_seed(seed: int, options: argparse.Namespace, sent: Connection) -> tuple[Counter[str], list[Failure]]:
    """Run one program in every executor that takes it. A process that dies before it compares died without hookline."""
    from fuzz import generate, judge
    from fuzz.executors import EXECUTORS
    from fuzz.subject import InvalidError

    counts: Counter[str] = Counter()
    try:
        program, subject = generate.program(seed)
    except InvalidError:
        return Counter({"programs without a network": 1}), []
    expected = judge.by_hand(subject, program)
    if isinstance(expected, judge.Verdict):
        return Counter({"programs that torch refuses": 1}), []
    counts["programs"] += 1
    sent.send(("compares", seed))
    failures: list[Failure] = []
    for executor in EXECUTORS:
        if (options.only and executor.name not in options.only) or executor.name in options.without:
            continue
        if seed // generate.GRAPHS % EXPENSIVE.get(executor.name, 1):
            continue
        if not executor.takes(program):
            continue
        verdict = judge.judge(subject, program, executor, expected)
        counts[f"{executor.name} {verdict.kind}"] += 1
        if verdict.kind == "fails":
            smaller = program if options.until_failure else judge.smaller(program, executor, verdict)
            failures.append(
                Failure(seed, executor.name, verdict.text, judge.script(smaller, executor.name, verdict.text))
            )
    return counts, failures


def work(numbers: Iterator[int], options: argparse.Namespace, sent: Connection) -> None:
    """Run programs in a process of its own, and say of each when it begins and what came of it."""
    import devices
    import torch

    torch.set_num_threads(1)
    devices.use(options.device)
    for seed in numbers:
        sent.send(("begins", seed))
        sent.send(("ends", seed, *run_seed(seed, options, sent)))


class Worker:
    """A process that runs every n-th program; it is replaced when it dies or hangs."""

    def __init__(self, first: int, step: int, options: argparse.Namespace) -> None:
        self.next, self.step, self.options = first, step, options
        self.start()

    def start(self) -> None:
        self.received, sent = multiprocessing.Pipe(duplex=False)
        numbers = iter(range(self.next, self.next + RANGE, self.step))
        self.process = multiprocessing.get_context("fork").Process(
            target=work, args=(numbers, self.options, sent), daemon=True
        )
        self.process.start()
        sent.close()
        self.seed, self.began, self.compares = self.next, time.monotonic(), False

    def message(self) -> tuple[Counter[str], list[Failure]] | None:
        """What came of a program, if one ended; a process that died is replaced."""
        try:
            kind, seed, *rest = self.received.recv()
        except EOFError:
            self.process.join()
            return self.replaced(f"the process died: exit code {self.process.exitcode}")
        self.seed, self.began, self.compares = seed, time.monotonic(), kind == "compares"
        if kind != "ends":
            return None
        self.next = seed + self.step
        counts, failures = rest
        return counts, failures

    def replaced(self, text: str) -> tuple[Counter[str], list[Failure]]:
        """Go on behind the program that ended this process."""
        if not self.compares:
            self.next = self.seed + self.step
            self.start()
            return Counter({"programs that end torch's process": 1}), []
        failure = Failure(self.seed, "process", text, f"# python tests/fuzz/run.py --first {self.seed} --programs 1\n")
        self.next = self.seed + self.step
        self.start()
        return Counter({"programs": 1, "process fails": 1}), [failure]

    def hangs(self) -> bool:
        return time.monotonic() - self.began > LONGEST

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def run(options: argparse.Namespace) -> Counter[str]:
    """Run programs until the time is up or all have run; print and keep every failure."""
    first = options.seed * RANGE if options.first is None else options.first
    processes = min(options.processes, options.programs or options.processes)
    workers = [Worker(first + index, processes, options) for index in range(processes)]
    ends = time.monotonic() + options.minutes * 60
    total: Counter[str] = Counter()
    ended, kinds, has_failed = 0, Counter[str](), False
    while time.monotonic() < ends and (not options.programs or ended < options.programs):
        if has_failed and options.until_failure:
            break
        results = [worker.replaced("the program hangs") for worker in workers if worker.hangs() and not worker.stop()]
        ready = wait([worker.received for worker in workers], timeout=1)
        results += [result for worker in workers if worker.received in ready and (result := worker.message())]
        for counts, failures in results:
            ended += 1
            total += counts
            for failure in failures:
                has_failed = True
                kept(failure, kinds, options.out)
    for worker in workers:
        worker.stop()
    return total


def kept(failure: Failure, kinds: Counter[str], out: Path) -> None:
    """Write a failure to a file, and print it if it is one of the first three of its kind."""
    from fuzz.judge import sort_of

    folder = out / "failures"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{failure.executor}_{failure.seed}.py"
    path.write_text(failure.script)
    kind = f"{failure.executor} {sort_of(failure.text)}"
    kinds[kind] += 1
    if kinds[kind] <= 3:
        print(f"\n{failure.seed} {failure.executor}: {failure.text}\n{path}\n{failure.script}", flush=True)


def recorded(path: Path) -> Counter[str]:
    """The counts of all runs."""
    total: Counter[str] = Counter()
    for line in path.read_text().splitlines() if path.exists() else ():
        total += Counter(json.loads(line)["counts"])
    return total


RECORD = HERE / "counts.json"
"""The counts of the runs that were recorded, of all machines."""
PAGE = HERE.parents[1] / "docs" / "reliability.md"
MARKS = re.compile(r"(<!-- counts: .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def record(counts: Counter[str]) -> None:
    """Add the counts of a run to those that are kept with the code, and write them into the page."""
    total = Counter(json.loads(RECORD.read_text())) if RECORD.exists() else Counter[str]()
    total += counts
    RECORD.write_text(json.dumps(dict(sorted(total.items())), indent=1) + "\n")
    PAGE.write_text(MARKS.sub(lambda marks: marks[1] + table(total) + marks[2], PAGE.read_text()))


def table(total: Counter[str]) -> str:
    """What ran, as Markdown."""
    executors = sorted({name.rsplit(" ", 1)[0] for name in total if is_of_pairs(name)})
    rows = [f"| {name} | {sum(total[f'{name} {verdict}'] for verdict in VERDICTS):,} |" for name in executors]
    return (
        f"So far {total['programs']:,} programs ran: {pairs(total):,} pairs of a program and a way of running it.\n\n"
        "| way | programs |\n| --- | --- |\n" + "\n".join(rows) + "\n\n"
        f"In {total['process fails']:,} programs, the fuzzer's own process died or hung.\n\n"
    )


VERDICTS = ("agrees", "refused", "fails")


def is_of_pairs(name: str) -> bool:
    """Whether a count is of pairs of a program and an executor, and not of processes that died."""
    return name.split()[-1] in VERDICTS and not name.startswith("process ")


def pairs(counts: Counter[str]) -> int:
    """How many pairs of a program and an executor were compared."""
    return sum(count for name, count in counts.items() if is_of_pairs(name))


def main() -> None:
    """Run, count, and end with the number of programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, help="the first program, instead of a seed")
    parser.add_argument("--programs", type=int, default=0, help="how many at most")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--device", default="cpu", help="where the networks and what they get are")
    parser.add_argument(
        "--record", action="store_true", help="only add the counts in the folder to those of the project"
    )
    parser.add_argument("--until-failure", action="store_true", help="stop at the first failure")
    parser.add_argument("--out", type=Path, default=OUT, help="where failures and counts are kept")
    parser.add_argument("--only", nargs="*", help="names of executors")
    parser.add_argument("--without", nargs="*", default=(), help="names of executors that are left out")
    options = parser.parse_args()
    if options.record:
        record(recorded(options.out / "counts.jsonl"))
        (options.out / "counts.jsonl").unlink()
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    counts = run(options)
    options.out.mkdir(parents=True, exist_ok=True)
    counts_file = options.out / "counts.jsonl"
    with counts_file.open("a") as file:
        file.write(json.dumps({"seed": options.seed, "first": options.first, "counts": dict(counts)}) + "\n")
    total = recorded(counts_file)
    for name, count in sorted(counts.items()):
        print(f"{name:40} {count:>9,} {total[name]:>12,} in all")
    failures = sum(count for name, count in counts.items() if name.endswith(" fails"))
    print(f"{pairs(counts):,} pairs of a program and an executor, {pairs(total):,} in all runs; {failures:,} failures")
    print(f"{counts['programs']} programs")
    sys.exit(bool(failures))


def replay(executor_name: str, program: Any) -> None:
    """Run a program as it was printed, and say what differs. The exit status is 1 if it fails, 2 if it cannot run."""
    from fuzz import judge
    from fuzz.executors import EXECUTORS
    from fuzz.subject import Subject

    subject = Subject(program.network)
    expected = judge.by_hand(subject, program, is_clear=True)
    executor = next(executor for executor in EXECUTORS if executor.name == executor_name)
    verdict = expected if isinstance(expected, judge.Verdict) else judge.judge(subject, program, executor, expected)
    print(f"{verdict.kind}: {verdict.text}")
    sys.exit({"fails": 1, "invalid": 2}.get(verdict.kind, 0))


if __name__ == "__main__":
    main()
