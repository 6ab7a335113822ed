"""Autoencoders and transcoders by name from a hub: huggingface_hub's own downloads, from a stand-in on this machine.

Each test of a program starts it in a process of its own: huggingface_hub reads its environment when it is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from autoencoders import sae_for
from huggingface_hub import constants
from standin_hub import commit, serving

from hookline import HooklineError
from hookline.sae import Transcoder, Transcoders, published

pytestmark = pytest.mark.on_cpu(reason="files are read on the CPU")

PROGRAM = """
import json, sys
from hookline import HooklineError
from hookline.sae import Transcoders, published
answers = []
for call in json.load(sys.stdin):
    try:
        found = {"published": published, "load": Transcoders.load}[call[0]](*call[1], **call[2])
        first = found if call[0] == "published" else found[0]
        answers.append([float(first.W_enc.double().sum()), float(first.W_dec.double().sum())])
    except HooklineError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""
REGISTRY = """
tiny-res:
  model: tinyworld
  repo_id: someone/tiny-saes
  saes:
  - id: layer 1
    path: layers/1
  - id: broken
    path: layers/broken
"""


def transcoders(seed: int, *, cross_layer: bool = False) -> Transcoders:
    torch.manual_seed(seed)
    made = []
    for layer in range(2):
        writes = range(layer, 2) if cross_layer else [layer]
        shapes = {"W_enc": (6, 10), "b_enc": (10,), "W_dec": (10, len(writes), 6), "b_dec": (6,), "threshold": (10,)}
        weights = {name: torch.randn(shape) for name, shape in shapes.items()}
        made.append(Transcoder(layer, weights, writes=writes))
    return Transcoders(made)


def sums(x) -> list[float]:
    return [x.W_enc.double().sum().item(), x.W_dec.double().sum().item()]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    root = tmp_path_factory.mktemp("repositories")
    main, other = (sae_for(8, d_sae=16) for _ in range(2))
    other.W_enc.data *= 2
    main.save(root / "saes" / "layers" / "1")
    sae_for(8, d_sae=24).save(root / "saes" / "layers" / "broken")
    (root / "saes" / "layers" / "broken" / "sae_weights.safetensors.broken").touch()
    other.save(root / "saes-v2" / "layers" / "1")
    transcoders(1).save(root / "set")
    transcoders(2, cross_layer=True).save(root / "cross" / "inner")
    transcoders(3).save(root / "saelens", "saelens")
    (root / "listed").mkdir()
    (root / "arrays" / "layer_0").mkdir(parents=True)
    torch.manual_seed(4)
    shapes = {"W_enc": (6, 10), "b_enc": (10,), "W_dec": (10, 6), "b_dec": (6,), "threshold": (10,)}
    np.savez(root / "arrays" / "layer_0" / "params.npz", **{n: torch.randn(s).numpy() for n, s in shapes.items()})
    config = {
        "model_kind": "transcoder_set",
        "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "hook_mlp_out",
    }
    config["transcoders"] = ["hf://someone/arrays/layer_0/params.npz?revision=main"]
    (root / "listed" / "config.yaml").write_text(yaml.safe_dump(config))
    (root / "topk").mkdir()
    (root / "topk" / "config.yaml").write_text(yaml.safe_dump(config | {"activation": "topk", "k": 4}))
    (root / "registry.yaml").write_text(REGISTRY)
    (root / "token").write_text("private")
    served = {"tiny-saes": {"main": "saes", "v2": "saes-v2"}} | {
        name: {"main": name} for name in ("set", "cross", "saelens", "listed", "arrays", "topk")
    }
    folders = {f"someone/{name}": {at: root / path for at, path in each.items()} for name, each in served.items()}
    return root, folders, main, other


def answers(calls, home: Path, **environment: str) -> list:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    given |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(calls), capture_output=True, text=True, env=given, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_downloads(repositories, tmp_path) -> None:
    """By hub id, release, revision and commit; each file once; the cache without a network; and all that is missing."""
    root, folders, main, other = repositories
    registry = {"registry": str(root / "registry.yaml")}
    saes = "someone/tiny-saes"
    good = {
        "hub id": (["published", [saes, "layers/1"], {}], main),
        "release": (["published", ["tiny-res", "layer 1"], registry], main),
        "branch": (["published", [saes, "layers/1"], {"revision": "v2"}], other),
        "commit": (["published", [saes, "layers/1"], {"revision": commit(saes, "v2")}], other),
        "set": (["load", ["someone/set"], {}], transcoders(1)[0]),
        "cross-layer": (["load", ["someone/cross/inner"], {"revision": "main"}], transcoders(2, cross_layer=True)[0]),
        "SAELens": (["load", ["someone/saelens"], {}], transcoders(3)[0]),
    }  # fmt: skip
    bad = {
        "repository": (["published", ["someone/none", "layers/1"], {}], ["'someone/none' cannot be downloaded"]),
        "revision": (
            ["published", [saes, "layers/1"], {"revision": "v9"}],
            ["at the revision 'v9'", "cannot be downl"],
        ),
        "folder": (["published", [saes, "layers/7"], {}], ["has no layers/7/*; its folders are layers/1"]),
        "name": (["published", ["not a name/at all", "layers/1"], {}], ["cannot be downloaded"]),
        "damaged": (["published", ["tiny-res", "broken"], registry], ["cannot be downloaded"]),
        "no transcoders": (["load", [saes], {}], ["has no transcoders", "only in deeper folders"]),
        "an autoencoder": (["load", [f"{saes}/layers"], {}], ["has no transcoders", "but there is standard"]),
        "topk": (["load", ["someone/topk"], {}], ["activation 'topk', which is not supported"]),
        "a path": (["load", [str(root / "set")], {"revision": "main"}], ["is a path here"]),
        "a copy": (["published", [saes, "layers/1"], {"folder": str(root), "revision": "v2"}], ["read from folder"]),
    }
    everything = {**good, **bad}
    calls = [call for call, _ in everything.values()]
    with serving(folders) as hub:
        found = dict(zip(everything, answers(calls, tmp_path, HF_ENDPOINT=hub.address), strict=True))
        asked = [
            each for each in hub.asked if each.startswith("GET") and each.endswith("layers/1/sae_weights.safetensors")
        ]
        assert len(asked) == 2, f"one for each of two revisions: {asked}"
    for name, (_, expected) in good.items():
        assert found[name] == sums(expected), name
    for name, (_, words) in bad.items():
        assert all(word in found[name] for word in words), (name, found[name])
    dead = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_ETAG_TIMEOUT": "1"}
    for without in ({"HF_HUB_OFFLINE": "1"}, dead):
        calls = [call for call, _ in good.values()] + [bad["folder"][0], ["load", ["someone/arrays"], {}]]
        *again, folder, never = answers(calls, tmp_path, **without)
        assert again == [sums(expected) for _, expected in good.values()], "from the cache"
        assert "layers/7" in folder
        assert "is not in the local cache" in never


@pytest.mark.slow
def test_a_list_of_files_in_other_repositories(repositories, tmp_path) -> None:
    """As circuit-tracer's sets of Gemma Scope's transcoders."""
    _, folders, *_ = repositories
    with serving(folders) as hub:
        calls = [["load", ["someone/listed"], {}]]
        (found,) = answers(calls, tmp_path, HF_ENDPOINT=hub.address)
        file = folders["someone/arrays"]["main"] / "layer_0" / "params.npz"
        assert found == [float(np.load(file)[name].astype(np.float64).sum()) for name in ("W_enc", "W_dec")]


@pytest.mark.parametrize("path", ["/etc/passwd", "../token"])
def test_a_list_of_files_stays_in_its_folder(path, tmp_path) -> None:
    config = {
        "model_kind": "transcoder_set",
        "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "hook_mlp_out",
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"transcoders": [path]}))
    with pytest.raises(HooklineError, match="its folder"):
        Transcoders.load(tmp_path)


def test_paths_are_not_hub_ids(tmp_path) -> None:
    with pytest.raises(HooklineError, match="no transcoders"):
        Transcoders.load(tmp_path / "none")
    with pytest.raises(HooklineError, match="a folder"):
        published(str(tmp_path), "layers/1")


def test_a_download_in_this_process(repositories, tmp_path, monkeypatch) -> None:
    _, folders, _, other = repositories
    with serving(folders) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        found = published("someone/tiny-saes", "layers/1", revision="v2")
        assert sums(found) == sums(other)
        assert sums(Transcoders.load("someone/cross/inner")[0]) == sums(transcoders(2, cross_layer=True)[0])
        with pytest.raises(HooklineError, match="layers/1"):
            published("someone/tiny-saes", "layers/7")
        assert len(hub.asked) > 4
