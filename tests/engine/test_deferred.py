"""Full caches compute most activations when they are read: the same bits as if they had been recorded."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import tiny_models
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hookline
from hookline.engine._recording.deferred import Activations, Deferred

SCALE, NORMALIZED = "blocks.1.ln1.hook_scale", "blocks.1.ln1.hook_normalized"
SCORES, PATTERN = "blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_pattern"
MID, Q = "blocks.1.hook_resid_mid", "blocks.1.attn.hook_rot_q"
DERIVED = [SCALE, NORMALIZED, SCORES, PATTERN, MID, Q]

KINDS = [
    *((tiny_models.causal_lm, kind) for kind in ("gpt2", "llama", "qwen3", "gemma2", "gpt_oss", "bloom", "mpt", "opt")),
    *((tiny_models.causal_lm, kind) for kind in ("falcon", "phi3", "granite", "mistral", "mamba")),
    *((tiny_models.encoder, kind) for kind in ("bert", "distilbert", "modernbert")),
    *((tiny_models.seq2seq, kind) for kind in ("t5", "bart", "t5gemma")),
]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own


@pytest.fixture(scope="module")
def llama():
    module = tiny_models.causal_lm("llama")
    return module, tiny_models.inputs(module)


def is_same(one: Tensor, other: Tensor) -> bool:
    bits = [x.contiguous().view(torch.uint8) if x.ndim else x for x in (one, other)]
    return (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device) and torch.equal(*bits)


def recorded(model, inputs, names, **options):
    """The activations at the points named, recorded at once."""
    cache = model.run_with_cache(**inputs, names_filter=list(names), **options)[1]
    assert not isinstance(cache._tensors, Activations)
    return cache


def is_deferred(cache, name: str) -> bool:
    return type(cache._tensors.found[name]) is Deferred


@pytest.mark.parametrize(("make", "kind"), KINDS, ids=[f"{make.__name__}-{kind}" for make, kind in KINDS])
def test_every_point_is_what_is_recorded_if_it_is_named(make, kind) -> None:
    module = make(kind)
    inputs = tiny_models.inputs(module)
    model = hookline.hook(module)
    with torch.no_grad():
        full, again = (model.run_with_cache(**inputs)[1] for _ in range(2))
        there = recorded(model, inputs, dict.fromkeys(name.partition("#")[0] for name in full))
    assert list(full) == list(there) == list(again)
    assert any(is_deferred(full, name) for name in full)
    assert [name for name in full if not is_same(full[name], there[name])] == []
    assert [name for name in reversed(list(again)) if not is_same(again[name], there[name])] == []


@pytest.mark.parametrize("name", DERIVED)
def test_a_point_recorded_alone(llama, name) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    full = model.run_with_cache(**inputs)[1]
    assert is_deferred(full, name)
    assert is_same(full[name], recorded(model, inputs, [name])[name])
    assert full[name] is full[name]
    assert not full[name].requires_grad


def overwrite(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)


def overwrite_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.fill_(float("nan"))


@pytest.mark.parametrize(
    "change",
    [
        overwrite,
        overwrite_data,
        lambda module: module.double(),
        lambda module: module.load_state_dict({k: torch.zeros_like(v) for k, v in module.state_dict().items()}),
        lambda module: setattr(module.model.layers[1].input_layernorm, "variance_epsilon", 1.0),
        lambda module: module.to("meta"),
        lambda module: module.train(),
    ],
    ids=["in place", "through data", "dtype", "state dict", "epsilon", "meta", "train"],
)
def test_changes_of_the_model_after_the_run(change) -> None:
    module = tiny_models.causal_lm("llama")
    inputs = tiny_models.inputs(module)
    model = hookline.hook(module)
    with torch.no_grad():
        full, there = model.run_with_cache(**inputs)[1], recorded(model, inputs, DERIVED)
    change(module)
    assert all(is_same(full[name], there[name]) for name in DERIVED)


@pytest.mark.parametrize("name", [*DERIVED, "blocks.1.hook_resid_pre", "blocks.1.attn.hook_q", "blocks.1.attn.hook_v"])
def test_edits_in_the_same_run(llama, name) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    hooks = [(name, lambda x: x * 0.5)]
    with torch.no_grad():
        full = model.run_with_cache(**inputs, fwd_hooks=hooks)[1]
        there = recorded(model, inputs, full, fwd_hooks=hooks)
        with model.hooks(fwd_hooks=hooks):
            around = model.run_with_cache(**inputs)[1]
        remove = model.add_hook(*hooks[0])
        standing = model.run_with_cache(**inputs)[1]
        remove()
        plain = model.run_with_cache(**inputs)[1]
    for cache in (full, around, standing):
        assert [each for each in cache if not is_same(cache[each], there[each])] == []
    assert not is_same(plain[name], there[name])


def test_hooks_of_other_libraries(llama) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    plain = model.run_with_cache(**inputs)[1]  # its run is not used again while there are other hooks
    layer = module.model.layers[1]
    handles = [each.register_forward_hook(lambda *given: given[-1] * 2) for each in (layer.mlp, layer.input_layernorm)]
    try:
        full = model.run_with_cache(**inputs)[1]
        there = recorded(model, inputs, full)
    finally:
        for handle in handles:
            handle.remove()
    assert [each for each in full if not is_same(full[each], there[each])] == []
    assert not is_same(full["blocks.1.hook_mlp_out"], plain["blocks.1.hook_mlp_out"])
    again = model.run_with_cache(**inputs)[1]
    assert [each for each in again if not is_same(again[each], plain[each])] == []


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_gradient_modes(llama, mode) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    with mode():
        logits, full = model.run_with_cache(**inputs)
        there = recorded(model, inputs, DERIVED)
    assert logits.requires_grad == (mode is torch.enable_grad)
    assert all(is_same(full[name], there[name]) for name in DERIVED)
    assert all(full[name].is_inference() == there[name].is_inference() for name in DERIVED)


def test_gradients_are_recorded(llama) -> None:
    module, inputs = llama
    cache = hookline.hook(module).run_with_cache(**inputs, incl_bwd=True, loss_fn=torch.sum)[1]
    assert PATTERN in cache
    assert f"{PATTERN}_grad" in cache


def test_autocast(llama) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        full, there = model.run_with_cache(**inputs)[1], recorded(model, inputs, DERIVED)
    assert all(is_same(full[name], there[name]) for name in DERIVED)


AROUND_READING = {
    "autocast": lambda read: _within(torch.autocast("cpu", torch.bfloat16), read),
    "fake tensors": lambda read: _within(FakeTensorMode(allow_non_fake_inputs=True), read),
    "default device": lambda read: _within(torch.device("meta"), read),
    "grad": lambda read: torch.func.grad(lambda x: x * read().sum())(torch.tensor(1.0)),
    "vmap": lambda read: torch.func.vmap(lambda x: x * read().sum())(torch.ones(2)),
    "inference mode": lambda read: _within(torch.inference_mode(), read),
}


def _within(context, read) -> None:
    with context:
        read()


@pytest.mark.parametrize("way", AROUND_READING)
def test_what_surrounds_the_reader(llama, way) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    with torch.no_grad():
        full, there = model.run_with_cache(**inputs)[1], recorded(model, inputs, DERIVED)
    for name in DERIVED:
        assert is_deferred(full, name)
        AROUND_READING[way](lambda name=name: full[name])
        assert not is_deferred(full, name)
        assert type(full[name]) is Tensor
        assert is_same(full[name], there[name])
        assert not full[name].is_inference()


def test_what_is_read_can_be_written_to(llama) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    with torch.no_grad():
        full, there = model.run_with_cache(**inputs)[1], recorded(model, inputs, DERIVED)
    for name in ("blocks.1.hook_resid_pre", Q, "blocks.1.attn.hook_rot_k", "blocks.1.hook_attn_out"):
        full[name].zero_()
    assert full[Q].eq(0).all()
    assert all(is_same(full[name], there[name]) for name in DERIVED if name != Q)


def test_a_mapping_like_any_other(llama) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    full, there = model.run_with_cache(**inputs)[1], recorded(model, inputs, DERIVED)
    names = list(full)
    assert len(full) == len(names)
    assert PATTERN in full
    assert ("pattern", 1) in full
    assert is_deferred(full, PATTERN)
    assert "pattern" in repr(full)
    assert is_deferred(full, PATTERN)
    assert is_same(dict(full.items())[PATTERN], there[PATTERN])
    assert len([*full.values()]) == len(names)


COPIES = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "deepcopy": copy.deepcopy,
    "to": lambda cache: cache.to("cpu"),
    "rows": lambda cache: cache.rows(slice(0, 2)),
}


@pytest.mark.parametrize("way", COPIES)
def test_copies(llama, way) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    full, there = model.run_with_cache(**inputs)[1], recorded(model, inputs, DERIVED)
    other = COPIES[way](full)
    assert all(is_same(other[name], there[name].to(other[name].device)) for name in DERIVED)
    assert is_deferred(full, PATTERN)  # the copy has its own


def test_files(llama, tmp_path) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    full = model.run_with_cache(**inputs)[1]
    full.save(tmp_path / "cache.safetensors")
    loaded = hookline.ActivationCache.load(tmp_path / "cache.safetensors")
    assert list(loaded) == list(full)
    assert all(is_same(loaded[name], full[name].cpu()) for name in full)


def test_rows_and_the_batch_axis(llama) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    full, there = model.run_with_cache(**inputs)[1], recorded(model, inputs, DERIVED)
    one = full.rows(1)
    assert is_deferred(one, PATTERN)
    assert all(is_same(one[name], there[name][1]) for name in DERIVED)
    single = {name: x[:1] for name, x in inputs.items()}
    bare = model.run_with_cache(**single, remove_batch_dim=True)[1]
    assert bare[PATTERN].ndim == 3
    assert all(is_same(bare[name], recorded(model, single, [name])[name][0]) for name in DERIVED)


def test_memory(llama) -> None:
    module, inputs = llama
    full = hookline.hook(module).run_with_cache(**inputs)[1]
    unread = full.nbytes
    for _ in full.values():
        pass
    assert full.nbytes > unread


def test_padding_is_noted(llama) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :2] = 0
    full = model.run_with_cache(inputs["input_ids"], attention_mask=mask)[1]
    there = model.run_with_cache(inputs["input_ids"], attention_mask=mask, names_filter=DERIVED)[1]
    for name in DERIVED:
        assert is_same(full[name], there[name])
        assert torch.equal(full[name].padding_mask, there[name].padding_mask)


def test_threads_get_one_tensor(llama) -> None:
    module, inputs = llama
    full = hookline.hook(module).run_with_cache(**inputs)[1]
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(full[PATTERN])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(x) for x in found}) == 1


def test_no_deferred_activation_keeps_the_model() -> None:
    module = tiny_models.causal_lm("llama")
    inputs = tiny_models.inputs(module)
    full = hookline.hook(module).run_with_cache(**inputs)[1]
    kept = full._tensors.found
    layer = weakref.ref(module.model.layers[1].self_attn)
    del module, full
    gc.collect()
    assert layer() is None
    assert kept[PATTERN].compute().shape[1] == 4


def test_dropout_leaves_the_pattern_as_recorded() -> None:
    module = tiny_models.causal_lm("llama", attention_dropout=0.5).train()
    inputs = tiny_models.inputs(module)
    model = hookline.hook(module)
    torch.manual_seed(0)
    full = model.run_with_cache(**inputs)[1]
    torch.manual_seed(0)
    there = recorded(model, inputs, DERIVED)
    assert all(is_same(full[name], there[name]) for name in DERIVED)


def test_a_cache_inside_a_hook(llama) -> None:
    module, inputs = llama
    model = hookline.hook(module)
    inner = []

    def look(_x):
        if not inner:  # it is called in the run that it starts, too
            inner.append({})
            inner.append(model.run_with_cache(**inputs)[1])

    with torch.no_grad():
        there = recorded(model, inputs, DERIVED)
        model.run_with_hooks(**inputs, fwd_hooks=[("blocks.0.attn.hook_z", look)])
    assert all(is_same(inner[1][name], there[name]) for name in DERIVED)


def test_plain_networks() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    full = hookline.hook(net).run_with_cache(x)[1]
    assert torch.equal(full["0"], net[0](x))
    assert full["0"].lt(0).any()  # before the activation function overwrites it
