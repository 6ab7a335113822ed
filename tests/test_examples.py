"""The examples: each runs, and what it says is so."""

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples" / "pytorch"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if "def main(" in path.read_text())


@pytest.fixture
def load(monkeypatch):
    """Imports a script as `python examples/pytorch/x.py` would see it: with its siblings."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look for it
        spec.loader.exec_module(module)
        return module

    return load


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", head[16:])


def test_every_script_is_tested() -> None:
    tested = {name.removeprefix("test_") for name in globals()}
    assert [name for name in SCRIPTS if name not in tested] == []


def test_forward_hook(load, capsys) -> None:
    seen, by_hand = load("forward_hook").main()
    assert {name: tuple(value.shape) for name, value in seen.items()} == {"fc1.input": (3, 10), "fc1": (3, 5)}
    assert all(torch.equal(seen[name], by_hand[name]) for name in by_hand)
    assert "same numbers: True; hooks left on fc1: 0" in capsys.readouterr().out


def test_backward_hook(load) -> None:
    ways = load("backward_hook").main()
    assert ways["torch"]["fc2"].eq(1).all(), "the loss is a sum"
    assert ways["torch"]["fc2.input"].shape == (3, 5)
    for way in ways.values():
        assert sorted(way) == ["fc2", "fc2.input"]
        assert all(torch.equal(way[name], grad) for name, grad in ways["torch"].items())


def test_activations_in_a_dict(load) -> None:
    cache, collected, kept = load("activations_in_a_dict").main()
    assert {name: tuple(value.shape) for name, value in cache.items()} == {"fc1": (1, 5), "fc2": (1, 2)}
    assert all(torch.equal(cache[name], value) for name, value in collected.items())
    assert torch.equal(kept["hookline"], kept["true"])
    assert torch.equal(kept["by hand"], kept["true"].relu())
    assert not torch.equal(kept["by hand"], kept["true"])


def test_gradient_clipping(load) -> None:
    script = load("gradient_clipping")
    results = script.main()
    free, returned, in_place = results.values()
    assert max(free.norms) > 10 * script.LIMIT
    assert max(returned.norms) <= script.LIMIT * 1.0001
    assert in_place == returned
    assert returned.error < free.error / 2


def test_gradient_surgery(load) -> None:
    results = load("gradient_surgery").main()
    free, protected = results["free"], results["protected"]
    assert free["along"] > 1
    assert protected["along"] < 1e-3
    assert protected["across"] > 1
    assert protected["accuracy"] > 0.95
    both, reverse = results["both heads"], results["one reversed"]
    assert min(both.values()) > 0.9
    assert reverse["task"] > 0.95
    assert reverse["nuisance"] < 0.65
    assert reverse["fresh reader"] < 0.75


def test_edit_activations(load) -> None:
    results = load("edit_activations").main()
    [unedited] = results["unedited"]
    assert unedited > 0.95
    assert min(results["neuron 0…4 off"]) < unedited - 0.1
    noisy = results["noise of 0.5, 1, 2, 4"]
    assert [unedited, *noisy] == sorted([unedited, *noisy], reverse=True)
    hidden = results["input 0…9 hidden"]
    assert max(hidden[:2]) < 0.85
    assert min(hidden[2:]) > 0.95, "the other eight numbers decide nothing"
    assert results["pushed by ±0.2 with intent"][0] < results["pushed by ±0.2 at random"][0] - 0.1


def test_cnn_feature_maps(load, tmp_path) -> None:
    path, whole, without = load("cnn_feature_maps").main(tmp_path)
    assert whole > 0.95
    assert {layer: len(values) for layer, values in without.items()} == {"conv1": 8, "conv2": 8}
    assert min(without["conv1"]) < whole
    assert min(without["conv2"]) < whole - 0.1, "some channel matters"
    assert max(without["conv2"]) > whole - 0.05, "and some does not"
    width, height = png_size(path)
    assert 800 < width < 2000
    assert 600 < height < 2000


def test_switching_a_channel_off_is_giving_it_no_weight(load) -> None:
    """The hook does what changing the network itself would do."""
    script = load("cnn_feature_maps")
    net, (x, y) = script.hookline.hook(script.train(20)), script.images(60, seed=2)
    hooked = script.accuracy_without_each(net, "relu2", x, y)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for channel, expected in enumerate(hooked):
        with torch.no_grad():
            net.fc.weight[:, channel] = 0
        assert script.accuracy(net, x, y) == expected
        net.load_state_dict(before)


def test_demo(load, tmp_path, capsys) -> None:
    path, found = load("demo").main(tmp_path / "new")
    assert found.accuracy > 0.95
    assert found.lost[found.layer][found.channel] == max(max(values) for values in found.lost.values())
    assert found.lost[found.layer][found.channel] > 0.1
    assert found.before.argmax() != found.after.argmax()
    assert found.changed > 0
    assert found.saliency.shape == found.image.shape
    assert found.saliency.max() > 0
    width, height = png_size(path)
    assert 800 < width < 2000
    assert 600 < height < 2000
    out = capsys.readouterr().out
    assert "conv2.input" in out
    assert str(path) in out
