"""What a release needs: the change log, deprecations, files for users and for tools, and versions that agree."""

import ast
import importlib.util
import re
import tomllib
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest
from test_docs import PAGES
from test_layers import MODULES

import hookline
from hookline.errors import HooklineDeprecationWarning, removal_of, warn_deprecated

ROOT = Path(__file__).parent.parent


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_deprecation_names_the_replacement_and_the_version() -> None:
    with pytest.warns(HooklineDeprecationWarning, match=r"old\(\).* 0\.2 .* 0\.4: use new\(\)"):
        warn_deprecated("old()", "new()", since="0.2")
    assert issubclass(HooklineDeprecationWarning, DeprecationWarning)
    assert removal_of("0.9") == "0.11"


def deprecations() -> list[tuple[str, str]]:
    """Where something is deprecated, and since which version."""
    found = []
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "warn_deprecated":
                since = next(each.value for each in node.keywords if each.arg == "since")
                assert isinstance(since, ast.Constant), f"{name}:{node.lineno}"
                found.append((f"{name}:{node.lineno}", since.value))
    return found


def test_what_is_deprecated_is_removed_in_time() -> None:
    now = tuple(map(int, hookline.__version__.split(".")[:2]))
    late = [(place, since) for place, since in deprecations() if now >= tuple(map(int, removal_of(since).split(".")))]
    assert not late, "remove these"
    assert deprecations(), "none is left: this test finds nothing"


def test_serve_is_deprecated(monkeypatch) -> None:
    from hookline import explore

    class Nothing:
        def wait(self) -> None:
            pass

    monkeypatch.setattr(explore, "explore", lambda *args, **options: Nothing())
    with pytest.warns(HooklineDeprecationWarning, match=r"\.wait\(\)") as caught:
        explore.serve(None, "")
    assert caught[0].filename == __file__


def test_the_change_log_is_joined_from_files(tmp_path) -> None:
    changelog = tool("changelog")
    for name, text in (("14-plots.md", "- One."), ("9-plots.md", "- Two.\n"), ("15-small-models.md", "- Three.\n")):
        (tmp_path / name).write_text(text)
    assert changelog.joined(tmp_path) == "**Plots**\n\n- Two.\n- One.\n\n**Small models**\n\n- Three.\n"
    before = f"# Changes\n\n## Unreleased\n{changelog.NOTE}\n- Zero.\n\n## 0.1.0 (2026-01-01)\n\n- First.\n"
    after = changelog.released(before, tmp_path, "0.2.0", date(2026, 12, 24))
    assert after.split("## ")[1:] == [
        f"Unreleased\n{changelog.NOTE}\n\n",
        "0.2.0 (2026-12-24)\n\n- Zero.\n\n**Plots**\n\n- Two.\n- One.\n\n**Small models**\n\n- Three.\n\n",
        "0.1.0 (2026-01-01)\n\n- First.\n",
    ]
    again = changelog.released(after, tmp_path / "none", "0.3.0", date(2027, 1, 1))
    assert again.count("Zero") == 1
    (tmp_path / "plots.md").write_text("- x")
    with pytest.raises(ValueError, match="issue"):
        changelog.joined(tmp_path)


def test_the_files_of_changes_can_be_joined() -> None:
    changelog = tool("changelog")
    assert changelog.joined(ROOT / "changelog.d")
    assert changelog.NOTE in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_matrix_tries_what_is_promised() -> None:
    matrix = tool("matrix")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in project["classifiers"]]
    assert {each[1] for each in promised if each} == {*matrix.PYTHONS}
    assert project["requires-python"] == f">={matrix.PYTHONS[0]}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    for package, title in (("torch", "PyTorch"), ("transformers", "transformers")):
        oldest, newest = matrix.versions_of(package, "3.11", None)
        assert f"{title} ≥ {oldest.removesuffix('.0')}" in readme
        assert {oldest, newest, matrix.oldest(package, "3.14")} <= {*re.findall(r"\d+\.\d+\.\d+", workflow)}
        assert tuple(map(int, oldest.split("."))) < tuple(map(int, newest.split(".")))
    for path in (*matrix.ALL, *matrix.FEW):
        assert (ROOT / path).exists(), path
    found = matrix.combinations(list(matrix.PYTHONS), dict.fromkeys(matrix.NEWEST))
    assert len(found) == 4 * len(matrix.PYTHONS) + len(matrix.BETWEEN)
    corners = [each for each in found if each.is_corner]
    assert len(corners) == len(matrix.PYTHONS) + 2 + len(matrix.BETWEEN)
    assert ("3.14", "2.9.0", matrix.oldest("transformers", "3.14")) in corners


def test_llms_txt_lists_every_page() -> None:
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    assert text == tool("llms").listed(), "run tools/llms.py"
    linked = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", text, re.MULTILINE)
    assert sorted(linked) == sorted(PAGES)


def test_the_citation_has_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(rf"^version: {re.escape(hookline.__version__)}$", text, re.MULTILINE)
    for field in ("cff-version", "title", "message", "authors", "license"):
        assert re.search(rf"^{field}:", text, re.MULTILINE), field


def test_forms_and_workflows_are_valid_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    paths = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]
    assert len(paths) >= 6
    for path in paths:
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= {*form}
        names = [each["id"] for each in form["body"] if "id" in each]
        assert len(names) == len({*names})
