"""A harvest goes on only with the very same model and hooks: whatever changes what is stored is noticed."""

import functools
import subprocess
import sys
import threading

import pytest
import torch
from stores import edit_manifest, harvested, tinyworld
from torch import nn

import hookline
from hookline.edits import add, replace
from hookline.errors import StoreError
from hookline.hooks import Controller, Detector
from hookline.sae import SAEConfig, SparseAutoencoder
from hookline.store.checksums import tensor_sum
from hookline.store.fingerprint import fingerprint

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
    with pytest.raises(StoreError, match="hooks: "):
        run(1)


def test_a_global_that_a_hook_reads_counts(model, tmp_path, monkeypatch) -> None:
    def scaled(x, hook):
        return x * STRENGTH

    with model.hooks([(POINT, scaled)]):
        harvested(model, tmp_path, 6)
        monkeypatch.setattr(sys.modules[__name__], "STRENGTH", 2.0)
        with pytest.raises(StoreError, match="hooks: "):
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
            with pytest.raises(StoreError, match="hooks: "):
                harvested(model, tmp_path, 6)
        finally:
            handle.remove()
    layer.mlp.forward = lambda x: x
    try:
        with pytest.raises(StoreError, match="hooks: "):
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
        with pytest.warns(hookline.errors.HooklineWarning, match="guarded.*cannot be compared"):
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
        with pytest.raises(StoreError, match="hooks: "):
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


def _refused(model, path, change, match, hook=None) -> None:
    """A harvest with the hook goes on as it is, and is refused after `change`."""
    with model.hooks([(POINT, hook)] if hook is not None else []):
        harvested(model, path, 6)
        harvested(model, path, 6)
        change()
        with pytest.raises(StoreError, match=match):
            harvested(model, path, 6)


OWN_MODULE = """
import torch
COEF = 2.0
VEC = torch.ones(128)
CFG = {"k": 2.0}
class Config:
    k = 2.0
def helper(h): return h * COEF
def apply(h): return helper(h)
"""


@pytest.fixture
def steering(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "my_steering.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    import my_steering  # type: ignore[import-not-found]

    yield my_steering
    del sys.modules["my_steering"]


def _through_an_import(h):
    import my_steering

    return my_steering.apply(h)


def _through_a_name(h):
    from my_steering import COEF

    return h * COEF


@pytest.mark.parametrize("source", ["h * s.COEF", "h + s.VEC", "h * s.CFG['k']", "s.apply(h)", "h * s.Config.k"])
def test_what_is_read_of_a_module_of_ones_own_counts(model, tmp_path, steering, source) -> None:
    def change():
        steering.COEF, steering.VEC = 30.0, torch.zeros(128)
        steering.CFG["k"] = steering.Config.k = 30.0

    hook = eval(f"lambda h: {source}", {"s": steering, "__name__": "__main__"})
    _refused(model, tmp_path / "store", change, r"<lambda> at '.*' has another global 's\.", hook)


@pytest.mark.parametrize("hook", [_through_an_import, _through_a_name])
def test_what_is_imported_inside_a_hook_counts(model, tmp_path, steering, hook) -> None:
    _refused(model, tmp_path / "store", lambda: setattr(steering, "COEF", 30.0), "global 'my_steering", hook)


def test_what_is_not_read_of_a_module_does_not_count(model, tmp_path, steering) -> None:
    hook = eval("lambda h: h * s.COEF", {"s": steering, "__name__": "__main__"})
    with model.hooks([(POINT, hook)]):
        harvested(model, tmp_path / "store", 6)
        steering.CFG["k"] = 7
        harvested(model, tmp_path / "store", 6)


def test_all_of_a_module_counts_where_it_is_handed_on(model, tmp_path, steering) -> None:
    hook = eval("lambda h: h * getattr(s, 'COEF')", {"s": steering, "__name__": "__main__"})
    _refused(model, tmp_path / "store", lambda: setattr(steering, "COEF", 30.0), "global 's'", hook)


def _cached(i):
    @functools.cache
    def strength():
        return float(i)

    return lambda h: h * strength()


def _torch_hooked(i):
    layer = nn.Identity()
    layer.register_forward_hook(lambda _module, _args, output: output * i)
    return lambda h: layer(h)


def _hooked_model(i):
    other = hookline.hook(nn.Sequential(nn.Identity()))
    other.add_hook("0", lambda h: h * i)
    return lambda h: other(h)


class _Settings(dict):
    pass


def _of_a_dict(i):
    settings = _Settings()
    settings.strength = i
    return lambda h: h * settings.strength


def _of_a_tensor(i):
    vector = torch.ones(128)
    vector.strength = i
    return lambda h: h * vector.strength


def _through_globals(i):
    return eval("lambda h: h * globals()['strength']", {"strength": i, "__name__": "__main__"})


@pytest.mark.parametrize("make", [_cached, _torch_hooked, _hooked_model, _of_a_dict, _of_a_tensor, _through_globals])
def test_what_a_hook_does_by_detours_counts(make) -> None:
    assert fingerprint(make(1)) == fingerprint(make(1)) != fingerprint(make(2))


@pytest.mark.parametrize(
    ("part", "name", "value", "match"),
    [
        ("ln_1", "eps", 10.0, "modules have another attribute 'eps'"),
        ("mlp", "act", nn.ReLU(), "modules have another class"),
        ("attn", "scaling", 5.0, "modules have another attribute 'scaling'"),
    ],
)
def test_the_parts_of_a_model_count(model, tmp_path, part, name, value, match) -> None:
    module = model.module.transformer.h[0].get_submodule(part)
    before = getattr(module, name)
    try:
        _refused(model, tmp_path, lambda: setattr(module, name, value), match)
    finally:
        setattr(module, name, before)
    harvested(model, tmp_path, 6)


def test_a_method_put_in_the_place_of_a_librarys_counts(model, tmp_path, monkeypatch) -> None:
    kind = type(model.module.transformer.h[0].mlp)
    forward = kind.forward
    change = lambda: monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x) * 3)  # noqa: E731
    _refused(model, tmp_path, change, "modules have another class")


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.direction = nn.Linear(4, 4), torch.ones(4)

    def forward(self, x):
        return self.fc(x) + self.direction


def test_a_tensor_that_is_no_buffer_counts(tmp_path) -> None:
    net, data = hookline.hook(_Scaled()), torch.randn(5, 4)
    hookline.harvest(net, data, "fc", tmp_path)
    hookline.harvest(net, data, "fc", tmp_path)
    net.module.direction = torch.zeros(4)
    with pytest.raises(StoreError, match="attribute 'direction'"):
        hookline.harvest(net, data, "fc", tmp_path)


def test_a_name_of_the_folder_and_of_the_cache_do_not_count(tmp_path) -> None:
    model = hookline.load("tinyworld")
    harvested(model, tmp_path, 6)
    model.module.config.use_cache = not model.module.config.use_cache
    edit_manifest(tmp_path, lambda fields: fields["model"].update(id="elsewhere"))
    harvested(model, tmp_path, 6)


@pytest.mark.parametrize(
    "vector",
    [
        torch.arange(384.0).view(128, 3)[:, 0],
        torch.arange(256.0)[::2],
        torch.ones(1).expand(128),
        torch.eye(128)[0].to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["column", "steps", "expanded", "sparse", "nested"],
)
def test_vectors_that_are_not_in_a_row_can_be_summed(model, tmp_path, vector) -> None:
    with model.hooks([(POINT, lambda h, kept=vector: h * 2)]):
        harvested(model, tmp_path, 6)
        harvested(model, tmp_path, 6)
    if vector.layout == torch.strided:
        assert tensor_sum(vector) == tensor_sum(vector.clone()) != tensor_sum(vector + 1)


def test_an_edit_takes_no_sparse_vector() -> None:
    with pytest.raises(hookline.HooklineError, match=r"vector= is .*sparse.*vector\.to_dense\(\)"):
        add(torch.eye(128)[0].to_sparse())


def test_an_autoencoder_that_was_saved_and_loaded_is_the_same(model, tmp_path) -> None:
    from dataclasses import replace as with_fields

    sae = autoencoder()
    sae.cfg = with_fields(sae.cfg, metadata={"trained_by": "somebody"})
    sae.save(tmp_path / "sae")
    again = SparseAutoencoder.load(tmp_path / "sae")
    assert again.cfg.metadata != sae.cfg.metadata
    for each in (sae, again):
        with model.hooks([each.spliced(keep_error=False)]):
            harvested(model, tmp_path / "store", 6)
    topk = SAEConfig(architecture="topk", d_in=128, d_sae=16, k=2)
    assert fingerprint(topk) != fingerprint(with_fields(topk, k=3))


def test_a_tokenizer_that_was_used_is_the_same() -> None:
    other = hookline.load("tinyworld").tokenizer
    before, inside = fingerprint(lambda h: h * len(other)), fingerprint(other.backend_tokenizer)
    other(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert fingerprint(lambda h: h * len(other)) == before
    assert fingerprint(other.backend_tokenizer) == inside
    other.add_tokens(["<new>"])
    assert fingerprint(lambda h: h * len(other)) != before


def test_the_same_hooks_in_other_words_and_another_order_are_the_same(model, tmp_path) -> None:
    one, two = closure(0), closure(1)
    with model.hooks([(0, one), (1, two)]):
        harvested(model, tmp_path, 6)
    with model.hooks([("blocks.1.hook_resid_post", two), ("blocks.0.hook_resid_post", one)]):
        harvested(model, tmp_path, 6)
    with model.hooks([(0, one), (0, two)]), pytest.raises(StoreError, match=r"hooks: .* here, but .* in the store"):
        harvested(model, tmp_path, 6)


def test_the_order_of_hooks_at_one_point_counts(model, tmp_path) -> None:
    one, two = scalar(2), closure(1)
    with model.hooks([(0, one), (0, two)]):
        harvested(model, tmp_path, 6)
    with model.hooks([(0, two), (0, one)]), pytest.raises(StoreError, match="hooks: "):
        harvested(model, tmp_path, 6)


@pytest.mark.parametrize(
    ("change", "match"), [(closure, "closure 'vector'"), (default, "defaults"), (Half, "'_factor'")]
)
def test_a_refusal_says_which_part_differs(model, tmp_path, change, match) -> None:
    with model.hooks([(POINT, change(0))]):
        harvested(model, tmp_path, 6)
    with model.hooks([(POINT, change(1))]), pytest.raises(StoreError, match=rf"at '{POINT}' has another .*{match}"):
        harvested(model, tmp_path, 6)


def test_a_hook_may_write_to_a_file(tmp_path) -> None:
    with open(tmp_path / "log", "w") as one, open(tmp_path / "other", "w") as other:
        made = [fingerprint(lambda h, file=file: file.write("x")) for file in (one, other)]
    assert made[0] == made[1]
    assert "cannot be compared" not in made[0]
