"""A harvest goes on only with the very same model and hooks: whatever changes what is stored is noticed."""

import functools
import subprocess
import sys
import threading

import pytest
import torch
from stores import harvested, tinyworld
from torch import nn

import hookline
from hookline import StoreError, add, replace
from hookline.hooks import Controller, Detector
from hookline.sae import SAEConfig, SparseAutoencoder
from hookline.store.fingerprint import fingerprint
from hookline.store.sums import tensor_sum

pytestmark = pytest.mark.filterwarnings("ignore::hookline.errors.NeverFiredWarning")  # of a store that is complete

POINT = "blocks.1.hook_resid_post"
VECTORS = [torch.zeros(128), torch.ones(128)]
STRENGTH = 1.0


@pytest.fixture(scope="module")
def model():
    return tinyworld()


def closure(i):
    vector = VECTORS[i]
    return lambda x, hook: x + vector


def scalar(i):
    strength = float(i)
    return lambda x, hook: x * strength


def default(i):
    def steer(x, hook, vector=VECTORS[i]):
        return x + vector

    return steer


def _added(x, hook, vector):
    return x + vector


class Adder:
    def __init__(self, vector) -> None:
        self.vector = vector

    def __call__(self, x, hook):
        return x + self.vector

    def method(self, x, hook):
        return x - self.vector


class Module(nn.Module):
    def __init__(self, vector) -> None:
        super().__init__()
        self.vector = nn.Parameter(vector)

    def forward(self, x, hook):
        return x + self.vector


class Half(Controller):
    def __init__(self, factor) -> None:
        super().__init__(POINT)
        self._factor = factor

    def modify_activations(self, module, inputs, output):
        return output * self._factor


def autoencoder(seed=0):
    return SparseAutoencoder(SAEConfig(architecture="standard", d_in=128, d_sae=16, hook_name=POINT), seed=seed)


LAMBDAS = [lambda x: x * 2, lambda x: x * 3]

HOOKS = {
    "closure": closure,
    "scalar": scalar,
    "default": default,
    "partial": lambda i: functools.partial(_added, vector=VECTORS[i]),
    "object": lambda i: Adder(VECTORS[i]),
    "object's scalar": lambda i: Adder(i),
    "method": lambda i: Adder(i).method,
    "module": lambda i: Module(VECTORS[i]),
    "lambdas on one line": lambda i: LAMBDAS[i],
    "edit": lambda i: add(VECTORS[i]),
    "at": lambda i: hookline.at(hookline.last, closure(i)),
    "controller": Half,
    "splice, weights": lambda i: autoencoder(i).spliced(keep_error=False, hook_id="x"),
    "splice, error": lambda i: autoencoder().spliced(keep_error=bool(i), hook_id="x"),
    "splice, edits": lambda i: autoencoder().spliced(edits=[replace(5.0 * i, neuron=3)], hook_id="x"),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_another_hook_is_another_harvest(model, tmp_path, kind) -> None:
    def run(i):
        with model.hooks([(POINT, HOOKS[kind](i))]):
            return harvested(model, tmp_path, 6)

    assert len(run(0)) == len(run(0))  # made anew, it is the same
    with pytest.raises(StoreError, match="hooks is"):
        run(1)


def test_a_global_that_a_hook_reads_counts(model, tmp_path, monkeypatch) -> None:
    def scaled(x, hook):
        return x * STRENGTH

    with model.hooks([(POINT, scaled)]):
        harvested(model, tmp_path, 6)
        monkeypatch.setattr(sys.modules[__name__], "STRENGTH", 2.0)
        with pytest.raises(StoreError, match="hooks is"):
            harvested(model, tmp_path, 6)


def test_a_hook_that_was_used_is_the_same(model, tmp_path) -> None:
    with model.hooks([(POINT, hook) for hook in (Half(0.5), autoencoder().spliced(keep_features=True), closure(1))]):
        one = harvested(model, tmp_path, 6)
        assert len(harvested(model, tmp_path, 6)) == len(one)


def test_what_only_reads_does_not_count(model, tmp_path) -> None:
    one = harvested(model, tmp_path, 6)
    with model.hooks([(POINT, Detector())]):
        assert len(harvested(model, tmp_path, 6)) == len(one)


def test_torch_hooks_and_patched_modules_count(model, tmp_path) -> None:
    layer = model.module.transformer.h[0]
    harvested(model, tmp_path, 6)
    handles = [
        lambda: layer.mlp.register_forward_hook(lambda _module, _args, output: output * 2),
        lambda: layer.register_forward_pre_hook(lambda _module, args: (args[0] * 2, *args[1:])),
        lambda: torch.nn.modules.module.register_module_forward_hook(lambda _module, _args, output: None),
    ]
    for register in handles:
        handle = register()
        try:
            with pytest.raises(StoreError, match="hooks is"):
                harvested(model, tmp_path, 6)
        finally:
            handle.remove()
    layer.mlp.forward = lambda x: x
    try:
        with pytest.raises(StoreError, match="hooks is"):
            harvested(model, tmp_path, 6)
    finally:
        del layer.mlp.forward
    harvested(model, tmp_path, 6)


def test_what_transformers_notes_does_not_count(model, tmp_path) -> None:
    harvested(model, tmp_path, 6)
    model.module(torch.tensor([[1, 2]]), output_hidden_states=True, output_attentions=False)
    harvested(model, tmp_path, 6)


def test_what_cannot_be_compared_is_refused(model, tmp_path) -> None:
    lock = threading.Lock()

    def guarded(x, hook):
        with lock:
            return x * 2

    with model.hooks([(POINT, guarded)]):
        harvested(model, tmp_path, 6)
        with pytest.raises(StoreError, match="a lock, which cannot be compared"):
            harvested(model, tmp_path, 6)


class Counting:
    """Says itself what decides what it does; that it counts is no part of it."""

    def __init__(self, factor) -> None:
        self.factor, self.calls = factor, 0

    def __call__(self, x):
        self.calls += 1
        return x * self.factor

    def fingerprinted(self):
        return self.factor


def test_an_object_may_say_what_it_is_made_of(model, tmp_path) -> None:
    hook = Counting(2)
    with model.hooks([(POINT, hook)]):
        harvested(model, tmp_path, 6)
        harvested(model, tmp_path, 6)
        assert hook.calls
        hook.factor = 3
        with pytest.raises(StoreError, match="hooks is"):
            harvested(model, tmp_path, 6)


def test_one_weight_counts(tmp_path) -> None:
    model = hookline.load("tinyworld")
    harvested(model, tmp_path, 6)
    weight = model.module.transformer.wte.weight
    with torch.no_grad():
        weight[977, 5] += 1e-3
        with pytest.raises(StoreError, match="weights is"):
            harvested(model, tmp_path, 6)
        weight[977, 5] -= 1e-3
        weight[[3, 4]] = weight[[4, 3]]
        with pytest.raises(StoreError, match="weights is"):
            harvested(model, tmp_path, 6)


def test_positions_by_a_function_count_with_what_they_close_over(model, tmp_path) -> None:
    def every(n):
        return lambda ids: torch.arange(len(ids)) % n == 0

    harvested(model, tmp_path, 6, positions=every(2))
    harvested(model, tmp_path, 6, positions=every(2))
    with pytest.raises(StoreError, match="positions is"):
        harvested(model, tmp_path, 6, positions=every(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (40, 700), (3, 5, 1024)])
def test_sums_see_every_value(dtype, shape) -> None:
    x = (torch.rand(shape) * 50).to(dtype)
    assert tensor_sum(x) == tensor_sum(x.clone())
    assert tensor_sum(x) == tensor_sum(x.T.contiguous().T if x.ndim == 2 else x)
    for place in {0, x.numel() // 2, x.numel() - 1}:
        other = x.clone()
        flat = other.view(-1)
        flat[place] = ~flat[place] if dtype == torch.bool else flat[place] + 1
        assert tensor_sum(other) != tensor_sum(x)
    if x.numel() > 1:
        assert tensor_sum(x) != tensor_sum(x.unsqueeze(0))


def test_sums_see_values_that_changed_places() -> None:
    x = torch.arange(64 * 2048).float()
    swapped = x.clone()
    swapped[[0, 2048]], swapped[[5, 7]] = x[[2048, 0]], x[[7, 5]]
    assert tensor_sum(swapped[1:]) != tensor_sum(x[1:])
    assert tensor_sum(torch.cat([x[2048:4096], x[:2048], x[4096:]])) != tensor_sum(x)


_ELSEWHERE = """
import re, sys
import numpy, torch
sys.path.insert(0, {tests!r})
from hookline.store.fingerprint import fingerprint
from test_harvest_identity import HOOKS
some = [make(1) for name, make in HOOKS.items()]
print(fingerprint([some, {{"b", "a", "c"}}, {{"x": 1, "y": re.compile("a+")}}, numpy.arange(3), torch.Generator()]))
"""


def test_fingerprints_are_the_same_in_another_process() -> None:
    import os
    from pathlib import Path

    script = _ELSEWHERE.format(tests=str(Path(__file__).parent))
    found = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 32


def test_an_object_that_holds_itself() -> None:
    one, other = [1], [1]
    one.append(one)
    other.append(other)
    assert fingerprint(one) == fingerprint(other) != fingerprint([1, [1]])
