"""The table and the page about what the zoo found."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from zoo import known

Records = dict[tuple[str, str], dict[str, Any]]

CHECKED = ("ok", "failed")

PACKAGES = {
    "diffusers_tests": "diffusers",
    "torch_nn": "torch.nn",
    "transformers_tests": "transformers",
}
"""What packages are called whose catalog has another name."""

SLOW = 3.0
"""Times the bare forward pass from which on a network is listed as slow."""

REASONS = (
    ("too large", r"", "more than 30 M parameters, also with the options that make it smaller"),
    ("time is up", r"", "more seconds of the processor than a network gets"),
    ("crashed", r"", "the process ended"),
    ("", r"does not repeat", "its output is not the same twice, with the same seed"),
    (
        "",
        r"torchvision::|deform_conv",
        "needs torchvision's compiled operators, which only some builds of torch can load",
    ),
    (
        "",
        r"(?i)load weights|connect|offline|huggingface\.co|urlopen|resolve|download|from_pretrained|no such file",
        "needs files that would have to be downloaded",
    ),
    (
        "",
        r"(?i)No module named|ImportError|(cannot|could not) import|install|requires .*library|pyg-lib",
        "needs a package that is not installed",
    ),
    ("", r"is not supported|not supported,|NotImplementedError", "this combination is not supported, says the library"),
    ("", r"has no attribute|got an unexpected keyword", "what builds it is of another version of its library"),
    ("not built", r"", "abstract, or needs arguments or inputs that its catalog does not have"),
    ("", r"", "fails in its own code"),
)
"""Why networks are not checked: by status and what the reason contains, the first that fits."""


def name_of(package: str) -> str:
    return PACKAGES.get(package, package)


def by_package(records: Records) -> dict[str, list[dict[str, Any]]]:
    packages: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records.values():
        packages[name_of(record["package"])].append(record)
    return dict(sorted(packages.items()))


def compared(records: Iterable[dict[str, Any]]) -> tuple[int, int, int]:
    """How many values, edits and gradients were compared."""
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record["compared"])
    values = sum(counts[key] for key in ("cached value", "cached part", "native value of a model"))
    edits = sum(number for key, number in counts.items() if key.startswith("edit"))
    gradients = sum(number for key, number in counts.items() if "gradient" in key or "bwd" in key)
    return values, edits, gradients


def rows(records: Records, listed: dict[str, int]) -> list[list[str]]:
    """The table by package: networks checked and without a disagreement, values and edits compared, the cost.

    What a catalog lists and no record has yet is for a later run.
    """
    table = []
    numbers = {name_of(package): number for package, number in listed.items()}
    waiting = {name: numbers.get(name, 0) - len(of_name) for name, of_name in by_package(records).items()}
    waiting = {name: max(number, 0) for name, number in waiting.items()}
    waiting["all"] = sum(waiting.values())
    for package, of_package in {**by_package(records), "all": [*records.values()]}.items():
        checked = [record for record in of_package if record["status"] in CHECKED]
        costs = [record["cost"] for record in checked if "cache" in record.get("cost", {})]
        agree = sum(record["status"] == "ok" for record in checked)
        table.append(
            [package, f"{len(checked):,}", f"{agree:,}"]
            + [f"{number:,}" for number in compared(checked)]
            + [f"{median(cost[way] for cost in costs):.2f}" if costs else "–" for way in ("hook", "cache")]
            + [f"{len(of_package) - len(checked):,}", f"{waiting[package]:,}"]
        )
    return table


HEADER = [
    "package",
    "networks",
    "agree",
    "values",
    "edits",
    "gradients",
    "one hook",
    "full cache",
    "not checked",
    "later",
]


def table(records: Records, listed: dict[str, int]) -> str:
    """The table as text."""
    lines = [HEADER, *rows(records, listed)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def markdown(header: list[str], lines: Iterable[Iterable[str]]) -> list[str]:
    """A table, with a bar in a cell written so that it ends none."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return ["| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *cells]]


def page(records: Records, listed: dict[str, int]) -> str:
    """docs/zoo.md."""
    checked = [record for record in records.values() if record["status"] in CHECKED]
    parts = [_opening(checked), *markdown(HEADER, rows(records, listed)), "", _cost(checked)]
    parts += ["", "## What disagrees", "", *_disagreements(checked)]
    parts += ["", "## What raises an error instead", "", *_refusals(checked)]
    parts += ["", "## What is slow", "", *_slow(checked)]
    parts += ["", "## What could not be checked in these networks", "", *_left_out(checked)]
    parts += ["", "## What is not checked", "", *_not_checked(records)]
    return "\n".join(parts) + "\n"


def _opening(checked: list[dict[str, Any]]) -> str:
    values, edits, gradients = compared(checked)
    return f"""\
# The zoo

What hookline reads, edits and differentiates in networks of other libraries is compared with torch hooks placed by
hand, which share no code with it. So far these are {len(checked):,} networks: one configuration for each class or entry
point, with at most 30 M parameters, on a CPU. Modules of `torch.nn` stand between two others. Each gets at
most 40 seconds of a processor. `make zoo` runs the comparison, which takes hours, and writes this page.

For each network:

- The wrapper without hooks gives the same bits as the network.
- A cache has what entered and left every module, at every call, bit by bit, and every other tensor among its
  arguments and results ({values:,} values).
- Edits at random inputs and outputs of modules without children, returned and in place, with and without gradients,
  give the same output, and leave the same in inputs, parameters, buffers and the random numbers ({edits:,} edits).
- Gradients at every module, and backward hooks at random ones that read or edit, are those of tensor hooks
  ({gradients:,} gradients). They agree within rounding, because torch may add them in another order; a hook that
  reads changes no bit of the parameters' gradients, where none by hand does.
- Training mode gives the same, with the same seed: outputs, statistics, the random numbers.
- Copies and pickles of the wrapper compute the same. Nothing of ours is left on any module, and nothing else is
  changed.
"""


def _cost(checked: list[dict[str, Any]]) -> str:
    timed = sum("cache" in record.get("cost", {}) for record in checked)
    return f"""\
“One hook” and “full cache” are medians of the time of a run with one hook that reads, and with a cache of every
module, relative to the bare forward pass, where that takes more than 5 ms ({timed:,} of them). “Not checked” are those
[below](#what-is-not-checked); “later” are those that a catalog lists and no run has reached yet."""


def _disagreements(checked: list[dict[str, Any]]) -> list[str]:
    lines = []
    for record in checked:
        if not record["problems"]:
            continue
        reasons = {known.reason(record["package"], record["name"], problem) for problem in record["problems"]}
        kinds = Counter(problem["check"] for problem in record["problems"])
        what = ", ".join(f"{kind} ({number})" for kind, number in kinds.items())
        why = "; ".join(sorted(reason or "not explained" for reason in reasons))
        lines.append(f"- {name_of(record['package'])} `{record['name']}`: {what}: {why}")
    return lines or ["Nothing."]


def _grouped(reasons: dict[str, list[str]], header: str, most: int = 30) -> list[str]:
    """A table of reasons, those of the most networks first, with some of these."""
    ordered = sorted(reasons.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    lines = [
        [reason, str(len(names)), ", ".join(f"`{name}`" for name in names[:3]) + (", …" if len(names) > 3 else "")]
        for reason, names in ordered[:most]
    ]
    rest = sum(len(names) for _, names in ordered[most:])
    if rest:
        lines.append([f"{len(ordered) - most} other reasons", str(rest), ""])
    return markdown([header, "networks", "for example"], lines) if lines else ["Nothing."]


def _general(message: str) -> str:
    """A message without what is of one network only: names in quotes, numbers."""
    message = re.sub(r"hook \w+ \(\w+\.py:\d+\)", "the hook", message.splitlines()[0] if message else "")
    message = re.sub(r"'[^']*'|\"[^\"]*\"", "…", message)
    return re.sub(r"\d[\d,. ]*", "# ", message).replace("# )", "#)").strip()[:200]


def _refusals(checked: list[dict[str, Any]]) -> list[str]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for record in checked:
        for message in dict.fromkeys(map(_general, record["refused"].values())):
            reasons[message].append(record["name"])
    return _grouped(reasons, "message")


def _slow(checked: list[dict[str, Any]]) -> list[str]:
    slow = [record for record in checked if max(record["cost"].get(way, 0) for way in ("hook", "cache")) > SLOW]
    lines = [
        [
            f"{name_of(record['package'])} `{record['name']}`",
            f"{record['cost']['ms']:.0f} ms",
            f"{record['cost']['hook']:.2f}",
            f"{record['cost']['cache']:.2f}",
            f"{record['compared'].get('cached value', 0):,}",
        ]
        for record in slow
    ]
    header = ["network", "bare", "one hook", "full cache", "values in a full cache"]
    most = max((record["cost"].get("cache", 0.0) for record in checked), default=0.0)
    fine = (
        f"Nothing costs more than {SLOW:.0f} times the bare forward pass; the most is a full cache at {most:.1f} times."
    )
    return markdown(header, lines) if lines else [fine]


LEFT_OUT = (
    ("gradients", r"no attribute 'backward'", "no output that depends on a parameter or an input by a gradient"),
    ("gradients", r"time is up", "gradients: more seconds of the processor than a network gets"),
    (
        "gradients",
        r"tensors being one",
        "gradients by hand: the clones that they need change the output at every point",
    ),
    ("gradients", r"", "the network's own backward pass fails or does not repeat"),
    ("training", r"time is up", "training mode: more seconds of the processor than a network gets"),
    ("training", r"", "the network's own training mode fails or does not repeat with this input"),
    ("pickle", r"", "the network itself cannot be pickled"),
    ("deepcopy", r"", "the network itself cannot be copied"),
    ("edits", r"", "some edits: more seconds of the processor than a network gets"),
    ("cost", r"nothing to work on", "cost: no tensor in the output"),
    ("cache", r"", "everything but the first check: it fails with any torch hooks on it"),
)


def _left_out(checked: list[dict[str, Any]]) -> list[str]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for record in checked:
        for what, why in record["left_out"].items():
            fits: Callable[[tuple[str, str, str]], bool] = lambda row: row[0] == what and bool(re.search(row[1], why))  # noqa: B023, E731
            reasons[next((text for *row, text in LEFT_OUT if fits((*row, text))), what)].append(record["name"])
    return _grouped(reasons, "why")


def _not_checked(records: Records) -> list[str]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for record in records.values():
        if record["status"] not in CHECKED:
            why = record.get("reason") or record.get("left_out", {}).get("everything", "")
            if "everything" in record.get("left_out", {}):
                why = f"does not repeat: {why}"
            reasons[_why(record["status"], why)].append(f"{name_of(record['package'])}: {record['name']}")
    return _grouped(reasons, "why")


def _why(status: str, reason: str) -> str:
    return next(text for of, pattern, text in REASONS if of in ("", status) and re.search(pattern, reason))


def unexplained(records: Records) -> list[str]:
    """The networks with a disagreement that `known.py` does not explain."""
    return [
        f"{record['package']} {record['name']}"
        for record in records.values()
        if any(known.reason(record["package"], record["name"], p) is None for p in record.get("problems", []))
    ]
