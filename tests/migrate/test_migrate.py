"""Imports in scripts and notebooks: only they change, in every form; what cannot be migrated stays as it is."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hookline.cli import app
from hookline.migrate import FileReport, migrate
from hookline.migrate.differences import absence, parse_pattern

ROOT = Path(__file__).parents[2]
COMPAT = "hookline.compat.transformer_lens"


def only(path: Path, **options: bool) -> FileReport:
    (report,) = migrate([path], **options)
    return report


def changed(path: Path, code: str | bytes) -> str:
    """What a script becomes; a second migration must change nothing."""
    path.write_bytes(code if isinstance(code, bytes) else code.encode())
    report = only(path, write=True)
    assert report.error is None
    new = path.read_bytes()
    assert not only(path, write=True).changes
    assert path.read_bytes() == new
    return new.decode(errors="surrogateescape")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from transformer_lens import HookedTransformer", f"from {COMPAT} import HookedTransformer"),
        ("from transformer_lens.utils import (\n  a,  # x\n  b)", f"from {COMPAT}.utils import (\n  a,  # x\n  b)"),
        ("import transformer_lens", f"import {COMPAT} as transformer_lens"),
        ("import transformer_lens as tl", f"import {COMPAT} as tl"),
        ("import os, transformer_lens.utils as u", f"import os, {COMPAT}.utils as u"),
        ("import transformer_lens.utils", f"import {COMPAT}.utils, {COMPAT} as transformer_lens"),
        ("x = 'é'; import transformer_lens as tl; y", f"x = 'é'; import {COMPAT} as tl; y"),
        ("def f():\n\tfrom \\\n  transformer_lens import utils", f"def f():\n\tfrom \\\n  {COMPAT} import utils"),
        ("from mi_crow.hooks import Hook", "from hookline.compat.mi_crow.hooks import Hook"),
        ("from .transformer_lens import x", "from .transformer_lens import x"),
        ("import transformer_lens_extras", "import transformer_lens_extras"),
        ("# import transformer_lens\ns = 'import mi_crow'", "# import transformer_lens\ns = 'import mi_crow'"),
    ],
)
def test_an_import(tmp_path, old, new) -> None:
    assert changed(tmp_path / "a.py", old) == new


def test_bytes_around_an_import_stay(tmp_path) -> None:
    latin = b"# coding: latin-1\r\nx = '\xe9\x0c'\rimport transformer_lens as t # \xe9\n\n"
    expected = latin.replace(b"import ", b"import hookline.compat.")
    assert changed(tmp_path / "a.py", latin).encode(errors="surrogateescape") == expected
    marked = b"\xef\xbb\xbfimport transformer_lens as t"
    assert changed(tmp_path / "b.py", marked).encode() == marked.replace(b"import ", b"import hookline.compat.")


def notebook(*sources: object, **more: object) -> str:
    cells = [{"cell_type": "code", "metadata": {"x": [1.50]}, "outputs": [], "source": each} for each in sources]
    return json.dumps({"metadata": more, "cells": cells, "nbformat": 4, "nbformat_minor": 5})


def test_a_notebook_keeps_everything_else(tmp_path) -> None:
    raw = """{ "cells": [
      {"source": ["# transformer_lens"], "cell_type": "markdown"},
      {"cell_type": "code", "metadata": {"id": 1.50}, "outputs": [{"text": ["import transformer_lens"]}],
       "source": ["%matplotlib inline\\n", "!pip install transformer_lens \\\\\\n", "   torch\\n", "files = !ls\\n",
                  "x = '\\u00e9'\\n", "import transformer_lens.utils as \\u00fctils\\n", "utils?"]},
      {"cell_type":"code","source":"%%time\\nimport transformer_lens","metadata":{}},
      {"cell_type":"code","source":"%%bash\\nimport transformer_lens"},
      {"cell_type":"code","source":"def unfinished(:"}],
  "nbformat": 4}\t\n"""
    path = tmp_path / "a.ipynb"
    expected = raw.replace("import transformer_lens.utils as", f"import {COMPAT}.utils as").replace(
        "time\\nimport transformer_lens", f"time\\nimport {COMPAT} as transformer_lens"
    )
    expected = expected.replace("pip install transformer_lens", "pip install hookline")
    assert changed(path, raw) == expected
    path.write_text(raw)
    report = only(path)
    assert path.read_text() == raw
    assert [(change.place.cell, change.place.line) for change in report.changes] == [(2, 2), (2, 6), (3, 2)]
    left = [each for each in report.differences if "not changed" in each.text]
    assert [each.places for each in left] == [((4, 2),)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%pip install transformer_lens", "%pip install hookline"),
        (
            "if IN_COLAB:\n    %pip install -q transformer-lens==2.15 torch",
            "if IN_COLAB:\n    %pip install -q hookline torch",
        ),
        ("!pip install git+https://github.com/TransformerLensOrg/TransformerLens.git@dev", "!pip install hookline"),
        ("!pip3 install git+https://github.com/x/TransformerLens # old", "!pip3 install hookline # old"),
        ("! python -m pip install -U 'transformer_lens[dev]>=2,<3'", "! python -m pip install -U hookline"),
        ("%pip install torch \\\n  mi-crow \\\n  numpy", "%pip install torch \\\n  hookline \\\n  numpy"),
        ("%pip install neel-plotly # for transformer_lens", None),
        ("%pip install git+https://github.com/TransformerLensOrg/neel-plotly.git transformer_lens_extras", None),
        ("!echo transformer_lens", None),
        ("# %pip install transformer_lens", None),
    ],
)
def test_what_a_notebook_installs(tmp_path, old, new) -> None:
    found = changed(tmp_path / "a.ipynb", notebook(old.splitlines(keepends=True)))
    assert "".join(json.loads(found)["cells"][0]["source"]) == (new or old)


def test_a_line_may_be_split_in_the_file(tmp_path) -> None:
    new = changed(tmp_path / "a.ipynb", notebook(["im", "port transformer", "_lens"]))
    assert "".join(json.loads(new)["cells"][0]["source"]) == f"import {COMPAT} as transformer_lens"


def test_differences_have_their_lines(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "import importlib\n"
        "import transformer_lens as tl\n"
        "from transformer_lens import HookedTransformer\n"
        "from transformer_lens.no_such import thing\n"
        "model = HookedTransformer.from_pretrained('gpt2')\n"
        "tl.utils.get_dataset('x')\n"
        "logits, cache = model.run_with_cache('a', reset_hooks_end=False)\n"
        "cache = model.run_with_cache('a', reset_hooks_end=True)\n"
        "importlib.import_module('transformer_lens.utils')\n"
        "cache['blocks.0.ln1.hook_scale']\n"
        "model.sample_datapoint()\n"
        "tl.utils.get_act_name('q', 1)\n"
    )
    found = {each.subject: [place.line for place in each.places] for each in only(path).differences}
    assert found == {
        "transformer_lens.no_such": [4],
        "tl.utils.get_dataset": [6],
        "`run_with_cache(reset_hooks_end=False)`": [7],
        "a string with a module's name": [9],
        "`ln1`": [10],
        "`sample_datapoint`": [11],
    }
    only(path, write=True)
    assert {each.subject: [p.line for p in each.places] for each in only(path).differences} == found


def test_a_program_without_the_library_has_no_differences(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_text("model.generate(hf_model=1)\nmodel.cfg.n_ctx\n")
    assert only(path) == FileReport(path)


def test_names_are_looked_up_in_the_package_itself() -> None:
    assert absence("transformer_lens", ("utils", "get_act_name", "anything")) is None
    assert absence("transformer_lens.HookedTransformer", ("HookedTransformer", "from_pretrained")) is None
    assert "load_dataset" in (absence("transformer_lens.utils", ("get_dataset",)) or "")
    assert absence("transformer_lens", ("HookedTransformer", "no_such")) is not None


def test_the_table_is_that_of_the_page() -> None:
    spec = importlib.util.spec_from_file_location("make_differences", ROOT / "tools/make_differences.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for library, page in script.PAGES.items():
        assert script.target(library).read_text(encoding="utf-8") == script.table(page), "run tools/make_differences.py"


@pytest.mark.parametrize("code", ["a or b", "1", "f(x=y)"])
def test_code_in_the_table_that_is_not_a_pattern(code) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_pattern(code)


HOSTILE = {
    "syntax.py": b"import transformer_lens\ndef f(:\n",
    "binary.py": bytes(range(256)),
    "zeros.py": b"import transformer_lens\0",
    "encoding.py": b"# coding: no-such\nimport transformer_lens",
    "nested.py": b"import transformer_lens\nx = " + b"(" * 5000 + b")" * 5000,
    "cell.ipynb": notebook("import transformer_lens\ndef f(:").encode(),
    "not_json.ipynb": b"{'cells': transformer_lens}",
    "nested.ipynb": b'{"cells": ' + b"[" * 100_000,
    "no_cells.ipynb": b"[1, 2]",
    "worksheets.ipynb": b'{"worksheets": [], "nbformat": 3}',
    "numbers.ipynb": notebook([1, 2]).encode(),
    "text.txt": b"import transformer_lens",
    "latin.ipynb": notebook("import transformer_lens").encode() + b"\xe9",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_cannot_be_migrated_is_left_as_it_is(tmp_path, name) -> None:
    path = tmp_path / name
    path.write_bytes(HOSTILE[name])
    assert only(path, write=True).error
    assert path.read_bytes() == HOSTILE[name]
    assert [*tmp_path.iterdir()] == [path]


def test_a_surrogate_in_a_cell_without_the_library_does_no_harm(tmp_path) -> None:
    raw = notebook("x = '\ud800'", "import transformer_lens as tl")
    assert changed(tmp_path / "a.ipynb", raw) == raw.replace("transformer_lens", COMPAT)


def test_folders_and_links(tmp_path) -> None:
    code = "import transformer_lens as tl\n"
    (tmp_path / "in/.git").mkdir(parents=True)
    (tmp_path / "in/env").mkdir()
    (tmp_path / "in/env/pyvenv.cfg").touch()
    for name in ("in/a.py", "in/.git/b.py", "in/env/c.py", "outside.py"):
        (tmp_path / name).write_text(code)
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/self.py").symlink_to(tmp_path / "in/self.py")
    (tmp_path / "in/link.py").symlink_to(tmp_path / "outside.py")
    reports = [*migrate([tmp_path / "in", tmp_path / "in/a.py", tmp_path / "in/loop/a.py"], write=True)]
    assert [report.path for report in reports] == [tmp_path / "in/a.py"]
    assert (tmp_path / "outside.py").read_text() == code

    linked = only(tmp_path / "in/link.py", write=True)  # named by the user, so followed
    assert linked.is_written
    assert (tmp_path / "in/link.py").is_symlink()
    assert COMPAT in (tmp_path / "outside.py").read_text()
    assert only(tmp_path / "in/self.py").error
    assert only(tmp_path / "no_such.py").error
    os.mkfifo(tmp_path / "pipe.py")
    assert only(tmp_path / "pipe.py").error


def test_permissions(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import transformer_lens as tl\n")
    path.chmod(0o444)
    report = only(path, write=True)
    assert report.error
    assert report.changes
    assert not report.is_written
    assert path.read_text() == "import transformer_lens as tl\n"
    path.chmod(0o755)
    assert only(path, write=True).is_written
    assert path.stat().st_mode & 0o777 == 0o755
    assert [*tmp_path.iterdir()] == [path]


def test_the_command(tmp_path) -> None:
    good, bad = tmp_path / "a.py", tmp_path / "b.py"
    good.write_text("from transformer_lens import HookedEncoderX\n")
    run = CliRunner().invoke(app, ["migrate", str(good)])
    assert run.exit_code == 0
    assert f"+ from {COMPAT}" in run.output
    assert "1 of 1 files to change" in run.output
    bad.write_text("import transformer_lens(")
    run = CliRunner().invoke(app, ["migrate", str(tmp_path), "--write", "--json"])
    assert run.exit_code == 1
    first, second = json.loads(run.stdout)["files"]
    assert first["is_written"]
    assert first["changes"][0]["place"] == {"cell": None, "line": 1}
    assert first["differences"][0]["places"] == [{"cell": None, "line": 1}]
    assert second["error"]


@pytest.mark.parametrize("name", ["absent.py", "absent"])
def test_a_path_that_does_not_exist(tmp_path, name: str) -> None:
    assert only(tmp_path / name).error == "there is no such file or folder"


def test_a_migrated_script_runs(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "import transformer_lens\n"
        "import transformer_lens.utils\n"
        "model = transformer_lens.HookedTransformer.from_pretrained('tinyworld', device='cpu')\n"
        "_, cache = model.run_with_cache('Mary', names_filter=transformer_lens.utils.get_act_name('resid_post', 0))\n"
        "print([*cache])\n"
    )
    assert only(path, write=True).is_written
    printed = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['blocks.0.hook_resid_post']"
