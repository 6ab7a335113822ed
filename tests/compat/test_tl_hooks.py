"""Hooks and caches by TransformerLens's methods: what is cached, and that caches can be used as theirs are."""

import pytest
import torch
from tiny_models import nudged
from torch import nn

from hookline.compat.transformer_lens import (
    ActivationCache,
    HookedRootModule,
    HookedTransformer,
    HookPoint,
    patching,
    utils,
)
from hookline.errors import HooklineError, UnknownPointError

TOKENS = torch.arange(3, 17).view(2, 7)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("gpt2", hf_model=nudged("gpt2"))


@pytest.fixture(scope="module")
def grouped() -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing("llama", hf_model=nudged("llama"))


@pytest.fixture
def cache(model) -> ActivationCache:
    return model.run_with_cache(TOKENS)[1]


# Adding and removing


def test_arguments_by_position(model) -> None:
    seen = []
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: seen.append("first"))
    model.add_hook(lambda name: name == "blocks.0.hook_resid_pre", lambda x, hook: seen.append("kept"), "fwd", True)
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: seen.append("before"), "fwd", False, None, True)
    assert [*model.list_hooks()] == ["blocks.0.hook_resid_pre"]
    assert len(model.list_hooks(including_permanent=False)["blocks.0.hook_resid_pre"]) == 2
    assert model.list_hooks("blocks.1.*") == model.list_hooks(dir="bwd") == {}
    model(TOKENS)
    model.reset_hooks(True, "bwd")
    model(TOKENS)
    model.remove_all_hook_fns("fwd")
    model(TOKENS)
    model.reset_hooks(including_permanent=True)
    model(TOKENS)
    assert seen == ["before", "first", "kept"] * 2 + ["kept"]


def test_check_hooks_to_add(model) -> None:
    model.check_hooks_to_add(None, "blocks.0.attn.hook_result", print)
    with pytest.raises(UnknownPointError):
        model.check_hooks_to_add(None, "blocks.0.attn.hook_rseult", print)


def test_contexts_leave_others_alone(model) -> None:
    def zero(x, hook):
        return torch.zeros_like(x)

    with model.hooks([("blocks.0.hook_attn_out", zero)]) as same:
        assert same is model
        inside = model(TOKENS)
        with model.hooks([("blocks.1.hook_attn_out", zero)]):
            assert not torch.equal(model(TOKENS), inside)
        assert torch.equal(model(TOKENS), inside)
    with model.hooks([("blocks.0.hook_attn_out", zero)], reset_hooks_end=False):
        pass
    assert torch.equal(model(TOKENS), inside)
    model.reset_hooks()
    assert not torch.equal(model(TOKENS), inside)


def test_context_of_a_point(model) -> None:
    def note(x, hook):
        hook.ctx["mean"] = x.mean()

    model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_resid_pre", note)])
    assert "mean" in model.hook_dict["blocks.0.hook_resid_pre"].ctx
    model.run_with_cache(TOKENS, clear_contexts=True)
    assert model.hook_dict["blocks.0.hook_resid_pre"].ctx == {}


def test_mod_dict(model) -> None:
    assert model.mod_dict["blocks.0.attn.hook_q"] is model.hook_dict["blocks.0.attn.hook_q"]
    assert model.mod_dict["transformer.h.0"] is model.module.transformer.h[0]


# Caching


@pytest.mark.parametrize("incl_bwd", [False, True])
def test_caching_hooks(model, incl_bwd) -> None:
    store: dict = {}
    assert model.add_caching_hooks(lambda name: "resid_post" in name, incl_bwd, cache=store) is store
    model(TOKENS, return_type="loss").backward()
    model.reset_hooks()
    model.zero_grad()
    _, cache = model.run_with_cache(
        TOKENS, names_filter=lambda name: "resid_post" in name, incl_bwd=incl_bwd, return_type="loss"
    )
    assert set(store) == set(cache)
    for name in store:
        torch.testing.assert_close(store[name], cache[name])


def test_caching_hooks_for_a_context(model) -> None:
    store, forward, backward = model.get_caching_hooks(
        ["blocks.0.attn.hook_q", "blocks.0.attn.hook_pattern"], pos_slice=-1
    )
    assert backward == []
    with model.hooks(forward):
        model(TOKENS)
    _, cache = model.run_with_cache(TOKENS, pos_slice=-1)
    for name in store:
        assert torch.equal(store[name], cache[name])
    assert store["blocks.0.attn.hook_pattern"].shape == (2, 4, 1, 7)


def test_older_ways_to_cache(model) -> None:
    some, every = {}, {}
    model.cache_some(some, lambda name: name == "hook_embed", remove_batch_dim=True)
    model(TOKENS[:1])
    model.reset_hooks()
    model.cache_all(every)
    model(TOKENS[:1])
    model.reset_hooks()
    assert list(some) == ["hook_embed"]
    assert some["hook_embed"].shape == (7, model.cfg.d_model)
    assert set(every) == set(model.run_with_cache(TOKENS)[1])


def test_dict_instead_of_a_cache(model) -> None:
    _, plain = model.run_with_cache(TOKENS, return_cache_object=False, names_filter="hook_embed")
    assert type(plain) is dict
    with pytest.raises(HooklineError, match="add_caching_hooks"):
        model.run_with_cache(TOKENS, reset_hooks_end=False)


def test_flags_say_what_is_cached_unasked(model, grouped) -> None:
    def has(name: str, names_filter=None) -> bool:
        return any(key.endswith(name) for key in model.run_with_cache(TOKENS, names_filter=names_filter)[1])

    for point, switch in (
        ("hook_result", model.set_use_attn_result),
        ("hook_q_input", model.set_use_split_qkv_input),
        ("hook_attn_in", model.set_use_attn_in),
    ):
        assert not has(point)
        assert not has(point, lambda name: True)
        assert has(point, lambda name, point=point: name.endswith(point)), "asked for by name it is always there"
        switch(True)
        assert has(point)
        assert has(point, lambda name: True)
        switch(False)
    model.set_use_hook_mlp_in(True)
    assert model.cfg.use_hook_mlp_in
    model.set_ungroup_grouped_query_attention(True)
    grouped.set_ungroup_grouped_query_attention(True)
    assert grouped.cfg.ungroup_grouped_query_attention
    grouped.set_ungroup_grouped_query_attention(False)


@pytest.mark.parametrize("flag", [False, True])
def test_caching_some_layers(model, flag) -> None:
    model.set_use_attn_result(flag)
    resid = model(TOKENS, stop_at_layer=1)
    for names_filter in (None, lambda name: True):
        _, first = model.run_with_cache(TOKENS, names_filter=names_filter, stop_at_layer=1)
        _, rest = model.run_with_cache(resid, names_filter=names_filter, start_at_layer=1)
        assert {name.split(".")[1] for name in first if "blocks" in name} == {"0"}
        assert {name.split(".")[1] for name in rest if "blocks" in name} == {"1", "2", "3"}
        assert ("blocks.0.attn.hook_result" in list(first)) is flag
        assert ("ln_final.hook_scale" in list(first), "ln_final.hook_scale" in list(rest)) == (False, True)
    model.set_use_attn_result(False)


def test_predicates_mean_what_they_mean_there(model) -> None:
    seen = []
    everything = lambda name: True  # noqa: E731
    model.run_with_hooks(TOKENS, fwd_hooks=[(everything, lambda x, hook: seen.append(hook.name))])
    assert "hook_tokens" not in seen
    assert not [name for name in seen if name.endswith(("hook_result", "_input", "attn_in", "attn.hook_in"))]
    assert "hook_tokens" not in list(model.run_with_cache(TOKENS)[1])
    model.cfg.use_hook_tokens = True
    assert "hook_tokens" in list(model.run_with_cache(TOKENS)[1])
    model.cfg.use_hook_tokens = False
    undo = model.add_hook(everything, lambda grad, hook: None, "bwd")
    model(TOKENS, return_type="loss").backward()
    undo()
    model.zero_grad()


@pytest.mark.parametrize("where", [2, -1, (1, 4), [0, 3], slice(2, None), torch.tensor([1, 2]), utils.Slice((0, 6, 2))])
def test_positions_are_columns(model, cache, where) -> None:
    _, some = model.run_with_cache(TOKENS, pos_slice=where)
    kept = utils.Slice.unwrap(where)
    torch.testing.assert_close(some["resid_post", 1], kept.apply(cache["resid_post", 1], 1))
    torch.testing.assert_close(some["z", 1], kept.apply(cache["z", 1], 1))
    torch.testing.assert_close(some["pattern", 1], kept.apply(cache["pattern", 1], 2))


def test_positions_must_go_up(model) -> None:
    with pytest.raises(HooklineError, match="strictly increasing"):
        model.run_with_cache(TOKENS, pos_slice=[3, 1])


# The cache


def test_it_is_a_dict_like_theirs(model, cache) -> None:
    assert cache.model is model
    assert cache.cache_dict["hook_embed"] is cache["embed"]
    assert cache.has_embed
    assert cache.has_pos_embed
    assert list(cache.keys()) == list(cache) == list(cache.cache_dict)
    with pytest.raises(UnknownPointError):
        cache["k9"]
    assert cache["q1"] is cache["q", 1] is cache[utils.get_act_name("q", 1)]
    mine = ActivationCache({name: x for name, x in cache.items() if "resid" in name}, model)
    torch.testing.assert_close(mine.accumulated_resid(), cache.accumulated_resid())


def test_it_changes_in_place(model) -> None:
    cache = model.run_with_cache(TOKENS[:1])[1]
    assert cache.to(torch.bfloat16) is cache
    assert cache["z", 0].dtype == torch.bfloat16
    assert cache.remove_batch_dim() is cache
    assert cache["z", 0].shape == (7, 4, model.cfg.d_head)
    assert not cache.has_batch_dim
    assert cache.remove_batch_dim() is cache
    with pytest.raises(AssertionError, match="batch"):
        model.run_with_cache(TOKENS)[1].remove_batch_dim()


def test_autodiff_can_be_switched(cache) -> None:
    try:
        cache.toggle_autodiff(False)
        assert not torch.is_grad_enabled()
    finally:
        cache.toggle_autodiff(True)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("where", [None, -1, (1, 4), [0, 3], utils.Slice(2)])
def test_methods_take_slices(cache, where) -> None:
    def at(x: torch.Tensor) -> torch.Tensor:
        return (where if isinstance(where, utils.Slice) else utils.Slice(where)).apply(x, 2)

    torch.testing.assert_close(cache.decompose_resid(pos_slice=where), at(cache.decompose_resid()))
    torch.testing.assert_close(
        cache.decompose_resid(apply_ln=True, pos_slice=where), at(cache.decompose_resid(apply_ln=True))
    )
    torch.testing.assert_close(cache.accumulated_resid(pos_slice=where), at(cache.accumulated_resid()))
    heads = cache.stack_head_results(-1, False, True)
    torch.testing.assert_close(cache.stack_head_results(-1, False, True, where), at(heads))
    cache.compute_head_results()
    torch.testing.assert_close(cache.stack_head_results(-1, False, True, where), at(heads))
    neurons = cache.stack_neuron_results(2, None, (0, 3))
    torch.testing.assert_close(cache.stack_neuron_results(2, where, (0, 3)), at(neurons))
    full = cache.get_full_resid_decomposition(2, True)
    torch.testing.assert_close(cache.get_full_resid_decomposition(2, True, pos_slice=where), at(full))
    attrs = cache.logit_attrs(cache.decompose_resid(), 5)
    torch.testing.assert_close(cache.logit_attrs(cache.decompose_resid(pos_slice=where), 5, None, where), at(attrs))


def test_attributions_sum_to_the_logit(model) -> None:
    logits, cache = model.run_with_cache(TOKENS)
    right, wrong = torch.tensor([4, 27]), torch.tensor([11, 50])
    parts = cache.logit_attrs(cache.get_full_resid_decomposition(pos_slice=-1), right, wrong, -1)
    rows = torch.arange(2)
    bias = model.b_U[right] - model.b_U[wrong]
    torch.testing.assert_close(
        parts.sum(0) + bias, logits[rows, -1, right] - logits[rows, -1, wrong], atol=1e-4, rtol=1e-4
    )


def test_rows_and_neurons(model, cache) -> None:
    torch.testing.assert_close(cache.apply_slice_to_batch_dim((0, 1))["z", 0], cache["z", 0][:1])
    one = cache.apply_slice_to_batch_dim(1)
    torch.testing.assert_close(one.decompose_resid(), cache.decompose_resid()[:, 1])
    neurons = cache.get_neuron_results(1, neuron_slice=[2, 5], pos_slice=-1)
    torch.testing.assert_close(cache.get_neuron_results(1, 5, -1), neurons[..., 1, :])
    vector = torch.randn(model.cfg.d_model)
    torch.testing.assert_close(cache.get_neuron_results(1, [2, 5], -1, vector), neurons @ vector)
    torch.testing.assert_close(
        cache.stack_neuron_results(1, project_output_onto=vector), cache.stack_neuron_results(1) @ vector
    )
    torch.testing.assert_close(
        cache.get_full_resid_decomposition(1, expand_neurons=False, project_output_onto=vector),
        cache.get_full_resid_decomposition(1, expand_neurons=False) @ vector,
    )


def test_labels(model, cache) -> None:
    heads, labels = cache.stack_head_results(2, True)
    assert labels == model.all_head_labels()[: len(heads)]
    assert cache.accumulated_resid(1, True, return_labels=True)[1] == ["0_pre", "0_mid", "1_pre"]
    assert cache.stack_activation("scale", -1, "ln1").shape == (model.cfg.n_layers, 2, 7, 1)


# Patching, and models of one's own


def test_patching_gives_tensors(model) -> None:
    clean = TOKENS.flip(0)
    _, cache = model.run_with_cache(clean)

    def metric(logits):
        return logits[:, -1, 5].mean()

    whole = patching.get_act_patch_resid_pre(model, TOKENS, cache, metric)
    assert isinstance(whole, torch.Tensor)
    assert whole.shape == (model.cfg.n_layers, 7)
    hook = (
        "blocks.1.attn.hook_z",
        lambda z, hook: torch.cat([z[:, :, :2], cache[hook.name][:, :, 2:3], z[:, :, 3:]], 2),
    )
    heads = patching.get_act_patch_attn_head_out_all_pos(model, TOKENS, cache, metric)
    torch.testing.assert_close(heads[1, 2], metric(model.run_with_hooks(TOKENS, fwd_hooks=[hook])))
    every = patching.get_act_patch_block_every(model, TOKENS, cache, metric=metric)
    torch.testing.assert_close(every[0], whole)


def test_a_model_of_ones_own() -> None:
    class Net(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.hook_mid = HookPoint()
            self.setup()

        def forward(self, x):
            return self.hook_mid(self.fc(x)).relu()

    net, x = Net(), torch.randn(2, 4)
    output, cache = net.run_with_cache(x)
    assert list(cache) == list(net.hook_dict) == ["hook_mid"]
    store = net.add_caching_hooks()
    net(x)
    net.reset_hooks()
    assert torch.equal(store["hook_mid"], cache["hook_mid"])
    with net.hooks([("hook_mid", lambda x, hook: -x)]) as same:
        assert torch.equal(same(x), (-net.fc(x)).relu())
    assert torch.equal(net(x), output)


def test_hooks_of_a_point_by_direction_level_and_permanence() -> None:
    point = HookPoint()
    hooks = [lambda x, hook: None, lambda x, hook: None]
    point.add_hook(hooks[0], level=1)
    point.add_hook(hooks[1], "bwd", is_permanent=True)
    assert point.has_hooks("fwd")
    assert not point.has_hooks("bwd", including_permanent=False)
    assert point.has_hooks(level=1)
    assert not point.has_hooks(level=2)
    point.remove_hooks("both", level=2)
    assert point.has_hooks("fwd")
    point.remove_hooks("both", level=1)
    assert not point.has_hooks("fwd")
    assert point.has_hooks("bwd")
    with pytest.raises(HooklineError, match="direction"):
        point.has_hooks("up")
