"""Loading a model by name: what could have been meant, folders that cannot be read, a hub that is not there."""

import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tiny_models import causal_lm
from typer.testing import CliRunner

import hookline
from hookline import HooklineError
from hookline.cli import app
from hookline.transformer.hub import find_model

ASSETS = Path(hookline.__file__).parent / "demo" / "assets" / "tinyworld"


@pytest.fixture
def no_hub(monkeypatch) -> None:
    """An address at which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{held.getsockname()[1]}")
        yield


@pytest.mark.parametrize(
    ("name", "meant"),
    [("tinywrld", "tinyworld"), ("TinyWorld", "tinyworld"), ("tiny-world", "tinyworld"), ("tinysigth", "tinysight")],
)
def test_a_name_that_is_nearly_right(name, meant) -> None:
    with pytest.raises(HooklineError, match=rf"'{name}'.*'{meant}'"):
        hookline.load(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere", "folder /nowhere"),
        ("./nowhere", "folder nowhere"),
        ("~/nowhere-at-all", "/nowhere-at-all"),
        ("a/b/c", "folder a/b/c"),
        (str(ASSETS / "config.json"), "is a file"),
        (str(ASSETS.parent.parent), "contains no weights"),
        ("", "empty name"),
        (torch.nn.Linear(2, 2), r"hookline\.hook"),
        ("not a name", "not a valid hub id"),
    ],
)
def test_names_that_are_nowhere(name, message) -> None:
    with pytest.raises(HooklineError, match=message):
        hookline.load(name)


def test_a_hub_that_cannot_be_reached(no_hub, tmp_path, caplog) -> None:
    with pytest.raises(HooklineError, match="hub") as caught:
        hookline.load("someone/something", cache_dir=tmp_path)
    assert caught.value.__cause__ is not None
    assert "Retrying" not in caplog.text


def test_what_was_downloaded_before_is_loaded_without_the_hub(no_hub, tmp_path, caplog) -> None:
    folder = tmp_path / "models--someone--something"
    shutil.copytree(ASSETS, folder / "snapshots" / ("0" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    model = hookline.load("someone/something", cache_dir=tmp_path)
    assert model.to_tokens("Mary").shape[0] == 1
    assert "Retrying" not in caplog.text


DAMAGES = {
    "config.json": [
        b"",
        b"[1]",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"model_type": []}',
        b'{"model_type": "gpt2", "n_embd": -1}',
    ],
    "model.safetensors": [b"", b"[1]", b"\xff" * 100],
    "tokenizer.json": [b"", b"[1]", b"[" * 100_000],
    "tokenizer_config.json": [b"", b"[1]"],
}


def test_damaged_folders_and_the_commands(tmp_path) -> None:
    shutil.copytree(ASSETS, tmp_path / "model")
    for name, contents in DAMAGES.items():
        whole = (ASSETS / name).read_bytes()
        for each in contents:
            (tmp_path / "model" / name).write_bytes(each)
            with pytest.raises(HooklineError, match="cannot load") as caught:
                hookline.load(tmp_path / "model")
            assert "\n" not in str(caught.value)
            assert caught.value.__cause__ is not None
        for command in ("points", "verify"):
            told_in_one_line(CliRunner().invoke(app, [command, str(tmp_path / "model")]))
        (tmp_path / "model" / name).write_bytes(whole)


def told_in_one_line(result) -> None:
    assert result.exit_code == 3
    assert isinstance(result.exception, SystemExit)
    lines = [line for line in result.output.splitlines() if line and "Loading weights" not in line]  # transformers' bar
    assert len(lines) == 1, result.output
    assert lines[0].startswith("error: ")


@pytest.mark.parametrize(
    "command",
    [["points"], ["verify"], ["store", "info"], ["store", "verify", "--rebuild"]],
    ids=" ".join,
)
def test_commands_on_folders_that_cannot_be_read(command, tmp_path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    is_root = os.geteuid() == 0  # whom no mode keeps out
    (tmp_path / "file").write_text("")
    if is_root:
        os.seteuid(65534)
    try:
        results = [CliRunner().invoke(app, [*command, str(path)]) for path in (closed, tmp_path / "file")]
    finally:
        if is_root:
            os.seteuid(0)
        closed.chmod(0o700)
    for result in results:
        told_in_one_line(result)


def test_the_demo_says_at_once_that_it_cannot_write(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    told_in_one_line(CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file")]))


def test_a_folder_of_gguf_weights_needs_the_name_of_the_file(tmp_path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"")
    with pytest.raises(HooklineError, match=r"'.*small\.gguf'"):
        hookline.load(tmp_path)
    assert find_model(tmp_path / "small.gguf", {}) == (tmp_path, {"gguf_file": "small.gguf"})
    with pytest.raises(HooklineError, match="leave gguf_file out"):
        hookline.load(tmp_path / "small.gguf", gguf_file="small.gguf")


@pytest.mark.parametrize("option", ["device_map", "distributed_config"])
def test_several_devices_need_accelerate(option, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["hookline.loading"], "find_spec", lambda name: None)
    with pytest.raises(HooklineError, match=rf'{option} needs accelerate.*"hookline\[distributed\]"'):
        hookline.load("tinyworld", **{option: "auto"})


def test_a_soft_cap_that_sdpa_leaves_out_is_told() -> None:
    """Some versions of transformers accept sdpa for such a model, and drop the cap."""
    model = causal_lm("gemma2")
    assert model.config.attn_logit_softcapping
    hookline.hook(model)
    model.config._attn_implementation = "sdpa"
    with pytest.warns(match=r"soft cap \(.*attn_implementation='eager'"):
        hookline.hook(model)


def test_a_model_of_the_package_has_all_its_weights(monkeypatch, tmp_path) -> None:
    """A version of transformers with other names of modules would fill the rest with random numbers."""
    where = Path(hookline.__file__).parent / "demo/assets/tinyworld"
    shutil.copytree(where, tmp_path / "tinyworld")
    weights = load_file(where / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.c_fc.weight"))
    weights[f"other.{name}"] = weights.pop(name)
    save_file(weights, tmp_path / "tinyworld/model.safetensors", {"format": "pt"})
    found = sys.modules["hookline.loading"].find_model
    monkeypatch.setattr(
        sys.modules["hookline.loading"], "find_model", lambda *args: found(*args)._replace(path=tmp_path / "tinyworld")
    )
    with pytest.raises(HooklineError, match=r"mlp\.c_fc\.weight.*transformers"):
        hookline.load("tinyworld")


def test_options_that_cannot_be_used() -> None:
    with pytest.raises(hookline.HooklineError, match="revision="):
        hookline.load("tinyworld", revision="x")
    with pytest.raises(hookline.HooklineError, match="device='nowhere'"):
        hookline.load("tinyworld", device="nowhere")
    with pytest.raises(hookline.HooklineError, match=r"'devise'.*'device'"):
        hookline.load("tinyworld", devise="cpu")
    with pytest.raises(hookline.HooklineError, match="'zzz'"):
        hookline.load("tinyworld", zzz=1)


def test_a_model_without_weights_does_not_generate_or_harvest(tmp_path) -> None:
    empty = hookline.load("tinyworld", device="meta")
    with pytest.raises(hookline.HooklineError, match='"meta"'):
        empty.generate("Mary went")
    with pytest.raises(hookline.HooklineError, match=r"harvest.*layer"):
        hookline.harvest(empty, ["Mary went"], "z", tmp_path / "store")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error is that of a machine without a GPU")
def test_a_device_that_this_machine_does_not_have() -> None:
    with pytest.raises(hookline.HooklineError, match="device='cuda'"):
        hookline.load("tinyworld", device="cuda")
