"""The front page says how to try hookline, and nothing links to an address that does not exist."""

import re
from pathlib import Path

import pytest
from test_release import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
FIRST_SCREEN = 40
FOLDERS = (
    *(".github", "docs", "examples", "notebooks", "packages", "src", "tools", "training"),
    *("benchmarks", "changelog.d", "peers"),
)
KINDS = (".cff", ".cfg", ".html", ".json", ".md", ".py", ".svg", ".toml", ".txt", ".yml")
NO_ADDRESS = re.compile(
    r"\bOWNER/|colab\.research\.google\.com|(github\.com|githubusercontent\.com|gitlab\.com)/[^/\s\"')]+/hookline\b"
    r"|hookline\.(readthedocs|github)\.io|pypi\.org/project/hookline\b"
)


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_the_two_commands_are_in_the_first_screen(command) -> None:
    (line,) = (line for line in README[:FIRST_SCREEN] if line.startswith(command))
    assert re.search(r"#.*(second|minute)", line), "what it does, and how long it takes"
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{command.removeprefix('make ')}:", targets, re.MULTILINE)
    assert any(line.startswith("pip install") for line in README[:FIRST_SCREEN]), "beside the install lines"


def test_the_front_page_is_short_and_says_what_works_today() -> None:
    assert len(README) <= 120
    assert "index" not in " ".join(README[:FIRST_SCREEN]), "hookline is on no package index"


def written() -> list[Path]:
    """The files of the repository that people read."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in [*ROOT.glob("*.*"), *paths] if path.suffix in KINDS and "__pycache__" not in path.parts]


def test_no_link_has_a_placeholder_or_an_address_that_does_not_exist() -> None:
    paths = written()
    assert len(paths) > 500
    found = {path.name: NO_ADDRESS.findall(path.read_text(encoding="utf-8")) for path in paths}
    assert {name: links for name, links in found.items() if links} == {}
    for link in ("https://github.com/OWNER/hookline/blob/main", "https://github.com/someone/hookline"):
        assert NO_ADDRESS.search(link)


def test_what_make_test_leaves_out_is_run_by_make_test_compat() -> None:
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    (folders,) = re.findall(r"^COMPAT := (.*)$", targets, re.MULTILINE)
    assert all((ROOT / folder).is_dir() for folder in folders.split())
    assert re.search(r"^quick-tests:.*\n\t.*--ignore=%\)$", targets, re.MULTILINE)
    assert re.search(r"^test-compat:.*\n\t\$\(PYTEST\).* \$\(COMPAT\)$", targets, re.MULTILINE)
    assert re.search(r"^test-all:.*\n\t\$\(PYTEST\)$", targets, re.MULTILINE), "all tests, those of COMPAT too"
    for path in (".ci/run", ".github/workflows/ci.yml"):
        commands = re.findall(
            r"^(?:\s*- run: )?(make test\S*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE
        )
        assert commands[:2] == ["make test", "make test-compat"], path
