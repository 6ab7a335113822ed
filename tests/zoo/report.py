"""The table and the page about what the zoo found."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median
from typing import Any

from zoo import known

Records = dict[tuple[str, str], dict[str, Any]]

CHECKED = ("ok", "failed")


def by_package(records: Records) -> dict[str, list[dict[str, Any]]]:
    packages: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records.values():
        packages[record["package"]].append(record)
    return dict(sorted(packages.items()))


def rows(records: Records) -> list[list[str]]:
    """The table by package: networks checked and without a disagreement, values and edits compared, the cost."""
    table = []
    for package, of_package in {**by_package(records), "all": [*records.values()]}.items():
        checked = [record for record in of_package if record["status"] in CHECKED]
        compared: Counter[str] = Counter()
        for record in checked:
            compared.update(record["compared"])
        values = sum(compared[key] for key in ("cached value", "cached part"))
        edits = sum(number for key, number in compared.items() if key.startswith("edit"))
        gradients = sum(number for key, number in compared.items() if "gradient" in key or "bwd" in key)
        costs = [record["cost"] for record in checked if "cache" in record.get("cost", {})]
        statuses = Counter(record["status"] for record in of_package)
        table.append(
            [package, f"{len(checked):,}", f"{statuses['ok']:,}", f"{values:,}", f"{edits:,}", f"{gradients:,}"]
            + [f"{median(cost[way] for cost in costs):.2f}" if costs else "–" for way in ("hook", "cache")]
            + [f"{len(of_package) - len(checked):,}"]
        )
    return table


HEADER = ["package", "networks", "agree", "values", "edits", "gradients", "one hook", "full cache", "not checked"]


def table(records: Records) -> str:
    """The table as text."""
    lines = [HEADER, *rows(records)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def page(records: Records) -> str:
    """docs/zoo.md."""
    checked = [record for record in records.values() if record["status"] in CHECKED]
    lines = [
        "# The zoo",
        "",
        f"{len(checked):,} networks that nobody here wrote are compared with torch hooks placed by hand, which share",
        "no code with hookline: outputs without hooks, every cached value of every call, edits at random leaf inputs",
        "and outputs (returned and in place), gradients and backward edits, training mode, copies, and what is left on",
        "the modules and on inputs, parameters and buffers. `make zoo` runs it and writes this page.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---" * len(HEADER) + "|",
        *("| " + " | ".join(row) + " |" for row in rows(records)),
        "",
        "“One hook” and “full cache” are medians, relative to the bare forward pass, of networks that take over 5 ms.",
        "",
        "## What disagrees",
        "",
    ]
    failed = [record for record in checked if record["status"] == "failed"]
    for record in failed:
        reasons = {known.reason(record["package"], record["name"], problem) for problem in record["problems"]}
        kinds = Counter(problem["check"] for problem in record["problems"])
        what = ", ".join(f"{kind} ({number})" for kind, number in kinds.items())
        why = "; ".join(sorted(reason or "not explained" for reason in reasons))
        lines.append(f"- {record['package']} `{record['name']}`: {what}: {why}")
    lines += ["" if failed else "Nothing.", "## What is refused", ""]
    refused: Counter[str] = Counter()
    for record in checked:
        refused.update({reason.split(": ", 2)[-1][:160] for reason in record["refused"].values()})
    lines += [f"- {reason} ({number} networks)" for reason, number in refused.most_common(40)] or ["Nothing."]
    lines += ["", "## What is slow", ""]
    slow = [record for record in checked if max(record["cost"].get("hook", 0), record["cost"].get("cache", 0)) > 3]
    lines += [f"- `{record['name']}` ({record['package']}): {record['cost']}" for record in slow] or [
        "Nothing above 3."
    ]
    lines += ["", "## What is not checked", ""]
    reasons: dict[str, list[str]] = defaultdict(list)
    for record in records.values():
        if record["status"] not in CHECKED:
            why = record.get("reason") or record.get("left_out", {}).get("everything", "")
            reasons[f"{record['package']}, {record['status']}: {why.split('(/')[0][:120]}"].append(record["name"])
    for reason, names in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        lines.append(f"- {reason} ({len(names)}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''})")
    return "\n".join(lines) + "\n"


def unexplained(records: Records) -> list[str]:
    """The networks with a disagreement that `known.py` does not explain."""
    return [
        f"{record['package']} {record['name']}"
        for record in records.values()
        if any(known.reason(record["package"], record["name"], p) is None for p in record.get("problems", []))
    ]
