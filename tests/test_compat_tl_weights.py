"""Weights, parts and state dicts by TransformerLens's names: the model's own tensors, to be read and written."""

import pytest
import torch
from tiny_models import causal_lm, nudged

from hookline.compat.transformer_lens import FactoredMatrix, HookedTransformer, utils
from hookline.errors import HooklineError

TOKENS = torch.arange(3, 17).view(2, 7)
KINDS = (
    "gpt2",
    "gpt_neox",
    "gptj",
    "phi",
    "falcon",
    "llama",
    "gemma2",
    "gemma3_text",
    "qwen2",
    "qwen3",
    "granite",
    "olmo2",
)


def wrapped(kind: str) -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing(kind, hf_model=nudged(kind))


# Parts


@pytest.mark.parametrize("kind", KINDS)
def test_parts_do_what_they_do_in_the_model(kind) -> None:
    model = wrapped(kind)
    logits, cache = model.run_with_cache(TOKENS)
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(model.embed(TOKENS), cache["hook_embed"], **close)
    torch.testing.assert_close(model.W_E[TOKENS], cache["hook_embed"], **close)
    torch.testing.assert_close(model.embed.W_E, model.W_E)
    for layer in (0, -1):
        block = model.blocks[layer]
        torch.testing.assert_close(block(cache["resid_pre", layer]), cache["resid_post", layer], **close)
        into, out = f"blocks.{layer % model.cfg.n_layers}.attn.hook_in", model._anatomy.blocks[layer].o
        x, expected = (model.run_with_cache(TOKENS, names_filter=each)[1] for each in (into, out))
        (x,), (expected,) = x.values(), expected.values()
        torch.testing.assert_close(block.attn(x, x, x), expected, **close)
    torch.testing.assert_close(
        model.unembed(model.ln_final(cache["resid_post", -1])), cache["unembed.hook_out"], **close
    )
    normed = (cache["ln_final.hook_normalized"] * model.ln_final.w + model.ln_final.b) @ model.unembed.W_U
    torch.testing.assert_close(normed + model.unembed.b_U, cache["unembed.hook_out"], **close)
    assert logits.shape[-1] == model.cfg.d_vocab_out


def test_parts_of_gpt2() -> None:
    model = wrapped("gpt2")
    _, cache = model.run_with_cache(TOKENS)
    torch.testing.assert_close(model.pos_embed(TOKENS), cache["hook_pos_embed"])
    torch.testing.assert_close(model.pos_embed(TOKENS, 2), model.W_pos[2:9].expand(2, -1, -1))
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    assert torch.equal(model.pos_embed(TOKENS, attention_mask=mask)[1, 3:], model.W_pos[:4])
    block = model.blocks[1]
    torch.testing.assert_close(block.mlp(block.ln2(cache["resid_mid", 1])), cache["mlp_out", 1])
    assert [repr(each) for each in model.blocks][1] == "blocks.1 (GPT2Block)"
    assert len(model.blocks) == len(model.blocks[:]) == model.cfg.n_layers
    assert block.hook_resid_mid is model.hook_dict["blocks.1.hook_resid_mid"]
    with pytest.raises(IndexError):
        model.blocks[9]
    for missing in ("ln3", "mpl"):
        with pytest.raises(AttributeError):
            getattr(block, missing)


def test_attention_of_three_inputs() -> None:
    model = wrapped("gpt2")
    attn, q, k, v = model.blocks[1].attn, *torch.randn(3, 2, 7, model.cfg.d_model)
    weights = {name: getattr(attn, f"W_{name}") for name in "QKV"}
    query, key, value = (
        torch.einsum("bpd,hde->bhpe", x, weights[name]) + getattr(attn, f"b_{name}")[:, None]
        for name, x in (("Q", q), ("K", k), ("V", v))
    )
    scores = (query @ key.mT / model.cfg.d_head**0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    expected = torch.einsum("bhpe,hed->bpd", scores.softmax(-1) @ value, attn.W_O) + attn.b_O
    torch.testing.assert_close(attn(q, k, v), expected, atol=1e-4, rtol=1e-4)
    each = q[:, :, None].expand(-1, -1, model.cfg.n_heads, -1)
    torch.testing.assert_close(attn(each, k, v), expected, atol=1e-4, rtol=1e-4)


# Weights


def test_heads_that_share_keys_have_them_each() -> None:
    model = wrapped("llama")
    cfg, attn = model.cfg, model.blocks[1].attn
    assert cfg.n_key_value_heads == 2 < cfg.n_heads == 4
    assert attn._W_K.shape[0] == 2
    assert torch.equal(attn.W_K, attn._W_K.repeat_interleave(2, 0))
    assert torch.equal(model.W_V[1], attn.W_V)
    assert model.b_K.shape == (cfg.n_layers, 4, cfg.d_head)
    assert isinstance(model.QK, FactoredMatrix)
    torch.testing.assert_close(model.QK[1, 3].AB, model.W_Q[1, 3] @ model.W_K[1, 3].T)
    torch.testing.assert_close(attn.OV[3].AB, model.W_V[1, 3] @ model.W_O[1, 3])
    assert wrapped("gpt2").W_gate is None
    assert model.n_params_total == sum(parameter.numel() for parameter in model.parameters())


def test_writing_weights() -> None:
    model = wrapped("llama")
    new = torch.randn_like(model.blocks[0].attn.W_Q)
    model.blocks[0].attn.W_Q = new
    assert torch.equal(model.blocks[0].attn.W_Q, new)
    assert torch.equal(model.module.model.layers[0].self_attn.q_proj.weight, new.movedim(0, 1).flatten(1).T)
    model.blocks[0].ln1.w = torch.full((model.cfg.d_model,), 2.0)
    assert model.module.model.layers[0].input_layernorm.weight.eq(2).all()
    model.unembed.W_U = torch.zeros_like(model.W_U)
    assert model(TOKENS).eq(0).all()
    with pytest.raises(HooklineError, match="shape"):
        model.blocks[0].attn.W_Q = new[:1]
    with pytest.raises(HooklineError, match="not zero"):
        model.blocks[0].attn.b_Q = torch.ones(4, model.cfg.d_head)
    with pytest.raises(HooklineError, match="no weight is named"):
        model.blocks[0].attn.W_K = torch.zeros(4, model.cfg.d_model, model.cfg.d_head)
    with pytest.raises(HooklineError, match="no weight"):
        model.blocks[0].attn.hook_q = torch.zeros(1)


def test_a_norm_of_one_more_than_its_weight() -> None:
    model = wrapped("gemma2")
    own = model.module.model.layers[0].input_layernorm.weight
    torch.testing.assert_close(model.blocks[0].ln1.w, own + 1)
    torch.testing.assert_close(model.state_dict()["blocks.0.ln1.w"], own + 1)
    model.blocks[0].ln1.w = torch.full_like(own, 3.0)
    assert own.eq(2).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gpt2"])
def test_state_makes_another_model_the_same(kind) -> None:
    one, other = wrapped(kind), HookedTransformer.from_pretrained_no_processing(kind, hf_model=causal_lm(kind))
    assert not torch.allclose(one(TOKENS), other(TOKENS))
    qk_norms = [n for n, _ in other.module.named_parameters() if any(part in n for part in ("q_norm", "k_norm"))]
    with torch.no_grad():
        for name in qk_norms:  # TransformerLens has no name for these here
            other.module.get_parameter(name).copy_(one.module.get_parameter(name))
    keys = other.load_state_dict(one.state_dict())
    assert keys.missing_keys == keys.unexpected_keys == []
    torch.testing.assert_close(other(TOKENS), one(TOKENS), atol=1e-5, rtol=1e-5)


def test_state_has_their_names_and_shapes() -> None:
    model = wrapped("gpt2")
    state, cfg = model.state_dict(), model.cfg
    assert state["blocks.1.attn.W_Q"].shape == (cfg.n_heads, cfg.d_model, cfg.d_head)
    assert state["blocks.1.attn.W_O"].shape == (cfg.n_heads, cfg.d_head, cfg.d_model)
    assert state["blocks.0.mlp.W_in"].shape == (cfg.d_model, cfg.d_mlp)
    assert state["unembed.W_U"].shape == (cfg.d_model, cfg.d_vocab)
    assert {"embed.W_E", "pos_embed.W_pos", "blocks.0.ln1.w", "ln_final.b", "unembed.b_U"} <= set(state)
    assert {"blocks.0.attn._W_K", "blocks.0.attn._b_V", "blocks.0.mlp.W_gate"} <= set(wrapped("llama").state_dict())
    processed = HookedTransformer.from_pretrained("gpt2", hf_model=nudged("gpt2"))
    assert not [name for name in processed.state_dict() if "ln" in name], "they are folded"


def test_loading_states() -> None:
    model = wrapped("gpt2")
    state = model.state_dict()
    with pytest.raises(HooklineError, match="missing"):
        model.load_state_dict({"embed.W_E": state["embed.W_E"]})
    keys = model.load_state_dict(
        {"unembed.b_U": state["unembed.b_U"], "blocks.0.attn.IGNORE": torch.zeros(())}, strict=False
    )
    assert "embed.W_E" in keys.missing_keys
    with pytest.raises(HooklineError, match="unembedding is its embedding"):
        model.load_state_dict({**state, "unembed.W_U": state["unembed.W_U"] + 1})
    with pytest.raises(HooklineError, match="assign"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(HooklineError, match="no arguments"):
        model.state_dict(prefix="x")


def test_load_and_process() -> None:
    module = nudged("gpt2")
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
    model = HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=module)
    before, state = model(TOKENS).log_softmax(-1), {name: x.clone() for name, x in model.state_dict().items()}
    model.load_and_process_state_dict(state)
    assert model.cfg.normalization_type == "LNPre"
    torch.testing.assert_close(model(TOKENS).log_softmax(-1), before, atol=1e-4, rtol=1e-4)


def test_named_parameters() -> None:
    names = dict(wrapped("llama").named_parameters())
    assert {"embed.W_E", "blocks.0.attn.W_Q", "blocks.0.attn._W_K", "blocks.1.mlp.W_gate", "ln_final.w"} <= set(names)
    tied = [name for name, _ in wrapped("gpt2").named_parameters()]
    assert tied[0] == "embed.W_E"
    assert "transformer.h.0.attn.c_attn.weight" in tied, "W_Q, W_K and W_V at once"
    assert len(tied) == len([*wrapped("gpt2").module.parameters()])


def test_composition_scores_are_those_of_the_products() -> None:
    model = wrapped("gpt2")
    scores = utils.composition_scores(model.OV, model.QK)
    assert scores.shape == (*model.W_Q.shape[:2], *model.W_Q.shape[:2])
    left, right = model.OV[0, 1].AB, model.QK[1, 2].AB
    torch.testing.assert_close(scores[0, 1, 1, 2], (left @ right).norm() / left.norm() / right.norm())
    assert utils.composition_scores(model.OV, model.QK, broadcast_dims=False).shape == model.W_Q.shape[:2]
    torch.testing.assert_close(model.all_composition_scores("Q")[0, 1, 1, 2], scores[0, 1, 1, 2])
