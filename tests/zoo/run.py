"""Runs the zoo: `make zoo`, or `python tests/zoo/run.py [--packages timm] [--only 'resnet*'] [--again]`.

Every network is checked in a process of its own, which may hang or crash. Results are appended to a file, a line for
each network: a later run goes on where this one ended.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

RESULTS = HERE.parents[1] / "out" / "zoo" / "results.jsonl"
FIRST = ("torch_nn", "e3nn", "demucs", "torch_geometric", "x_transformers", "vit_pytorch", "kornia", "peft")
"""Packages of small networks, which are checked first."""
LAST = ("segmentation_models_pytorch", "open_clip", "torchvision", "timm")
"""Packages of large ones."""
OTHERS = [path.stem for path in sorted((HERE / "catalog").glob("*.py")) if path.stem not in ("__init__", *FIRST, *LAST)]
README, NUMBER = HERE.parents[1] / "README.md", r"[\d,]+ networks"
PACKAGES = [*FIRST, *OTHERS, *LAST]
MEMORY = 12 << 30
"""Bytes of addresses that a network may take; torch itself takes about four."""

LISTED = "listed.json"
WAITS = 10
"""How much longer than the processor's time for a network it may take, beside whatever else the machine does."""


def latest(results: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The newest line of each network."""
    lines = results.read_text().splitlines() if results.exists() else []
    records = [json.loads(line) for line in lines if line.strip()]
    return {(record["package"], record["name"]): record for record in records}


def numbers_listed(results: Path) -> dict[str, int]:
    """How many networks the catalogs list that were used so far, by package."""
    listed = results.with_name(LISTED)
    return json.loads(listed.read_text()) if listed.exists() else {}


def check(network: Any, edits: int, seconds: float) -> dict[str, Any]:
    """Build and check one network; what goes wrong before the checks is said as its status."""
    import torch
    from zoo import checks
    from zoo.network import LARGEST, TooLargeError

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    checks.seed()
    record: dict[str, Any] = {"status": "not built"}
    start = time.monotonic()
    try:
        module, args, kwargs = network.build()
    except TooLargeError as error:
        return {"status": "too large", "reason": str(error)}
    except Exception as error:
        return record | {"reason": f"{type(error).__name__}: {error}"[:500]}
    record["class"] = f"{type(module).__module__}.{type(module).__qualname__}"
    record["parameters"] = sum(x.numel() for x in module.parameters())
    if record["parameters"] > LARGEST:
        return record | {"status": "too large", "reason": f"{record['parameters']:,} parameters"}
    record["build_s"] = round(time.monotonic() - start, 2)
    try:
        found = checks.check_network(module, args, kwargs, network.name, edits=edits, seconds=seconds)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"[:600]
        return record | {"status": "not checked", "reason": reason}
    record["status"] = "failed" if found.problems else "not checked" if "everything" in found.left_out else "ok"
    return record | {
        "compared": dict(found.compared),
        "problems": [vars(problem) for problem in found.problems[:30]],
        "number_of_problems": len(found.problems),
        "refused": dict(list(found.refused.items())[:20]),
        "left_out": found.left_out,
        "cost": {way: round(value, 3) for way, value in found.cost.items()},
    }


def in_child(network: Any, limit: float, edits: int) -> dict[str, Any]:
    """Check a network in a fork, which is killed when its time is up."""
    reader, writer = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (round(limit), round(limit) + 5))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            record = check(network, edits, limit / 4)
        except BaseException as error:
            record = {"status": "crashed", "reason": f"{type(error).__name__}: {error}"[:500]}
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(record, default=str))
        os._exit(0)
    os.close(writer)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, WAITS * limit)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status, used = os.wait4(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = round(time.monotonic() - start, 2)
    times = {"seconds": seconds, "processor_s": round(used.ru_utime + used.ru_stime, 2)}
    if text:
        return json.loads(text) | times
    is_late = os.waitstatus_to_exitcode(status) == -signal.SIGXCPU or seconds >= WAITS * limit
    return {"status": "time is up" if is_late else "crashed", "reason": f"exit status {status}"} | times


def work(arguments: argparse.Namespace) -> None:
    """Check the networks of one package."""
    package = arguments.worker
    before = latest(arguments.results)
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    from zoo import (
        checks,
        torchvision_ops,  # noqa: F401 (before what imports torchvision)
    )

    checks.check_network(torch.nn.Linear(2, 2), (torch.ones(1, 2),), {}, "imports what every fork would import again")
    rows = list(importlib.import_module(f"zoo.catalog.{package}").networks())
    listed = arguments.results.with_name(LISTED)
    listed.write_text(json.dumps(numbers_listed(arguments.results) | {package: len(rows)}))
    for number, network in enumerate(rows):
        if not fnmatch.fnmatch(network.name, arguments.only):
            continue
        past = before.get((package, network.name))
        is_wanted = past is None or (arguments.again and past["status"] not in ("ok", "too large"))
        if not is_wanted or number % arguments.parts != arguments.part:
            continue
        record = in_child(network, arguments.limit, arguments.edits)
        record = {"package": package, "name": network.name, "revision": revision.stdout.strip()} | record
        with arguments.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        first = next(iter(record.get("problems", [])), {})
        said = record.get("reason") or " ".join(str(first.get(key, "")) for key in ("check", "point", "what", "by"))
        status, seconds = record["status"], record["processor_s"]
        print(f"{package:20} {network.name:45} {status:11} {seconds:6.1f} s  {said[:150]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", default=",".join(PACKAGES))
    parser.add_argument("--only", default="*", help="a glob for names of networks")
    parser.add_argument("--again", action="store_true", help="check those again that did not end well")
    parser.add_argument("--limit", type=float, default=120, help="seconds of the processor for each network")
    parser.add_argument("--edits", type=int, default=4, help="inputs, outputs, and gradients that are edited in each")
    parser.add_argument("--part", type=int, default=0, help="which part of the networks, for several processes")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--report", type=Path, help="write the page about the results there, and its number into the README"
    )
    parser.add_argument("--only-report", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        work(arguments)
        return
    for package in [] if arguments.only_report else arguments.packages.split(","):
        # A package that cannot be imported, or whose import breaks another, does not end the run.
        command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--worker", package]
        worker = subprocess.run(command, check=False)
        if worker.returncode:
            print(f"{package}: not checked to the end (exit status {worker.returncode})", flush=True)
    from zoo import report

    print(report.table(latest(arguments.results), numbers_listed(arguments.results)))
    if arguments.report:
        page = report.page(latest(arguments.results), numbers_listed(arguments.results))
        arguments.report.write_text(page)
        number = re.findall(NUMBER, page)[0]
        README.write_text(re.sub(NUMBER, number, README.read_text()))
    if unexplained := report.unexplained(latest(arguments.results)):
        sys.exit(f"{len(unexplained)} networks disagree: {', '.join(unexplained[:8])}")


if __name__ == "__main__":
    main()
