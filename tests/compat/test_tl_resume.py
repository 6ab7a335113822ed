"""Runs from a layer, with masks and caches, as the tests of TransformerLens ask for them; points of toy models."""

from __future__ import annotations

import pytest
import torch

from hookline.compat.transformer_lens import (
    HookedTransformer,
    HookedTransformerConfig,
    HookedTransformerKeyValueCache,
    utils,
)
from hookline.errors import HooklineError

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
SIZES = {"n_layers": 3, "d_model": 12, "d_head": 4, "n_ctx": 10, "d_vocab": 20, "device": "cpu", "seed": 3}


def toy(**options) -> HookedTransformer:
    model = HookedTransformer(HookedTransformerConfig(**SIZES | {"act_fn": "gelu"} | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return model


def test_hooks_before_the_first_layer_that_runs_do_not_fire() -> None:
    model, calls = toy(), []
    stream = model(TOKENS, stop_at_layer=1)

    def note(x, hook):
        calls.append(hook.name)

    model.add_hook("hook_embed", note)
    hooks = [("blocks.0.attn.hook_k", note), ("blocks.1.hook_resid_pre", note), ("blocks.2.hook_mlp_out", note)]
    with pytest.warns(UserWarning, match="layer -2.*hook_k.*hook_embed"):
        found = model.run_with_hooks(stream, start_at_layer=-2, fwd_hooks=hooks)
    assert calls == ["blocks.1.hook_resid_pre", "blocks.2.hook_mlp_out"]
    model.reset_hooks()
    assert torch.equal(found, model(TOKENS))


@pytest.mark.parametrize("kind", ["standard", "rotary", "shortformer"])
def test_a_mask_with_a_gap_is_as_good_as_removing_the_tokens(kind) -> None:
    model = toy(positional_embedding_type=kind)
    mask = torch.ones_like(TOKENS)
    assert torch.equal(model(TOKENS, attention_mask=mask), model(TOKENS))
    mask[:, 1] = 0
    kept = [0, 2, 3]
    torch.testing.assert_close(model(TOKENS, attention_mask=mask)[:, kept], model(TOKENS[:, kept]))
    stream, tokens, positions, same = model.input_to_embed(TOKENS, attention_mask=mask)
    assert (positions is None) == (kind != "shortformer")
    options = {"tokens": tokens, "shortformer_pos_embed": positions, "attention_mask": same}
    found = model(stream, start_at_layer=0, **options)
    torch.testing.assert_close(found, model(TOKENS, attention_mask=mask))


def test_other_positions_of_a_shortformer() -> None:
    model = toy(positional_embedding_type="shortformer")
    stream, _, positions, _ = model.input_to_embed(TOKENS)
    assert torch.equal(positions, model.W_pos[:4].expand(2, -1, -1))
    found = model(stream, start_at_layer=0, shortformer_pos_embed=positions * 0)
    edited = model.run_with_hooks(TOKENS, fwd_hooks=[("hook_pos_embed", lambda x, hook: x * 0)])
    assert torch.equal(found, edited)
    assert not torch.allclose(found, model(TOKENS))
    with pytest.raises(HooklineError, match="shortformer"):
        toy()(stream, start_at_layer=0, shortformer_pos_embed=positions)


def test_positions_of_a_shortformer_are_not_in_the_stream() -> None:
    model = toy(positional_embedding_type="shortformer")
    _, cache = model.run_with_cache(TOKENS)
    assert torch.equal(cache["pos_embed"], model.W_pos[:4].expand(2, -1, -1))
    parts, labels = cache.decompose_resid(return_labels=True)
    assert labels[:2] == ["embed", "0_attn_out"]
    torch.testing.assert_close(parts.sum(0), cache["resid_post", -1])


@pytest.mark.parametrize("kind", ["standard", "rotary", "shortformer"])
def test_a_run_from_a_layer_after_a_frozen_cache(kind) -> None:
    model = toy(positional_embedding_type=kind)
    cache = HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 2)
    model(TOKENS[:, :2], past_kv_cache=cache)
    new = TOKENS[:, 2:]
    with pytest.raises(HooklineError, match="freeze"):
        model.input_to_embed(new, past_kv_cache=cache)
    cache.freeze()
    stream, tokens, positions, mask = model.input_to_embed(new, past_kv_cache=cache)
    assert mask.shape == TOKENS.shape
    options = {"tokens": tokens, "shortformer_pos_embed": positions, "attention_mask": mask, "past_kv_cache": cache}
    torch.testing.assert_close(model(stream, start_at_layer=0, **options), model(TOKENS)[:, 2:])
    stream = model(new, stop_at_layer=2, past_kv_cache=cache)
    torch.testing.assert_close(model(stream, start_at_layer=2, **options), model(TOKENS)[:, 2:])
    cache.unfreeze()
    with pytest.raises(HooklineError, match="freeze"):
        model(stream, start_at_layer=2, past_kv_cache=cache)


@pytest.mark.parametrize("is_folded", [False, True])
def test_points_inside_the_norm_of_solu_ln(is_folded) -> None:
    model = toy(act_fn="solu_ln")
    if is_folded:
        model.process_weights_()
        assert bool((model.module.blocks[1].mlp.ln.weight == 1).all())
        assert "blocks.1.mlp.ln.w" not in model.state_dict()
    _, cache = model.run_with_cache(TOKENS)
    names = [name.removeprefix("blocks.1.mlp.") for name in cache if name.startswith("blocks.1.mlp.")]
    assert names == ["hook_pre", "hook_mid", "ln.hook_scale", "ln.hook_normalized", "hook_post"]
    mid, norm = cache["mid", 1], model.module.blocks[1].mlp.ln
    assert cache["mid", -2] is mid
    assert utils.get_act_name("mid", 1) == "blocks.1.mlp.hook_mid"
    torch.testing.assert_close(mid, utils.solu(cache["pre", 1]))
    scale = (mid.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    torch.testing.assert_close(cache["blocks.1.mlp.ln.hook_scale"], scale)
    normalized = cache["blocks.1.mlp.ln.hook_normalized"]
    torch.testing.assert_close(normalized, (mid - mid.mean(-1, keepdim=True)) / scale)
    torch.testing.assert_close(cache["post", 1], normalized * norm.weight + norm.bias)


def test_edits_inside_the_norm_of_solu_ln() -> None:
    model = toy(act_fn="solu_ln")
    clean = model.run_with_cache(TOKENS)[1]["post", 0]
    kept = []
    for name, factor in (("hook_mid", 2.0), ("ln.hook_scale", 0.5), ("ln.hook_normalized", 2.0)):
        hooks = [(f"blocks.0.mlp.{name}", lambda x, hook, factor=factor: x * factor)]
        hooks += [("blocks.0.mlp.hook_post", lambda x, hook: kept.append(x))]
        model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    norm = model.module.blocks[0].mlp.ln
    torch.testing.assert_close(kept[0], clean, rtol=1e-2, atol=1e-2)  # a norm undoes a factor, up to its epsilon
    assert not torch.equal(kept[0], clean)
    for found in kept[1:]:
        torch.testing.assert_close(found - norm.bias, (clean - norm.bias) * 2)


def test_a_model_without_this_norm_has_no_such_points() -> None:
    model = toy()
    assert "blocks.0.mlp.hook_mid" not in model.hook_dict
    with pytest.raises(HooklineError, match="hook_mid"):
        model.run_with_cache(TOKENS, names_filter="blocks.0.mlp.hook_mid")
