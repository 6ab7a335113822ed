"""The native toy transformer is found by the anatomy, proved, trained, saved, and does what each option says."""

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import hookline
from hookline import HooklineError
from hookline.compat.transformer_lens._impl.native import NativeConfig, NativeTransformer
from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig, to_native

SMALL = {
    **{"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 10},
    **{"intermediate_size": 50, "max_position_embeddings": 32, "seed": 0},
}
LLAMA = {
    "normalization": "RMS",
    "gated_mlp": True,
    "hidden_act": "silu",
    "num_key_value_heads": 2,
    "positions": "rotary",
}
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
CASES = {
    "plain": {},
    "attention only": {"attention_only": True},
    "no norm": {"normalization": "none"},
    "no norm, attention only": {"normalization": "none", "attention_only": True, "positions": "shortformer"},
    "LNPre": {"normalization": "LNPre", "hidden_act": "gelu_new"},
    "like llama": LLAMA,
    "RMSPre": {"normalization": "RMSPre", "positions": "rotary", "rotary_dim": 4, "rotary_adjacent_pairs": True},
    "shortformer": {"positions": "shortformer", "hidden_act": "solu_ln", "final_rms": True},
    "alibi": {"positions": "alibi", "hidden_act": "quick_gelu"},
    "no positions": {"positions": "none", "hidden_act": "gelu_fast"},
    "both ways": {"is_causal": False, "hidden_act": "gelu"},
    "both ways, alibi": {"is_causal": False, "positions": "alibi"},
    "windows": WINDOWS,
    "windows, alibi": WINDOWS | {"positions": "alibi"},
    "parallel": {"parallel_attn_mlp": True, "scale_attn_by_inverse_layer_idx": True},
    "parallel, no norm": {"parallel_attn_mlp": True, "normalization": "none", "hidden_act": "solu"},
    "solu_ln, RMS": {"hidden_act": "solu_ln", "normalization": "RMS"},
    "caps": {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 0.5, "attention_scale": 1.0},
    "normed queries": {"qk_norm": True, "positions": "rotary", "num_key_value_heads": 1},
    "norms after": {"norms_after": True, "normalization": "RMSPre", "hidden_act": "gelu_pytorch_tanh"},
    "norms after, attention only": {"norms_after": True, "attention_only": True},
    "normed embeddings": {"embedding_norm": True},
    "tied": {"tie_word_embeddings": True},
    "other logits": {"output_size": 7},
    "one of each": {"num_hidden_layers": 1, "num_attention_heads": 1},
}
CAUSAL = [name for name, options in CASES.items() if options.get("is_causal", True)]
TOKENS = (torch.arange(16) * 7 % 40).view(2, 8)


def toy(case: str = "plain", *, is_nudged: bool = True, **options) -> NativeTransformer:
    """A toy model whose biases and norms are not what they are at first, so that a mistake in them shows."""
    module = NativeTransformer(NativeConfig(**SMALL | CASES[case] | options)).eval()
    if is_nudged:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """At which positions."""
    return (a - b).abs().amax((0, 2)) > 1e-6


@pytest.mark.parametrize("case", CASES)
def test_every_point_is_proved(case) -> None:
    model = hookline.hook(toy(case))
    assert isinstance(model, hookline.HookedModel)
    report = model.verify()
    assert report.failed() == []
    assert {f"blocks.0.attn.hook_{name}" for name in ("q", "k", "v", "attn_scores", "pattern", "z", "result")} <= set(
        model.hook_dict
    )
    assert ("blocks.0.mlp.hook_post" in model.hook_dict) != ("attention only" in case)
    assert model(TOKENS).isfinite().all()


@pytest.mark.parametrize("case", CAUSAL)
@torch.no_grad()
def test_generating_with_a_cache_and_padding_is_generating_without(case) -> None:
    module = toy(case)
    ids, mask = torch.tensor([[0, 0, 5, 6, 1], [3, 4, 5, 6, 1]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for_logits = options | {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    with_cache, without = (module.generate(ids, use_cache=use, **for_logits) for use in (True, False))
    assert torch.equal(with_cache.sequences, without.sequences)
    for a, b in zip(with_cache.logits, without.logits, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    alone = module.generate(ids[:1, 2:], attention_mask=mask[:1, 2:], **options)
    assert torch.equal(alone[0], with_cache.sequences[0, 2:])


@torch.no_grad()
def test_attention_both_ways_generates_without_a_cache_and_refuses_one() -> None:
    module = toy("both ways")
    assert module.generate(TOKENS[:, :3], max_new_tokens=2, do_sample=False).shape == (2, 5)
    with pytest.raises(HooklineError, match="use_cache=False"):
        module(TOKENS, use_cache=True)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_run_from_the_middle_and_eager_attention_give_the_same(case) -> None:
    module = toy(case)
    model = hookline.hook(module)
    logits, cache = model.run_with_cache(TOKENS)
    last = len(module.blocks) - 1
    again = model(cache["resid_pre", last], start_at_layer=last)
    assert torch.allclose(again, logits, atol=1e-6)
    assert torch.equal(model(TOKENS, stop_at_layer=last), cache["resid_pre", last])
    module.set_attn_implementation("eager")
    assert torch.allclose(model(TOKENS), logits, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_gradients_reach_every_parameter(case) -> None:
    module = toy(case)
    module(TOKENS).logits.square().mean().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        # A key's bias adds the same to all scores of a query, unless what is added is turned or normed by position.
        assert name.endswith("k_proj.bias") or parameter.grad.any(), name


@pytest.mark.parametrize("case", ["plain", "no norm, attention only", "like llama", "alibi"])
def test_training_lowers_the_loss(case) -> None:
    model = hookline.hook(toy(case, is_nudged=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(TOKENS, return_type="loss")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_checkpointed_layers_have_the_same_gradients() -> None:
    module = toy("like llama").train()
    grads = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        module.zero_grad()
        module(TOKENS).logits.square().mean().backward()
        grads.append([parameter.grad.clone() for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_seed_gives_the_same_weights_whatever_was_drawn_before() -> None:
    first = toy(is_nudged=False)
    torch.randn(3)
    second, other = toy(is_nudged=False), toy(is_nudged=False, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embed.weight, other.embed.weight)
    torch.manual_seed(5)
    unseeded = toy(is_nudged=False, seed=None)
    torch.manual_seed(5)
    assert torch.equal(unseeded.unembed.weight, toy(is_nudged=False, seed=None).unembed.weight)


@pytest.mark.parametrize("mode", ["gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal"])
def test_weights_are_drawn_as_wide_as_the_mode_says(mode) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 20, "vocab_size": 200, "intermediate_size": 90}
    model = hookline.hook(NativeTransformer(NativeConfig(**sizes, init_mode=mode, seed=0)))
    drawn = {"W_E": (200, 64), "W_U": (64, 200), "W_Q": (64, 80), "W_O": (20, 4 * 64), "W_in": (64, 90)}
    for name, (into, out) in drawn.items():
        kind, _, shape = mode.partition("_")
        expected = {"gpt2": 0.1, "xavier": (2 / (into + out)) ** 0.5, "kaiming": (2 / into) ** 0.5}[kind]
        values = getattr(model, name).detach()
        assert values.std().item() == pytest.approx(expected, rel=0.05)
        is_bounded = bool(values.abs().max() <= expected * 3**0.5 + 1e-6)
        assert is_bounded == (shape == "uniform")
    assert not any(getattr(model, name).any() for name in ("b_Q", "b_K", "b_V", "b_O", "b_in", "b_out", "b_U"))


def test_weights_that_are_not_to_be_drawn_are_torchs_own() -> None:
    torch.manual_seed(0)
    left = toy(is_nudged=False, init_mode=None, seed=None)
    assert left.unembed.bias.any()  # torch draws biases too


def test_the_classic_weights_are_views_of_the_models() -> None:
    module = toy("like llama")
    model = hookline.hook(module)
    assert model.W_Q.shape == (2, 4, 24, 10)
    assert model.W_K.shape == (2, 2, 24, 10)
    before = module(TOKENS).logits
    with torch.no_grad():
        model.blocks[0].attn.W_V.zero_()
        model.blocks[0].attn.b_V.zero_()
    _, cache = model.run_with_cache(TOKENS)
    assert not cache["v", 0].any()
    assert not torch.equal(module(TOKENS).logits, before)


@pytest.mark.parametrize("case", ["plain", "tied", "like llama", "caps", "shortformer", "both ways", "windows"])
@torch.no_grad()
def test_saved_models_come_back(case, tmp_path) -> None:
    module = toy(case)
    module.save_pretrained(tmp_path)
    for back in (NativeTransformer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(back) is NativeTransformer
        assert torch.equal(back.eval()(TOKENS).logits, module(TOKENS).logits)
        assert (back.unembed.weight is back.embed.weight) == (case == "tied")
        assert back.config.to_dict() | {"_name_or_path": ""} == module.config.to_dict()
    assert NativeTransformer.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_what_a_checkpoint_lacks_is_drawn() -> None:
    module = toy()
    state = {name: value for name, value in module.state_dict().items() if "unembed" not in name}
    back = NativeTransformer.from_pretrained(None, config=module.config, state_dict=state)
    assert torch.equal(back.blocks[1].attn.q_proj.weight, module.blocks[1].attn.q_proj.weight)
    assert torch.equal(back.blocks[0].ln1.bias, module.blocks[0].ln1.bias)
    assert back.unembed.weight.detach().std().item() == pytest.approx(0.8 / 24**0.5, rel=0.1)
    assert not back.unembed.bias.any()


@torch.no_grad()
def test_copies_and_pickles_are_the_same_model() -> None:
    model = hookline.hook(toy("like llama"))
    logits = model(TOKENS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(TOKENS), logits)
        other.module.embed.weight.zero_()
    assert torch.equal(model(TOKENS), logits)


@pytest.mark.parametrize("case", [name for name in CASES if name != "caps"])
@torch.no_grad()
def test_parts_sum_to_the_stream_and_to_the_logit(case) -> None:
    logits, cache = hookline.hook(toy(case)).run_with_cache(TOKENS)
    parts, labels = cache.decompose_resid(return_labels=True)
    assert torch.allclose(parts.sum(0), cache["resid_post", -1], atol=1e-5)
    assert "embed_other" not in labels
    assert ("pos_embed" in labels) == (CASES[case].get("positions", "standard") == "standard")
    tokens, rows = torch.tensor([5, 2]), torch.arange(2)
    attributed = cache.logit_attrs(parts, tokens).sum(0) + cache.logit_bias(tokens)[:, None]
    assert torch.allclose(attributed, logits[rows, :, tokens], atol=1e-4)
    assert torch.allclose(cache.logit_lens()[-1], logits, atol=1e-5)


@torch.no_grad()
def test_what_may_be_looked_at() -> None:
    other = TOKENS.clone()
    other[:, 3] = 39
    for case, seen in {"plain": [3, 4, 5, 6, 7], "both ways": list(range(8))}.items():
        module = toy(case)
        assert differs(module(TOKENS).logits, module(other).logits).nonzero().flatten().tolist() == seen
    pattern = hookline.hook(toy("windows")).run_with_cache(TOKENS)[1]["pattern", 1]
    back = torch.arange(8)[:, None] - torch.arange(8)
    assert torch.equal(pattern[0, 0] > 0, (back >= 0) & (back < 3))


@pytest.mark.parametrize("case", ["both ways", "both ways, alibi"])
@torch.no_grad()
def test_padding_is_not_looked_at_by_what_comes_before_it(case) -> None:
    module, mask, other = toy(case), torch.ones_like(TOKENS), TOKENS.clone()
    mask[:, 6:], other[:, 6:] = 0, 1
    padded, otherwise = (module(ids, attention_mask=mask).logits for ids in (TOKENS, other))
    assert torch.allclose(padded[:, :6], otherwise[:, :6], atol=1e-6)
    assert differs(module(TOKENS).logits, padded)[:6].all()


@torch.no_grad()
def test_where_positions_come_in() -> None:
    same = torch.full((1, 8), 5)
    seen = {
        case: hookline.hook(toy(case)).run_with_cache(same)[1]
        for case in ("plain", "shortformer", "like llama", "alibi", "no positions")
    }
    by_place = {case: [bool(differs(cache[name, 0].flatten(2), cache[name, 0].flatten(2)[:, :1])[1:].all())
                for name in ("resid_pre", "v", "q", "rot_q")] for case, cache in seen.items()}  # fmt: skip
    assert by_place == {
        "plain": [True, True, True, True],
        "shortformer": [False, False, True, True],
        "like llama": [False, False, False, True],
        "alibi": [False, False, False, False],
        "no positions": [False, False, False, False],
    }
    assert (seen["alibi"]["pattern", 0][0, :, -1].diff() > 0).all()  # nearer counts more
    assert torch.allclose(seen["no positions"]["pattern", 0][0, 0, -1], torch.full((8,), 1 / 8))


@pytest.mark.parametrize("adjacent", [False, True])
@torch.no_grad()
def test_rotary_positions_are_relative(adjacent) -> None:
    module = toy(positions="rotary", rotary_dim=6, rotary_adjacent_pairs=adjacent)
    places = torch.arange(8)[None]
    logits = module(TOKENS, position_ids=places).logits
    assert torch.allclose(module(TOKENS, position_ids=places + 9).logits, logits, atol=1e-5)
    assert not torch.allclose(module(TOKENS, position_ids=places * 2).logits, logits, atol=1e-3)


@torch.no_grad()
def test_caps_and_scales_hold() -> None:
    logits, cache = hookline.hook(toy("caps")).run_with_cache(TOKENS)
    assert logits.abs().max() <= 0.5
    scores = cache["attn_scores", 0]
    assert scores[scores > -100].abs().max() <= 1.5
    scaled = hookline.hook(toy("parallel")).run_with_cache(TOKENS)[1]
    products = scaled["q", 1][0, 3, 0] @ scaled["k", 1][0, :4, 0].T
    assert torch.allclose(scaled["attn_scores", 1][0, 0, 3, :4], products / 10**0.5 / 2, atol=1e-6)


def test_the_loss_is_that_of_the_labels_and_embeddings_may_be_given() -> None:
    module = toy("like llama")
    model = hookline.hook(module)
    assert torch.allclose(module(TOKENS, labels=TOKENS).loss, model(TOKENS, return_type="loss"))
    assert torch.equal(module(inputs_embeds=module.embed(TOKENS)).logits, module(TOKENS).logits)
    assert torch.equal(module(TOKENS, logits_to_keep=2).logits, module(TOKENS).logits[:, -2:])


def test_the_dtype_is_the_configurations() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        module = toy("alibi", dtype=dtype)
        assert module(TOKENS).logits.dtype == dtype
        assert hookline.hook(module).cfg.dtype == dtype


def test_what_the_model_says_of_itself() -> None:
    cfg = hookline.hook(toy("no norm, attention only")).cfg
    assert (cfg.norm, cfg.positions, cfg.d_head) == ("none", "added to queries and keys", 10)
    assert [hookline.hook(toy(case)).cfg.positions for case in ("plain", "like llama", "alibi", "no positions")] == [
        *("added to the stream", "rotary", "alibi", "none")
    ]
    with pytest.raises(hookline.UnknownPointError, match="such norm"):
        hookline.hook(toy("no norm")).point("blocks.0.ln1.hook_scale")
    with pytest.raises(hookline.UnknownPointError, match="no MLP"):
        hookline.hook(toy("attention only")).point("blocks.0.hook_mlp_in")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hiden_size": 3}, "no hiden_size"),
        ({"normalization": "batch"}, "'RMSPre'"),
        ({"positions": "sinusoidal"}, "'shortformer'"),
        ({"hidden_act": "tanh"}, "'solu_ln'"),
        ({"init_mode": "muP"}, "'kaiming_normal'"),
        ({"num_hidden_layers": 0}, "at least 1"),
        ({"num_attention_heads": 0, "head_dim": None}, "at least 1"),
        ({"num_attention_heads": 5, "head_dim": None}, "pass head_dim"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "multiple of 3"),
        ({"positions": "rotary", "rotary_dim": 5}, "even"),
        ({"positions": "rotary", "rotary_dim": 12}, "at most head_dim=10"),
        ({"rotary_dim": 4}, "positions='rotary'"),
        ({"layer_types": ["full_attention"]}, "1 for 2"),
        ({"layer_types": ["global", "local"]}, "'global'"),
        ({"layer_types": ["sliding_attention"] * 2}, "needs a sliding_window"),
        ({"sliding_window": 3}, "sliding_attention"),
        (WINDOWS | {"is_causal": False}, "looks back"),
        ({"attention_only": True, "parallel_attn_mlp": True}, "needs an MLP"),
        ({"attention_only": True, "gated_mlp": True}, "needs an MLP"),
        ({"gated_mlp": True, "hidden_act": "solu_ln"}, "no gate"),
        ({"normalization": "none", "norms_after": True}, "needs a normalization"),
        ({"normalization": "none", "final_rms": True}, "needs a normalization"),
        ({"tie_word_embeddings": True, "output_size": 7}, "as many logits"),
        ({"attn_logit_softcapping": 0.0}, "positive"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, why) -> None:
    with pytest.raises(HooklineError, match=why):
        NativeConfig(**SMALL | options)


def test_calls_that_cannot_be_honoured_are_refused() -> None:
    module = toy()
    with pytest.raises(HooklineError, match="not both"):
        module()
    with pytest.raises(HooklineError, match=r"position 32 .*max_position_embeddings=32"):
        module(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(HooklineError, match="set_attn_implementation"):
        module(TOKENS, output_attentions=True)
    with pytest.raises(TypeError, match="cache_positions"):
        module(TOKENS, cache_positions=None)
    capped = toy("caps")
    capped.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="softcap"):
        capped(TOKENS)


def tl_cfg(**options) -> HookedTransformerConfig:
    return HookedTransformerConfig(**{"n_layers": 2, "d_model": 24, "n_ctx": 16, "d_head": 6, "d_vocab": 40} | options)


def test_a_configuration_in_transformer_lenss_words_fills_itself_in() -> None:
    cfg = tl_cfg(positional_embedding_type="rotary")
    assert (cfg.n_heads, cfg.d_mlp, cfg.d_vocab_out, cfg.rotary_dim) == (4, 96, 40, 6)
    assert cfg.attn_scale == pytest.approx(6**0.5)
    assert cfg.initializer_range == pytest.approx(0.8 / 24**0.5)
    assert cfg.n_params == 2 * (4 * 24 * 24 + 2 * 24 * 96)
    assert tl_cfg(attn_only=True, act_fn=None).n_params == 2 * 4 * 24 * 24
    assert tl_cfg(init_mode="xavier_normal").initializer_range == 1.0
    assert HookedTransformerConfig.unwrap(cfg) is cfg
    again = HookedTransformerConfig.unwrap(cfg.to_dict())
    assert again == cfg
    assert "n_layers': 2" in repr(cfg)
    assert not cfg.is_layer_norm_activation()
    assert tl_cfg(act_fn="solu_ln").is_layer_norm_activation()
    with pytest.raises(HooklineError, match="n_layers"):
        HookedTransformerConfig.from_dict({"n_layer": 2})


def test_a_seed_in_a_configuration_is_set_everywhere() -> None:
    drawn = []
    for _ in range(2):
        tl_cfg(seed=7)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


@torch.no_grad()
def test_every_option_reaches_the_native_model() -> None:
    plain = NativeTransformer(to_native(tl_cfg(seed=0)))(TOKENS).logits
    changes = {
        **{"act_fn": "gelu", "eps": 1e-1, "use_attn_scale": False, "attn_scale": 1.0, "use_qk_norm": True},
        **{"normalization_type": None, "attention_dir": "bidirectional", "attn_only": True, "seed": 1, "d_mlp": 30},
        **{"initializer_range": 1.0, "init_mode": "kaiming_normal", "scale_attn_by_inverse_layer_idx": True},
        **{"positional_embedding_type": "alibi", "parallel_attn_mlp": True, "gated_mlp": True, "final_rms": True},
        **{"n_key_value_heads": 2, "post_embedding_ln": True, "tie_word_embeddings": True, "n_heads": 2},
        **{"use_normalization_before_and_after": True, "attn_scores_soft_cap": 0.1, "output_logits_soft_cap": 0.1},
        **{"init_weights": False, "d_vocab_out": 50, "dtype": torch.float64},
    }
    for name, value in changes.items():
        logits = NativeTransformer(to_native(tl_cfg(**{"seed": 0} | {name: value})))(TOKENS).logits
        is_same = logits.shape == plain.shape and logits.dtype == plain.dtype and torch.allclose(logits, plain)
        assert not is_same, name
    rotary = {"positional_embedding_type": "rotary", "seed": 0}
    turned = NativeTransformer(to_native(tl_cfg(**rotary)))(TOKENS).logits
    for options in ({"rotary_dim": 4}, {"rotary_base": 50}, {"rotary_adjacent_pairs": True}):
        assert not torch.allclose(NativeTransformer(to_native(tl_cfg(**rotary | options)))(TOKENS).logits, turned)
    windows = {"use_local_attn": True, "attn_types": ["global", "local"], "window_size": 2, "seed": 0}
    assert not torch.allclose(NativeTransformer(to_native(tl_cfg(**windows)))(TOKENS).logits, plain)


def test_flags_for_more_points_change_nothing_since_they_are_there() -> None:
    flags = dict.fromkeys(
        ("use_attn_result", "use_split_qkv_input", "use_attn_in", "use_hook_mlp_in", "use_hook_tokens"), True
    )
    model = hookline.hook(NativeTransformer(to_native(tl_cfg(**flags))))
    names = ["attn.hook_result", "hook_q_input", "hook_attn_in", "hook_mlp_in"]
    assert {*(f"blocks.1.{name}" for name in names), "hook_tokens"} <= set(model.hook_dict)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_experts": 2, "experts_per_token": 1}, "num_experts=2"),
        ({"load_in_4bit": True}, "load_in_4bit"),
        ({"n_devices": 2}, "n_devices"),
        ({"use_yarn_rope": True}, "use_yarn_rope"),
        ({"rotary_base_local": 5.0}, "rotary_base_local"),
        ({"rotary_scaling_factor": 2.0}, "rotary_scaling_factor"),
        ({"relative_attention_num_buckets": 8}, "relative_attention_num_buckets"),
        ({"decoder_start_token_id": 0}, "decoder_start_token_id"),
        ({"ungroup_grouped_query_attention": True}, "n_key_value_heads"),
        ({"uses_rms_norm": True}, 'normalization_type="RMS"'),
        ({"positional_embedding_type": "relative_positional_bias"}, "positional_embedding_type"),
        ({"normalization_type": "LayerNorm"}, "normalization_type"),
        ({"attention_dir": "backward"}, "attention_dir"),
        ({"init_mode": "muP"}, "init_mode"),
        ({"act_fn": "xielu"}, "act_fn"),
        ({"d_vocab": -1}, "d_vocab"),
        ({"original_architecture": "Olmo2ForCausalLM"}, "Olmo2ForCausalLM"),
        ({"attn_types": ["local", "local"], "window_size": 2}, "use_local_attn"),
        ({"use_local_attn": True, "attn_types": ["near", "far"], "window_size": 2}, "'global' and 'local'"),
        ({"use_local_attn": True, "attn_types": ["local"], "window_size": 2}, "1 for 2"),
        ({"use_attn_scale": False, "attn_scale": 3.0}, "attn_scale"),
    ],
)
def test_options_that_cannot_be_had_are_refused_by_name(options, why) -> None:
    with pytest.raises(HooklineError, match=why):
        to_native(tl_cfg(**options))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"d_head": 7}, "not a multiple"),
        ({"act_fn": None}, "act_fn"),
        ({"use_local_attn": True}, "window_size"),
        ({"num_experts": 2}, "num_experts"),
    ],
)
def test_configurations_that_cannot_be_are_refused_at_once(options, why) -> None:
    with pytest.raises(HooklineError, match=why):
        tl_cfg(**options)
