"""The docs site: its pages, what it loads, and what its generated parts show."""

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import messages
import pytest

import hookline
from hookline import errors

ROOT = Path(__file__).parent.parent


def script(name: str) -> ModuleType:
    """A script of tools/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def headings(page: str) -> set[str]:
    return set(re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_public_error_and_warning_is_explained() -> None:
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    assert set(errors.__all__) <= headings("docs/errors.md")
    for name in errors.__all__:
        assert f"[{name}](#{name.lower()})" in page, "missing in the table"
    for path in messages.PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any("HooklineError" in ast.unparse(base) for base in node.bases):
                assert node.name.startswith("_") or node.name in page, node.name


def fixed_parts(text: str) -> list[str]:
    """What is written in a message between its values."""
    return [part.strip(" :") for part in re.split(r"\{[^}]*\}|…", text) if len(part.strip(" :")) > 6]


def warning_texts() -> list[list[str]]:
    """The fixed parts of every warning."""
    calls = [
        node
        for path in messages.PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("warn", "_warn") and node.args
    ]
    return [parts for call in calls if (parts := fixed_parts(messages._text(call.args[0]) or ""))]


def test_every_warning_is_in_the_table() -> None:
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    shown = [part for row in re.findall(r"^\| (.+?) \|", page, re.MULTILINE) for part in fixed_parts(row)]
    assert len(warning_texts()) > 20
    for parts in warning_texts():
        assert any(part.startswith(each) or each.startswith(part) for part in parts for each in shown), parts


def test_the_api_reference_has_every_public_name(monkeypatch) -> None:
    pytest.importorskip("mkdocs", reason="installed by `make site` and `make test-all`")
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    pages = script("site_pages")
    front = {name.rpartition(".")[2] for _, names in pages.FRONT.values() for name in names}
    elsewhere = {*pages.MODULES, "experiments", "harvest", *dir(errors), *dir(hookline.positions)}
    assert set(hookline.__all__) <= front | elsewhere
    listed = dict(pages.api_pages())
    for name in hookline.experiments.__all__:
        module = getattr(hookline.experiments, name)
        for public in module.__all__:
            shown = listed[f"api/experiments/{name}.md"]
            assert f"heading: {public}}}" in shown or f"\n## {public}\n" in shown, public


def test_no_source_code_is_shown_for_values_and_defaults(monkeypatch) -> None:
    pytest.importorskip("mkdocs", reason="installed by `make site` and `make test-all`")
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    pages = script("site_pages")
    assert (
        pages.without_values("{len(x)} of {', '.join({*names})}: {one {x} | two: if_so}{None | x: y}")
        == "… of …: one … / twox"
    )
    assert "DataEdit(*, pos=None, head=None, neuron=None, mask=None)" in pages.module_page("hookline.edits")
    assert "join(" not in pages.message_page()


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_the_point_map_shows_the_points_of_the_models(kind: str) -> None:
    make = script("make_point_map")
    text = make.DATA.read_text(encoding="utf-8").partition("const POINT_MAP = ")[2].rstrip(";\n")
    data = json.loads(text)
    assert data["rows"] == make.rows(), "run tools/make_point_map.py"
    shown = next(each for each in data["architectures"] if each["kind"] == kind)
    _, build, _ = make.GROUPS[shown["group"]]
    for stack, found in make.stacks(hookline.hook(build(kind))).items():
        part = data["parts"][shown["stacks"][stack]]
        places = {name: data["texts"][number] for name, number in part["points"].items()}
        assert places == found["points"], "run tools/make_point_map.py"


def test_what_is_wrong_with_a_built_page_is_noticed(tmp_path) -> None:
    check = script("check_site")
    (tmp_path / "search").mkdir()
    entries = [{"title": "KV cache", "text": "hook_z UnknownPointError"}]
    (tmp_path / "search/search_index.json").write_text(json.dumps({"docs": entries}))
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#there">b</a><img src="x.png"><a href="https://x.org">x</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="there">B</h1><a href="a.html#top">a</a>')
    (tmp_path / "x.png").write_bytes(b"")
    assert list(check.problems(tmp_path)) == []
    (tmp_path / "b.html").write_text(
        '<a href="a.html#gone">a</a><a href="c.html">c</a><script src="https://cdn.org/x.js"></script>'
        '<style>@import url("//fonts.org/f.css")</style>'
    )
    (tmp_path / "x.css").write_text("b { background: url(http://y.org/z.png) }")
    (tmp_path / "search/search_index.json").write_text(json.dumps({"docs": []}))
    found = list(check.problems(tmp_path))
    for part in ("b.html#there", "a.html#gone", "c.html", "cdn.org", "fonts.org", "y.org", "hook_z"):
        assert any(part in each for each in found), part


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path) -> None:
    pytest.importorskip("mkdocs", reason="installed by `make site` and `make test-all`")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    ran = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert list(script("check_site").problems(tmp_path / "site")) == []
    notebooks = tmp_path / "site/notebooks"
    for name in script("site_pages").ORDER:
        assert (notebooks / f"{name}.ipynb").read_text(encoding="utf-8") == script("notebook_sources").for_jupyter(name)
        assert f'href="{name}.ipynb"' in (notebooks / f"{name}.html").read_text(encoding="utf-8")
