"""The page about what the zoo found."""

import re
from pathlib import Path

import pytest
from zoo import known, report

ROOT = Path(__file__).parents[2]


def record(name, status="ok", **more):
    checked = {"compared": {"cached value": 3}, "problems": [], "refused": {}, "left_out": {}, "cost": {"ms": 1.0}}
    return {"package": "timm", "name": name, "status": status} | (checked if status != "not built" else {}) | more


def records(*all_of_them):
    return {(each["package"], each["name"]): each for each in all_of_them}


def test_what_disagrees_is_listed_until_it_is_explained(monkeypatch) -> None:
    wrong = record("wrong", "failed", problems=[{"check": "gradient", "point": "a", "what": "gradient", "by": 0.5}])
    both = records(record("right"), wrong)
    assert "timm `wrong`: gradient (1): not explained" in report.page(both, {})
    assert report.unexplained(both) == ["timm wrong"]
    why = known.Known("timm", "wr*", "grad*", "it draws random numbers", "https://example.org")
    monkeypatch.setattr(known, "KNOWN", (why,))
    assert "it draws random numbers" in report.page(both, {})
    assert report.unexplained(both) == []


def test_only_what_was_checked_is_counted() -> None:
    page = report.page(
        records(record("a"), record("b"), record("c", "not built", reason="No module named 'd'")), {"timm": 7}
    )
    assert re.findall(r"(\d+) networks:", page) == ["2"]
    assert "| timm | 2 | 2 | 6 | 0 | 0 | – | – | 1 | 4 |" in page
    assert "| needs a package that is not installed | 1 | `timm: c` |" in page


@pytest.mark.parametrize(
    ("message", "same"),
    [
        (
            "HookError: hook f (a.py:3) at point 'x.0' has 3 values",
            "HookError: hook g (b.py:77) at point 'y' has 41 values",
        ),
        ("there is no gradient at 'a'", "there is no gradient at 'b.c'"),
    ],
)
def test_messages_of_the_same_kind_are_one_row(message, same) -> None:
    page = report.page(records(record("a", refused={"1": message}), record("b", refused={"2": same})), {})
    assert re.search(r"\| 2 \| `a`, `b` \|", page)


def test_slow_networks_are_listed() -> None:
    page = report.page(records(record("a", cost={"ms": 9.0, "hook": 1.1, "cache": 3.5}), record("b")), {})
    assert "| timm `a` | 9 ms | 1.10 | 3.50 | 3 |" in page


def test_the_readme_has_the_number_of_the_page() -> None:
    page = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    number = re.findall(r"([\d,]+) networks", page)[0]
    assert re.findall(r"([\d,]+) networks", (ROOT / "README.md").read_text(encoding="utf-8")) == [number]
