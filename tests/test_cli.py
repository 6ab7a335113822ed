"""The command line: answers as text and JSON, exit statuses, and what goes wrong outside of the program."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from stores import copied
from test_docs import BLOCK, matches, read
from typer.testing import CliRunner

import hookline
from hookline.cli import app
from hookline.cli.outcome import ExitCode, one_line
from hookline.demo.chapters import PROMPT

PROGRAM = [sys.executable, "-m", "hookline"]
COMMANDS = {
    "verify": ["verify", "tinyworld"],
    "points": ["points", "tinyworld", "ln_final.*"],
    "plan": ["plan", "tinyworld"],
    "migrate": ["migrate", "script.py"],
    "explore": ["explore", "--export", "page.html"],
    "store verify": ["store", "verify", "store"],
    "store info": ["store", "info", "store"],
}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with a script and a store, in which the test runs."""
    (tmp_path / "script.py").write_text("from transformer_lens import HookedTransformer\n")
    copied(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoked(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, words, prog_name="hookline")
    return result.exit_code, result.stdout, result.stderr


def started(*words: str, **options: object) -> subprocess.Popen:
    return subprocess.Popen([*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_document(command, here, monkeypatch) -> None:
    load = sys.modules["hookline.loading"].load

    def noisy(*args: object, **options: object) -> hookline.HookedModel:
        print("a library prints this")
        return load(*args, **options)

    monkeypatch.setattr(sys.modules["hookline.loading"], "load", noisy)
    status, text, _ = invoked(*COMMANDS[command])
    assert status == 0
    status, document, said = invoked(*COMMANDS[command], "--json")
    assert status == 0, said
    values = json.loads(document)
    assert isinstance(values, dict)
    assert "error" not in values
    assert document.isascii()
    assert text.strip()
    assert not text.lstrip().startswith("{")


def test_what_the_documents_say(here) -> None:
    verified = json.loads(invoked("verify", "tinyworld", "--json")[1])
    assert verified["counts"]["failed"] == 0
    assert {each["status"] for each in verified["points"]} == {"proved", "unavailable"}
    assert sum(verified["counts"].values()) == len(verified["points"])
    listed = json.loads(invoked("points", "tinyworld", "ln_final.hook_scale", "--json")[1])
    assert listed["points"] == [{"name": "ln_final.hook_scale", "axes": "b p 1", "shape": [2, 7, 1]}]
    info = json.loads(invoked("store", "info", "store", "--json")[1])
    store = hookline.store.open_store("store")
    assert (info["rows"], info["examples"], info["is_complete"]) == (store.manifest.rows, store.manifest.examples, True)
    assert {*info["points"]} == {*store.points}
    assert info["path"] == store.path == str(here / "store")
    (here / "store" / "000000.safetensors").write_bytes(b"damaged")
    status, document, _ = invoked("store", "verify", "store", "--json")
    assert status == ExitCode.CHECK_FAILED
    assert not json.loads(document)["is_sound"]
    assert json.loads(document)["path"] == info["path"]
    assert "000000.safetensors" in json.loads(document)["problems"][0]


@pytest.mark.slow
def test_the_tour_as_json(here) -> None:
    status, document, told = invoked("demo", "--json")
    assert status == 0
    assert PROMPT.strip() in told
    assert Path(json.loads(document)["page"]).is_file()


@pytest.mark.slow
def test_the_address_of_the_explorer_as_json() -> None:
    with started("explore", "--no-browser", "--json") as process:
        text = ""
        while not text.endswith("}\n"):
            text += process.stdout.readline()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]+/", json.loads(text)["address"])
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert process.stdout.read() == ""


USAGE = [[], ["store"], ["plam"], ["points"], ["points", "tinyworld", "--no-such"], ["plan", "x", "--batch", "0"]]
USAGE += [
    ["plan", "tinyworld", "--batch", "99999999999"],
    ["explore", "--port", "70000"],
    ["plan", "x", "--length", "x"],
    ["plan", "tinyworld", "--dtype", "float99"],
    ["plan", "tinyworld", "--dtype", "int8"],
]
ERRORS = [["points", "no/such/folder"], ["points", "tinywrld"], ["points", "tinyworld", "nothing.*"]]
ERRORS += [["store", "info", "nowhere"], ["store", "verify", "nowhere"], ["store", "info", "script.py"]]
ERRORS += [["explore", "--export", "no/such/page.html"], ["demo", "--out", "script.py"], ["points", "x" * 5000]]
ERRORS += [["explore", "gpt2", "--export", "page.html"]]


@pytest.mark.parametrize("words", [*USAGE, *ERRORS], ids=lambda words: " ".join(words)[:40])
def test_errors_in_one_line_and_as_json(words, here) -> None:
    expected = ExitCode.USAGE if words in USAGE else ExitCode.ERROR
    status, out, said = invoked(*words)
    assert (status, out) == (expected, "")
    *before, last = said.splitlines()
    assert re.match("error: .{10}", last)
    assert not before or words in ([], ["store"]), "only help comes before"
    status, document, said = invoked(*words, "--json")
    error = json.loads(document)["error"]
    assert {*error} == {"type", "message", "exit_code"}
    assert status == error["exit_code"] == expected
    assert expected == ExitCode.USAGE or not said, "no traceback"


def test_a_bug_has_a_traceback_and_a_status_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["hookline.loading"], "load", lambda name: 1 / 0)
    status, out, said = invoked("points", "tinyworld")
    assert (status, out) == (ExitCode.BUG, "")
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("error: ZeroDivisionError")
    status, document, said = invoked("points", "tinyworld", "--json")
    assert json.loads(document)["error"]["type"] == "ZeroDivisionError"
    assert "Traceback" in said


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), MemoryError(), PermissionError(13, "no")])
def test_what_the_machine_lacks_is_no_bug(error, monkeypatch) -> None:
    def failing(name: str) -> None:
        raise error

    monkeypatch.setattr(sys.modules["hookline.loading"], "load", failing)
    status, _, said = invoked("points", "tinyworld")
    assert status == ExitCode.ERROR
    assert "Traceback" not in said


def test_control_characters_of_names_do_not_reach_the_terminal(here) -> None:
    for name in ("a\x1b[31mb", "a\nerror: b", "a\rb", "a\x07", "\u202eabc", "\udcff"):
        _, _, said = invoked("points", f"./{name}")
        assert said.count("\n") == 1
        assert said.rstrip("\n").isprintable(), said
    assert one_line("a\x1b[0m\n b") == r"a\x1b[0m b"


def many_scripts(folder: Path) -> None:
    for number in range(300):
        (folder / f"{number}.py").write_text("from transformer_lens import HookedTransformer, utils\n" * 20)


def test_a_reader_that_leaves_early(tmp_path) -> None:
    many_scripts(tmp_path)
    with started("migrate", str(tmp_path)) as process:
        assert process.stdout.readline().strip().endswith(".py")
        process.stdout.close()
        assert process.wait(timeout=60) == ExitCode.CLOSED_PIPE
        assert process.stderr.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_output_that_cannot_be_written(more, tmp_path) -> None:
    (tmp_path / "a.py").write_text("import numpy\n")  # what is ours would be imported, which takes seconds
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PROGRAM, "migrate", str(tmp_path), *more], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == ExitCode.ERROR
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_interrupt(more, tmp_path) -> None:
    code = "import sys, hookline.cli, hookline.migrate as m, time\n"
    code += "m.migrate = lambda *a, **k: (print('on', file=sys.stderr, flush=True), time.sleep(60))\n"
    code += "hookline.cli.app(sys.argv[1:], prog_name='hookline')"
    command = [sys.executable, "-c", code, "migrate", str(tmp_path), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "on\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == ExitCode.INTERRUPTED
        said = process.stderr.read()
        if more:
            assert json.loads(process.stdout.read())["error"]["exit_code"] == ExitCode.INTERRUPTED
        else:
            assert said == "error: interrupted\n"


@pytest.mark.quick_for("ascii")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_utf_8(encoding, tmp_path) -> None:
    (tmp_path / "a.py").write_text("from transformer_lens import HookedTransformer  # … – Ω\n", encoding="utf-8")
    given = {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    done = subprocess.run([*PROGRAM, "migrate", str(tmp_path)], capture_output=True, env=given)
    assert done.returncode == 0, done.stderr
    assert r"\u2026 " in done.stdout.decode(encoding)
    for words in (["--help"], ["explore", "--help"], ["points", "…/…/…"]):
        done = subprocess.run([*PROGRAM, *words], capture_output=True, env=given)
        assert done.returncode in (ExitCode.OK, ExitCode.ERROR)
        assert b"Traceback" not in done.stderr


def test_help_and_completion_import_neither_torch_nor_transformers() -> None:
    check = "import sys; from typer.testing import CliRunner; from hookline.cli import app; "
    check += "CliRunner().invoke(app, sys.argv[1:]); "
    check += "print([name for name in ('torch', 'transformers', 'rich') if name in sys.modules])"
    for words in (["--help"], ["--version"], ["explore", "--help"], ["store", "info", "--help"], ["plam"]):
        found = subprocess.run([sys.executable, "-c", check, *words], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "[]", words


def test_the_model_that_ships_with_the_package_needs_no_network(monkeypatch) -> None:
    def refuse(*args, **options):
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert hookline.load("tinyworld").generate("Mary", max_new_tokens=1)
    with pytest.raises(AssertionError, match="network"):
        socket.create_connection(("127.0.0.1", 9))


@pytest.mark.slow  # importing everything in a process of its own; the test above loads a model in this one
def test_nothing_at_import_touches_the_network() -> None:
    check = "import socket\ndef refuse(*a, **k): raise AssertionError('network')\n"
    check += "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
    check += "import hookline\n[getattr(hookline, name) for name in hookline.__all__]\n"
    check += "[getattr(hookline.experiments, name) for name in hookline.experiments.__all__]\nimport hookline.cli\n"
    check += "hookline.load('tinyworld')\n"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert socket.socket.connect.__name__ == "connect", "the check is in the other process only"


@pytest.mark.quick_for("bash")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell) -> None:
    def completed(words: str) -> str:
        about = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        about |= {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        given = {**os.environ, "_HOOKLINE_COMPLETE": f"complete_{shell}", **about}
        return subprocess.run(PROGRAM, capture_output=True, text=True, env=given).stdout

    assert "store" in completed("hookline st")
    assert "points" not in completed("hookline st")
    assert "--rebuild" in completed("hookline store verify --re")
    assert "tinysight" in completed("hookline explore tiny")
    given = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run([*PROGRAM, "--show-completion", shell], capture_output=True, text=True, env=given)
    assert "_HOOKLINE_COMPLETE" in shown.stdout


def test_the_page_of_commands(here) -> None:
    """Every console block of docs/cli.md prints what it shows; `echo $?` is the exit status of the line before."""
    status, seen = 0, set()
    for language, text in BLOCK.findall(read("docs/cli.md")):
        if language != "console":
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            if line == "echo $?":
                assert int(shown) == status, line
                continue
            words = shlex.split(line)
            assert words[0] == "hookline"
            status, out, said = invoked(*words[1:])
            printed = out + "".join(each for each in said.splitlines(keepends=True) if "error" in each)
            assert matches(shown, printed), f"{line} prints:\n{printed}"
            seen.add(" ".join(words[1:3]) if words[1] == "store" else words[1])
    assert {*COMMANDS} <= seen


def test_the_page_has_every_command_option_and_status() -> None:
    text = read("docs/cli.md")
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    commands += [f"store {command.name}" for command in app.registered_groups[0].typer_instance.registered_commands]
    for command in commands:
        assert f"hookline {command}" in text
        help_text = invoked(*command.split(), "--help")[1]
        for option in {*re.findall(r"--[a-z-]+", help_text)} - {"--help", "--json", "--no-rebuild"}:
            assert f"`{option}" in text, f"{command} {option}"
        assert "--json" in help_text
    for code in ExitCode:
        assert re.search(rf"^\| {int(code)} \|", text, re.MULTILINE)
