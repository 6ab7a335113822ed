"""What the tests of TransformerLens 3.5.1 ask of the interface, and our own tests did not."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from hookline.compat.transformer_lens import (
    HookedEncoder,
    HookedRootModule,
    HookedTransformer,
    HookedTransformerConfig,
    HookedTransformerKeyValueCache,
    HookedTransformerKeyValueCacheEntry,
    HookPoint,
    utils,
)
from hookline.compat.transformer_lens._impl.direct_paths import (
    get_act_patch_direct_path,
    get_act_patch_direct_path_all_sources,
)
from hookline.compat.transformer_lens._impl.kv_cache import get_pos_offset
from hookline.compat.transformer_lens._impl.published import published_name
from hookline.compat.transformer_lens.components import GatedMLP, GroupedQueryAttention, LayerNorm, LayerNormPre
from hookline.compat.transformer_lens.hook_points import HookIntrospectionMixin
from hookline.compat.transformer_lens.loading import fill_missing_keys, get_pretrained_model_config
from hookline.errors import HooklineError

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
SIZES = {"n_layers": 3, "d_model": 12, "d_head": 4, "n_ctx": 10, "d_vocab": 20, "device": "cpu", "seed": 3}


def toy(**options) -> HookedTransformer:
    return HookedTransformer(HookedTransformerConfig(**SIZES | {"act_fn": "gelu"} | options))


def test_every_model_is_a_hooked_root_module() -> None:
    assert isinstance(toy(), HookedRootModule)
    assert issubclass(HookedEncoder, HookedRootModule)
    assert not isinstance(nn.Linear(1, 1), HookedRootModule)

    class Net(HookedRootModule):
        pass

    assert not isinstance(toy(), Net)


def test_hooks_of_a_model_have_levels() -> None:
    model, calls = toy(), []
    model.add_hook("hook_embed", lambda x, hook: calls.append(1), level=2)
    model.reset_hooks(level=1)
    model(TOKENS)
    assert calls == [1]
    assert model.hook_dict["hook_embed"].fwd_hooks[0].context_level == 2
    model.reset_hooks(level=2)
    model(TOKENS)
    assert calls == [1]


def test_handles_of_hooks() -> None:
    def double(x, hook):
        return x * 2

    model = toy()
    clean = model(TOKENS)
    model.add_perma_hook("blocks.0.hook_resid_post", double)
    point = model.hook_dict["blocks.0.hook_resid_post"]
    (handle,) = point.fwd_hooks
    assert (handle.user_hook, handle.is_permanent, handle.context_level) == (double, True, None)
    assert "1 fwd" in repr(point)
    assert "bwd" not in repr(point)
    assert model.list_hooks(including_permanent=False) == {}
    assert not torch.equal(model(TOKENS), clean)
    handle.hook.remove()
    assert torch.equal(model(TOKENS), clean)
    assert repr(HookPoint()) == "HookPoint()"


def test_any_class_with_a_hook_dict_can_list_hooks() -> None:
    class Bag(HookIntrospectionMixin):
        def __init__(self) -> None:
            self.hook_dict = {"a": HookPoint(), "b": HookPoint()}

    bag = Bag()
    bag.hook_dict["a"].add_hook(torch.zeros_like)
    assert [*bag.list_hooks()] == [*bag.list_hooks(["a", "b"])] == [*bag.list_hooks(lambda name: name < "b")] == ["a"]
    assert bag.list_hooks("b") == bag.list_hooks(dir="bwd") == {}


def test_named_parameters_with_a_prefix() -> None:
    model = toy()
    names = [name for name, _ in model.named_parameters(prefix="lens")]
    assert names == [f"lens.{name}" for name, _ in model.named_parameters()]
    assert "lens.embed.W_E" in names
    assert [*model.named_parameters(recurse=False)] == []


def test_the_config_of_an_encoder_follows_its_dtype() -> None:
    cfg = HookedTransformerConfig(n_layers=1, d_model=8, d_head=4, n_ctx=8, d_vocab=9, act_fn="gelu", device="cpu")
    model = HookedEncoder(cfg)
    assert model.double().cfg.dtype == torch.float64
    assert model.bfloat16().cfg.dtype == next(model.parameters()).dtype == torch.bfloat16


def test_entries_of_a_cache_are_what_the_next_run_reads() -> None:
    model = toy(n_key_value_heads=1)
    whole = model(TOKENS)
    kept = HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 2)
    model(TOKENS[:, :2], past_kv_cache=kept)
    made = HookedTransformerKeyValueCache(
        [HookedTransformerKeyValueCacheEntry(each.past_keys, each.past_values) for each in kept.entries],
        kept.previous_attention_mask,
    )
    assert get_pos_offset(made, 2) == len(made) - 1 == 2
    assert get_pos_offset(None, 2) == 0
    made.freeze()
    for _ in range(2):
        torch.testing.assert_close(model(TOKENS[:, 2:], past_kv_cache=made), whole[:, 2:])
    assert made[0].past_keys.shape == (2, 2, 1, 4)
    made[0].append(made[0].past_keys, made[0].past_values)  # frozen
    made.unfreeze()
    model(TOKENS[:, 2:], past_kv_cache=made)
    torch.testing.assert_close(made[1].past_keys, model.run_with_cache(TOKENS)[1]["k", 1])
    made.entries[1].past_values = made[1].past_values * 0
    tail = torch.tensor([[9], [9]])
    changed = model(tail, past_kv_cache=made)
    assert not torch.allclose(changed, model(torch.cat([TOKENS, tail], 1))[:, -1:])


@torch.no_grad()
def test_a_compiled_model_respects_hooks() -> None:
    model = toy(n_layers=1)
    compiled, clean = torch.compile(model, backend="eager"), model(TOKENS)
    assert torch.equal(compiled(TOKENS), clean)
    model.add_hook("blocks.0.hook_resid_post", lambda x, hook: x * 0)
    assert torch.equal(compiled(TOKENS), model(TOKENS))
    assert not torch.equal(compiled(TOKENS), clean)
    model.reset_hooks()
    assert torch.equal(compiled(TOKENS), clean)


def test_appending_to_an_entry() -> None:
    entry = HookedTransformerKeyValueCacheEntry.init_cache_entry(toy().cfg, "cpu", 2)
    new = torch.randn(2, 3, 3, 4)
    keys, _ = entry.append(new, -new)
    assert torch.equal(keys, entry.past_keys)
    assert torch.equal(entry.past_values, -new)


def test_classes_of_components() -> None:
    model = toy(n_key_value_heads=1, gated_mlp=True)
    assert isinstance(model.blocks[0].attn, GroupedQueryAttention)
    assert isinstance(model.blocks[1].mlp, GatedMLP)
    assert type(model.ln_final) is LayerNorm
    model.process_weights_()
    assert type(model.blocks[2].ln1) is type(model.ln_final) is LayerNormPre
    with pytest.raises(HooklineError, match=r"part.*model"):
        GroupedQueryAttention(model.cfg)


def test_positions_of_padding_are_zero() -> None:
    model = toy()
    found = model.pos_embed(TOKENS, 0, attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]))
    assert not found[0, :2].any()
    assert not found[1, 3].any()
    assert torch.equal(found[0, 2:], model.W_pos[:2])
    assert torch.equal(found[1, :3], model.W_pos[:3])


def test_a_run_of_later_layers_caches_only_these() -> None:
    model = toy()
    _, cache = model.run_with_cache(model(TOKENS, stop_at_layer=1), start_at_layer=1)
    assert {name.split(".")[0] for name in cache} == {"blocks", "ln_final", "unembed"}
    assert not any(name.startswith("blocks.0.") for name in cache)


def test_direct_paths_from_one_head_to_later_ones() -> None:
    model = toy()
    model.process_weights_()
    clean, corrupted = TOKENS[:1], TOKENS[1:]
    caches = [model.run_with_cache(each)[1] for each in (clean, corrupted)]
    given = (model, corrupted, *caches, lambda logits: logits[0, -1, 3] - logits[0, -1, 4])
    with torch.no_grad():
        found = get_act_patch_direct_path(*given, 0, 1, "v", verbose=False)
        every = get_act_patch_direct_path_all_sources(*given, "v", verbose=False)
    assert not found[0].any()
    assert found[1:].all()
    assert torch.equal(every[0, 1], found)
    assert not every[2].any()
    z = caches[0]["z", 0][:, :, 1] - caches[1]["z", 0][:, :, 1]
    change = z @ model.W_O[0, 1] / caches[1]["blocks.2.ln1.hook_scale"] @ model.W_V[2, 0]

    def add(v, hook):
        v[:, :, 0] += change
        return v

    with torch.no_grad():
        logits = model.run_with_hooks(corrupted, fwd_hooks=[("blocks.2.attn.hook_v", add)])
    torch.testing.assert_close(found[2, 0], given[-1](logits))


def test_direct_paths_warn_of_norms_that_are_not_folded() -> None:
    model = toy()
    with torch.no_grad():
        model.blocks[0].ln1.w.fill_(2.0)
    cache = model.run_with_cache(TOKENS)[1]
    with pytest.warns(UserWarning, match="fold"):
        get_act_patch_direct_path(model, TOKENS, cache, cache, lambda logits: logits.sum(), 2, 0, verbose=False)


def test_embeddings_of_generated_tokens() -> None:
    model = toy()
    options = {"max_new_tokens": 2, "do_sample": False, "stop_at_eos": False, "verbose": False}
    tokens, embeds = (model.generate(TOKENS, return_type=kind, **options) for kind in ("tokens", "embeds"))
    assert torch.equal(embeds, model.W_E[tokens])


def test_errors_that_transformer_lens_raises_as_assertions() -> None:
    model = toy()
    with pytest.raises(AssertionError, match="eos_token_id"):
        model.generate(TOKENS, verbose=False)
    with pytest.raises(AssertionError, match="tokenizer"):
        model.generate("text", verbose=False)
    with pytest.raises(AssertionError, match="top_k"):
        utils.sample_logits(torch.randn(1, 4), top_k=0)
    with pytest.raises(AssertionError, match="tokens"):
        utils.sample_logits(torch.randn(1, 4), freq_penalty=1.0)
    with pytest.raises(AssertionError, match="square"):
        _ = utils.FactoredMatrix(torch.randn(6, 2), torch.randn(2, 3)).BA


def test_a_config_without_weights() -> None:
    cfg = get_pretrained_model_config("tinyworld", n_ctx=16, fold_ln=True)
    own = HookedTransformer.from_pretrained("tinyworld", device="cpu").cfg
    assert (cfg.n_ctx, cfg.normalization_type) == (16, own.normalization_type)
    assert (cfg.d_model, cfg.n_layers, cfg.n_heads, cfg.d_vocab) == (
        own.d_model,
        own.n_layers,
        own.n_heads,
        own.d_vocab,
    )
    with pytest.warns(UserWarning, match="positions"):
        get_pretrained_model_config("tinyworld", n_ctx=10**6)


def test_missing_weights_are_the_model_s_own() -> None:
    model = toy()
    whole = model.state_dict()
    assert fill_missing_keys(model, whole).keys() == whole.keys()
    with pytest.warns(UserWarning, match=r"embed\.W_E"):
        filled = fill_missing_keys(model, {name: each for name, each in whole.items() if name != "embed.W_E"})
    assert torch.equal(filled["embed.W_E"], model.W_E)


@pytest.mark.parametrize(
    ("name", "official"),
    [
        ("solu-2l", "NeelNanda/SoLU_2L512W_C4_Code"),
        ("solu-12l", "NeelNanda/SoLU_12L1536W_C4_Code"),
        ("solu-4l-wiki", "NeelNanda/SoLU_4L512W_Wiki_Finetune"),
        ("attn-only-2l", "NeelNanda/Attn_Only_2L512W_C4_Code"),
        ("attn-only-demo", "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr"),
        ("gelu-1l-c4-code", "NeelNanda/GELU_1L512W_C4_Code"),
        ("NeelNanda/gpt-neox-tokenizer-digits", None),
        ("gpt2", None),
    ],
)
def test_names_of_models_in_transformer_lens_own_format(name, official) -> None:
    assert published_name(name) == official


@pytest.mark.parametrize("kind", ["standard", "shortformer"])
def test_a_model_in_transformer_lens_own_format(kind, monkeypatch, tmp_path) -> None:
    source = toy(act_fn="solu_ln", positional_embedding_type=kind)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    sizes = ("d_model", "n_layers", "d_mlp", "d_head", "n_heads", "n_ctx", "d_vocab", "act_fn", "attn_only")
    config = {name: getattr(source.cfg, name) for name in sizes}
    config |= {"normalization": "LN", "shortformer_pos": kind == "shortformer"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(source.state_dict(), tmp_path / "SoLU_final.pth")
    files = [each.name for each in tmp_path.iterdir()]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda self, name: files)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, file, **_: str(tmp_path / file))
    model = HookedTransformer.from_pretrained_no_processing("solu-3l", device="cpu")
    assert torch.equal(model(TOKENS), source(TOKENS))
    assert (model.cfg.model_name, model.cfg.act_fn) == ("SoLU_3L512W_C4_Code", "solu_ln")
    if kind == "shortformer":  # its positions are added after the norms, whose weights cannot be folded
        return
    processed = HookedTransformer.from_pretrained("solu-3l", device="cpu")
    torch.testing.assert_close(processed(TOKENS).log_softmax(-1), source(TOKENS).log_softmax(-1))
    short = HookedTransformer.from_pretrained_no_processing("solu-3l", device="cpu", first_n_layers=1)
    assert torch.equal(short(TOKENS, stop_at_layer=1), source(TOKENS, stop_at_layer=1))


def test_padding_sides_survive_a_tokenizer_with_bos() -> None:
    tokenizer = HookedTransformer.from_pretrained("tinyworld", device="cpu").tokenizer
    tokenizer.padding_side = "left"
    assert utils.get_tokenizer_with_bos(tokenizer).padding_side == "left"
