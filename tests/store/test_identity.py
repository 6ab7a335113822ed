"""A harvest resumes only with the same model, data, options and edits; functions need a tag."""

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import replace as with_fields
from pathlib import Path

import pytest
import torch
from stores import edit_manifest, harvested, same_rows, texts, tinyworld
from torch import nn

import hookline
from hookline import HooklineError, last, token
from hookline.edits import add, freeze, mean, noise, project_out, replace, scale, zero
from hookline.errors import HooklineWarning, StoreError
from hookline.hooks import Controller, Detector
from hookline.hooks.data_edits import Add
from hookline.sae import SAEConfig, SparseAutoencoder
from hookline.sae.splice import Splice
from hookline.store.identity import content_digest, tensor_checksum, tokenizer_digest

pytestmark = pytest.mark.filterwarnings("ignore::hookline.errors.NeverFiredWarning")  # of a store that is complete

POINT = "blocks.1.hook_resid_post"
VECTORS = [torch.ones(128), torch.arange(128.0)]


@pytest.fixture(scope="module")
def model():
    return tinyworld()


def autoencoder(seed=0):
    return SparseAutoencoder(SAEConfig(architecture="standard", d_in=128, d_sae=16, hook_name=POINT), seed=seed)


MASKS = [torch.arange(128) < 5, torch.arange(128) < 6]

DATA = {
    "vector": lambda i: add(VECTORS[i]),
    "coefficient": lambda i: add(VECTORS[0], 1.0 + i),
    "value": lambda i: replace(float(i)),
    "kind": lambda i: (zero, scale)[i](*[2.0] * i),
    "neuron": lambda i: zero(neuron=[3, 4 + i]),
    "position": lambda i: zero(pos=(last, -1)[i]),
    "token": lambda i: zero(pos=token(" went", nth=-i)),
    "slice": lambda i: zero(pos=slice(i, None)),
    "mask": lambda i: zero(mask=MASKS[i]),
    "seed": lambda i: noise(0.1, seed=i),
    "mean": lambda i: mean(VECTORS[i]),
    "outliers": lambda i: mean(VECTORS[0], outliers=("exclude", "include")[i]),
    "direction": lambda i: project_out(VECTORS[i]),
    "splice, weights": lambda i: autoencoder(i).spliced(keep_error=False, hook_id="x"),
    "splice, error": lambda i: autoencoder().spliced(keep_error=bool(i), hook_id="x"),
    "splice, edits": lambda i: autoencoder().spliced(edits=[replace(5.0 * i, neuron=3)], hook_id="x"),
}


@pytest.mark.parametrize("kind", DATA)
def test_an_edit_counts_by_its_values(model, tmp_path, kind) -> None:
    def run(i):
        with model.hooks([(POINT, DATA[kind](i))]):
            return harvested(model, tmp_path, 6)

    assert len(run(0)) == len(run(0))  # made anew, it is the same
    with pytest.raises(StoreError, match="hooks: "):
        run(1)


def test_the_head_of_an_edit_counts() -> None:
    assert content_digest(zero(head=1)) != content_digest(zero(head=2)) != content_digest(zero(head=[2, 3]))
    assert content_digest(freeze(VECTORS[0])) != content_digest(replace(VECTORS[0]))


def closure(i):
    vector = VECTORS[i]
    return lambda x, hook: x + vector


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


class OwnEdit(Add):
    def changed(self, x, hook):
        return super().changed(x, hook) * 2


class OwnSplice(Splice):
    def modify_activations(self, module, inputs, output):
        return output * 2


class OwnAutoencoder(SparseAutoencoder):
    def encode(self, x):
        return super().encode(x) * 2


CODE = {
    "closure": closure,
    "partial": lambda i: functools.partial(_added, vector=VECTORS[i]),
    "object": lambda i: Adder(VECTORS[i]),
    "method": lambda i: Adder(i).method,
    "module": lambda i: Module(VECTORS[i]),
    "at": lambda i: hookline.at(last, closure(i)),
    "controller": Half,
    "own edit": lambda i: OwnEdit(VECTORS[i]),
    "own splice": lambda i: OwnSplice(autoencoder(i), hook_id="x"),
    "own autoencoder": lambda i: OwnAutoencoder(autoencoder(i).cfg).spliced(hook_id="x"),
    "splice with a function": lambda i: autoencoder().spliced(edits=[lambda features: features * i], hook_id="x"),
}


@pytest.mark.parametrize("kind", CODE)
def test_a_function_needs_a_tag(model, tmp_path, kind) -> None:
    with model.hooks([(POINT, CODE[kind](1))]):
        with pytest.warns(HooklineWarning, match=f"at '{POINT}'.*hooks_tag") as warned:
            harvested(model, tmp_path / "untagged", 6)
        assert warned[0].filename.endswith("stores.py")
        with pytest.raises(StoreError, match=f"at '{POINT}'.*hooks_tag"):
            harvested(model, tmp_path / "untagged", 6)
        with pytest.raises(StoreError, match=r"hooks_tag is 'v1'.*None"):  # nobody knows what is in there
            harvested(model, tmp_path / "untagged", 6, hooks_tag="v1")
    for _ in range(2):
        with model.hooks([(POINT, CODE[kind](1))]):
            store = harvested(model, tmp_path / "tagged", 6, hooks_tag="v1")
            assert store.is_complete
            with pytest.raises(StoreError, match=r"hooks_tag is 'v2'.*'v1'"):
                harvested(model, tmp_path / "tagged", 6, hooks_tag="v2")


def test_a_tagged_harvest_that_was_interrupted_resumes(model, tmp_path) -> None:
    def broken():
        yield from texts(30)[:14]
        raise KeyboardInterrupt

    with model.hooks([(POINT, closure(1))]):
        harvested(model, tmp_path / "whole", hooks_tag="v1")
        options = {"batch_size": 3, "shard_rows": 40, "dtype": torch.bfloat16, "progress": False, "hooks_tag": "v1"}
        points = list(hookline.store.LocalStore(tmp_path / "whole").points)
        with pytest.raises(KeyboardInterrupt):
            hookline.harvest(model, broken(), points, tmp_path / "parts", **options)
        assert 0 < hookline.store.LocalStore(tmp_path / "parts").examples < 30
        hookline.harvest(model, texts(30), points, tmp_path / "parts", **options)
    assert same_rows(tmp_path / "whole", tmp_path / "parts")


def test_an_untagged_harvest_that_was_interrupted_can_be_read(model, tmp_path) -> None:
    def broken():
        yield from texts(30)[:14]
        raise KeyboardInterrupt

    with model.hooks([(POINT, closure(1))]):
        with pytest.warns(HooklineWarning, match="hooks_tag"), pytest.raises(KeyboardInterrupt):
            hookline.harvest(model, broken(), POINT, tmp_path, batch_size=3, progress=False)
        with pytest.raises(StoreError, match="hooks_tag"):
            hookline.harvest(model, texts(30), POINT, tmp_path, batch_size=3, progress=False)
    found = hookline.store.LocalStore(tmp_path)
    assert found.verify().is_sound
    assert len(found.rows().token) == len(found) > 0


def test_under_a_tag_places_names_order_and_edits_still_count(model, tmp_path) -> None:
    def run(*hooks):
        with model.hooks(hooks):
            return harvested(model, tmp_path, 6, hooks_tag="v1")

    run((POINT, closure(0)), (POINT, zero(neuron=1)))
    run((POINT, closure(1)), (POINT, zero(neuron=1)))  # another closure, of which only the tag tells
    for others in (
        [("blocks.2.hook_resid_post", closure(0)), (POINT, zero(neuron=1))],
        [(POINT, Adder(1)), (POINT, zero(neuron=1))],
        [(POINT, zero(neuron=1)), (POINT, closure(0))],
        [(POINT, closure(0)), (POINT, zero(neuron=2))],
        [(POINT, closure(0))],
    ):
        with pytest.raises(StoreError, match="hooks: "):
            run(*others)


@pytest.mark.parametrize("tag", ["", 3, b"v1"])
def test_a_tag_is_a_word(model, tmp_path, tag) -> None:
    with pytest.raises(HooklineError, match="hooks_tag"):
        harvested(model, tmp_path, 6, hooks_tag=tag)


def test_a_hook_that_was_used_is_the_same(model, tmp_path) -> None:
    with model.hooks([(POINT, hook) for hook in (autoencoder().spliced(keep_features=True), add(VECTORS[1]))]):
        one = harvested(model, tmp_path, 6)
        assert len(harvested(model, tmp_path, 6)) == len(one)


def test_what_only_reads_or_is_disabled_does_not_count(model, tmp_path) -> None:
    one = harvested(model, tmp_path, 6)
    with model.hooks([(POINT, Detector())]):
        assert len(harvested(model, tmp_path, 6)) == len(one)
    half = Half(0.5)
    with model.hooks([half]):
        half.disable()
        assert len(harvested(model, tmp_path, 6)) == len(one)


def test_torch_hooks_and_patched_modules_count(model, tmp_path) -> None:
    layer = model.module.transformer.h[0]
    harvested(model, tmp_path / "bare", 6)
    handles = [
        lambda: layer.mlp.register_forward_hook(lambda _module, _args, output: output * 2),
        lambda: layer.register_forward_pre_hook(lambda _module, args: (args[0] * 2, *args[1:])),
        lambda: torch.nn.modules.module.register_module_forward_hook(lambda _module, _args, output: None),
    ]
    for number, register in enumerate(handles):
        handle = register()
        try:
            _is_code(model, tmp_path, str(number))
        finally:
            handle.remove()
    layer.mlp.forward = lambda x: x
    try:
        _is_code(model, tmp_path, "patched")
    finally:
        del layer.mlp.forward
    harvested(model, tmp_path / "bare", 6)


def _is_code(model, path, name) -> None:
    with pytest.raises(StoreError, match="hooks: "):
        harvested(model, path / "bare", 6)
    with pytest.warns(HooklineWarning, match="hooks_tag"):
        harvested(model, path / name, 6)
    with pytest.raises(StoreError, match="hooks_tag"):
        harvested(model, path / name, 6)
    for _ in range(2):
        harvested(model, path / f"{name} tagged", 6, hooks_tag="v1")


def test_what_transformers_notes_does_not_count(model, tmp_path) -> None:
    harvested(model, tmp_path, 6)
    model.module(torch.tensor([[1, 2]]), output_hidden_states=True, output_attentions=False)
    harvested(model, tmp_path, 6)


class Counting:
    """An object that is data: its calls are not part of it."""

    def __init__(self, factor) -> None:
        self.factor, self.calls = factor, 0

    def __call__(self, x):
        self.calls += 1
        return x * self.factor

    def as_data(self):
        return self.factor


class CountingTwice(Counting):
    pass


def test_an_object_may_be_data(model, tmp_path) -> None:
    hook = Counting(2)
    with model.hooks([(POINT, hook)]):
        harvested(model, tmp_path, 6)
        harvested(model, tmp_path, 6)
        assert hook.calls
        hook.factor = 3
        with pytest.raises(StoreError, match="Counting"):
            harvested(model, tmp_path, 6)


def test_what_is_data_and_what_is_code() -> None:
    assert content_digest(Counting([1, "a", None, {"b": VECTORS[0]}, (last, zero())])) is not None
    assert content_digest(CountingTwice(2)) is None  # it may do something else than the class that it is of
    for code in (len, object(), Counting, Counting(len), Counting([zero(), lambda x: x])):
        assert content_digest(code) is None


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


def test_positions_by_a_function_need_a_tag(model, tmp_path) -> None:
    def every(n):
        return lambda ids: torch.arange(len(ids)) % n == 0

    with pytest.warns(HooklineWarning, match=r"\(positions\).*hooks_tag"):
        harvested(model, tmp_path / "untagged", 6, positions=every(2))
    with pytest.raises(StoreError, match=r"\(positions\).*hooks_tag"):
        harvested(model, tmp_path / "untagged", 6, positions=every(2))
    for _ in range(2):
        harvested(model, tmp_path / "tagged", 6, positions=every(2), hooks_tag="every second")
    with pytest.raises(StoreError, match="hooks_tag is"):
        harvested(model, tmp_path / "tagged", 6, positions=every(3), hooks_tag="every third")
    with pytest.raises(StoreError, match="positions is"):
        harvested(model, tmp_path / "tagged", 6, positions=last, hooks_tag="every second")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (40, 700), (3, 5, 1024)])
def test_sums_see_every_value(dtype, shape) -> None:
    x = (torch.rand(shape) * 50).to(dtype)
    assert tensor_checksum(x) == tensor_checksum(x.clone())
    assert tensor_checksum(x) == tensor_checksum(x.T.contiguous().T if x.ndim == 2 else x)
    for place in {0, x.numel() // 2, x.numel() - 1}:
        other = x.clone()
        flat = other.view(-1)
        flat[place] = ~flat[place] if dtype == torch.bool else flat[place] + 1
        assert tensor_checksum(other) != tensor_checksum(x)
    if x.numel() > 1:
        assert tensor_checksum(x) != tensor_checksum(x.unsqueeze(0))


def test_sums_see_values_that_changed_places() -> None:
    x = torch.arange(64 * 2048).float()
    swapped = x.clone()
    swapped[[0, 2048]], swapped[[5, 7]] = x[[2048, 0]], x[[7, 5]]
    assert tensor_checksum(swapped[1:]) != tensor_checksum(x[1:])
    assert tensor_checksum(torch.cat([x[2048:4096], x[:2048], x[4096:]])) != tensor_checksum(x)


_ELSEWHERE = """
import sys
sys.path[:0] = {folders!r}
from test_identity import DATA
from hookline.store.identity import content_digest
print(*(content_digest(make(1)) for make in DATA.values()))
"""


def test_checksums_of_edits_are_the_same_in_another_process() -> None:
    script = _ELSEWHERE.format(folders=[str(folder) for folder in Path(__file__).parents[:2]])
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, text=True
    )
    assert done.stdout.split() == [content_digest(make(1)) for make in DATA.values()], done.stderr


@pytest.mark.parametrize(("part", "name", "value"), [("ln_1", "eps", 10.0), ("mlp", "act", nn.ReLU())])
def test_the_modules_of_a_model_count_as_they_print(model, tmp_path, part, name, value) -> None:
    module = model.module.transformer.h[0].get_submodule(part)
    before = getattr(module, name)
    harvested(model, tmp_path, 6)
    try:
        setattr(module, name, value)
        with pytest.raises(StoreError, match="modules is"):
            harvested(model, tmp_path, 6)
    finally:
        setattr(module, name, before)
    harvested(model, tmp_path, 6)


def test_the_configuration_counts(tmp_path) -> None:
    model = hookline.load("tinyworld")
    harvested(model, tmp_path, 6)
    model.module.config.layer_norm_epsilon = 0.5
    with pytest.raises(StoreError, match="config is"):
        harvested(model, tmp_path, 6)


def test_a_buffer_of_a_plain_network_counts(tmp_path) -> None:
    net, data = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(5, 4)
    hooked = hookline.hook(net)
    hookline.harvest(hooked, data, "0", tmp_path, progress=False)
    hookline.harvest(hooked, data, "0", tmp_path, progress=False)
    net[1].running_mean += 1
    with pytest.raises(StoreError, match="weights is"):
        hookline.harvest(hooked, data, "0", tmp_path, progress=False)


def test_a_name_of_the_folder_and_of_the_cache_do_not_count(tmp_path) -> None:
    model = hookline.load("tinyworld")
    harvested(model, tmp_path, 6)
    model.module.config.use_cache = not model.module.config.use_cache
    edit_manifest(tmp_path, lambda fields: fields["model"].update(id="elsewhere"))
    harvested(model, tmp_path, 6)


def test_a_store_of_an_earlier_version_is_read_but_not_resumed(tmp_path) -> None:
    path = shutil.copytree(Path(__file__).parent / "data" / "store_format_1", tmp_path / "store")
    store = hookline.store.LocalStore(path)
    assert store.verify().is_sound
    assert store.is_complete
    data = torch.arange(20.0).view(5, 4)
    assert torch.equal(store.rows()["1"], (data @ torch.arange(12.0).view(3, 4).T) * 2)
    net = hookline.hook(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    with pytest.raises(StoreError, match="earlier version"):
        hookline.harvest(net, data, "1", path, progress=False)


@pytest.mark.parametrize(
    "vector",
    [torch.arange(384.0).view(128, 3)[:, 0], torch.arange(256.0)[::2], torch.ones(1).expand(128)],
    ids=["column", "steps", "expanded"],
)
def test_vectors_that_are_not_contiguous(model, tmp_path, vector) -> None:
    with model.hooks([(POINT, add(vector))]):
        harvested(model, tmp_path, 6)
        harvested(model, tmp_path, 6)
    assert tensor_checksum(vector) == tensor_checksum(vector.clone()) != tensor_checksum(vector + 1)


@pytest.mark.parametrize(
    "x",
    [
        torch.eye(128)[0].to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["sparse", "nested"],
)
def test_sums_of_other_layouts(x) -> None:
    assert tensor_checksum(x) == tensor_checksum(x.clone())
    assert content_digest(Counting(x)) is not None


def test_an_edit_takes_no_sparse_vector() -> None:
    with pytest.raises(hookline.HooklineError, match=r"vector= is .*sparse.*vector\.to_dense\(\)"):
        add(torch.eye(128)[0].to_sparse())


def test_an_autoencoder_that_was_saved_and_loaded_is_the_same(model, tmp_path) -> None:
    sae = autoencoder()
    sae.cfg = with_fields(sae.cfg, metadata={"trained_by": "somebody"})
    sae.save(tmp_path / "sae")
    again = SparseAutoencoder.load(tmp_path / "sae")
    assert again.cfg.metadata != sae.cfg.metadata
    for each in (sae, again):
        with model.hooks([each.spliced(keep_error=False)]):
            harvested(model, tmp_path / "store", 6)
    topk = SAEConfig(architecture="topk", d_in=128, d_sae=16, k=2)
    assert content_digest(topk) != content_digest(with_fields(topk, k=3))


def test_a_tokenizer_that_was_used_is_the_same() -> None:
    tokenizer = hookline.load("tinyworld").tokenizer
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_digest(tokenizer) != before
    assert tokenizer_digest(None) is None


def test_the_same_edits_in_other_words_and_another_order_are_the_same(model, tmp_path) -> None:
    one, two = add(VECTORS[0]), add(VECTORS[1])
    with model.hooks([(0, one), (1, two)]):
        harvested(model, tmp_path, 6)
    with model.hooks([("blocks.1.hook_resid_post", two), ("blocks.0.hook_resid_post", one)]):
        harvested(model, tmp_path, 6)
    with model.hooks([(0, one), (0, two)]), pytest.raises(StoreError, match="hooks: "):
        harvested(model, tmp_path, 6)


def test_the_order_of_edits_at_one_point_counts(model, tmp_path) -> None:
    one, two = scale(2.0), add(VECTORS[1])
    with model.hooks([(0, one), (0, two)]):
        harvested(model, tmp_path, 6)
    with model.hooks([(0, two), (0, one)]), pytest.raises(StoreError, match="hooks: "):
        harvested(model, tmp_path, 6)


def test_a_refusal_names_the_hook_that_differs(model, tmp_path) -> None:
    hooks = [("blocks.0.hook_resid_post", zero(neuron=1)), (POINT, add(VECTORS[0]))]
    with model.hooks(hooks):
        harvested(model, tmp_path, 6)
    other = [hooks[0], (POINT, add(VECTORS[1]))]
    with model.hooks(other), pytest.raises(StoreError, match=rf"'{POINT}'.*other values") as refused:
        harvested(model, tmp_path, 6)
    assert "zero" not in str(refused.value)


def test_an_edit_that_was_added_counts_as_one_in_a_context(tmp_path) -> None:
    model = hookline.load("tinyworld")
    with model.hooks([(POINT, add(VECTORS[0]))]):
        harvested(model, tmp_path, 6)
    with pytest.raises(StoreError, match=r"hooks.*none"):
        harvested(model, tmp_path, 6)
    model.add_hook(POINT, add(VECTORS[0]))
    harvested(model, tmp_path, 6)
