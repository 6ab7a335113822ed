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


def wrapped(kind: str, **options) -> HookedTransformer:
    module = nudged(kind) if not options else causal_lm(kind, **options)
    return HookedTransformer.from_pretrained_no_processing(kind, hf_model=module)


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
        into, out = f"blocks.{layer % model.cfg.n_layers}.attn.hook_in", model.anatomy.blocks[layer].o
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
    with pytest.raises(HooklineError, match=r"assign _W_K, \[2, 32, 24\]"):
        model.blocks[0].attn.W_K = torch.zeros(4, model.cfg.d_model, model.cfg.d_head)
    with pytest.raises(HooklineError, match="weight"):
        model.blocks[0].attn.hook_q = torch.zeros(1)


def test_a_norm_of_one_more_than_its_weight() -> None:
    model = wrapped("gemma2")
    own = model.module.model.layers[0].input_layernorm.weight
    torch.testing.assert_close(model.blocks[0].ln1.w, own + 1)
    torch.testing.assert_close(model.state_dict()["blocks.0.ln1.w"], own + 1)
    model.blocks[0].ln1.w = torch.full_like(own, 3.0)
    assert own.eq(2).all()


# Writing in place


def written(kind: str, part: str, name: str) -> None:
    """Write into a weight in place: the model must say something else then."""
    model = wrapped(kind)
    before = model(TOKENS)
    target = getattr(getattr(model.blocks[1], part), name)
    with torch.no_grad():
        target[:] = torch.randn(target.shape) * 0.5
    assert not torch.equal(model(TOKENS), before), f"{kind} {part}.{name}"


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "bloom", "gptj", "opt"])
def test_weights_of_a_layer_are_written_in_place(kind) -> None:
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        written(kind, "attn", name)
    for name in ("W_in", "W_out", "b_in", "b_out"):
        written(kind, "mlp", name)
    written(kind, "ln1", "w")
    written(kind, "ln1", "b")
    biases = {"gptj": (), "gpt2": ("b_Q", "b_V", "b_O")}.get(kind, ("b_Q", "b_V"))
    for name in biases:
        written(kind, "attn", name)


@pytest.mark.parametrize(
    ("kind", "part", "name", "why"),
    [
        ("llama", "attn", "W_K", r"model\.blocks\[1\]\.attn\._W_K"),
        ("llama", "attn", "W_V", "heads share W_V"),
        ("qwen2", "attn", "b_V", r"_b_V"),
        ("llama", "attn", "b_Q", "no blocks.1.attn.b_Q"),
        ("llama", "attn", "_b_K", "no blocks.1.attn.b_K"),
        ("llama", "mlp", "b_out", "no blocks.1.mlp.b_out"),
        ("gemma2", "ln1", "w", r"model\.blocks\[1\]\.ln1\.w = "),
        ("llama", "ln1", "b", "no blocks.1.ln1.b"),
    ],
)
def test_copies_refuse_to_be_written(kind, part, name, why) -> None:
    model = wrapped(kind)
    target = getattr(getattr(model.blocks[1], part), name)

    def set_data() -> None:
        target.data = torch.zeros_like(target)

    for write in (
        lambda: target.__setitem__(0, 0.0),
        lambda: target.data.__setitem__(slice(None), 0.0),
        lambda: target.data.zero_(),
        lambda: target.detach()[0].mul_(2),
        lambda: torch.nn.init.normal_(target),
        lambda: torch.zeros(target.shape, out=target),
        set_data,
    ):
        with pytest.raises(HooklineError, match=why):
            write()
    assert type(target + 1) is type(target.clone()) is torch.Tensor


def test_copies_that_can_be_assigned() -> None:
    model = wrapped("codegen", num_attention_heads=8)
    new = torch.randn_like(model.blocks[1].attn.W_Q)
    with pytest.raises(HooklineError, match=r"model\.blocks\[1\]\.attn\.W_Q = "):
        model.blocks[1].attn.W_Q[:] = new
    model.blocks[1].attn.W_Q = new
    assert torch.equal(model.blocks[1].attn.W_Q, new)
    grouped = wrapped("llama")
    before = grouped(TOKENS)
    with torch.no_grad():
        grouped.blocks[1].attn._W_V.zero_()
    assert grouped.blocks[1].attn.W_V.eq(0).all()
    assert not torch.equal(grouped(TOKENS), before)
    gemma = wrapped("gemma2")
    with pytest.raises(HooklineError, match=r"model\.embed\.W_E"):
        gemma.W_E.data[0] = 0
    with pytest.raises(HooklineError, match="no bias"):
        gemma.b_U.data.zero_()


def test_gradients_reach_weights_through_copies() -> None:
    model = wrapped("llama")
    copy = model.blocks[0].attn.W_K
    copy.square().sum().backward()
    own = model.module.model.layers[0].self_attn.k_proj.weight
    torch.testing.assert_close(own.grad, 4 * own)


# States


def drawn(kind: str, seed: int, **options) -> torch.nn.Module:
    """A model whose every parameter is drawn anew."""
    module = causal_lm(kind, **options)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


STATES = (
    *KINDS,
    "bloom",
    "stablelm",
    "mixtral",
    "phi3",
    "glm4",
    "opt",
    "codegen",
    "deepseek_v3",
    "qwen3_next",
    "gpt_oss",
)


@pytest.mark.filterwarnings("ignore::hookline.errors.HooklineWarning")
@pytest.mark.parametrize("is_processed", [False, True])
@pytest.mark.parametrize("kind", STATES)
def test_state_makes_another_model_the_same(kind, is_processed) -> None:
    load = HookedTransformer.from_pretrained if is_processed else HookedTransformer.from_pretrained_no_processing
    one, other = (load(kind, hf_model=drawn(kind, seed)) for seed in (0, 1))
    assert not torch.allclose(one(TOKENS), other(TOKENS))
    keys = other.load_state_dict({name: value.clone() for name, value in one.state_dict().items()})
    assert keys.missing_keys == keys.unexpected_keys == []
    torch.testing.assert_close(other(TOKENS), one(TOKENS), atol=1e-5, rtol=1e-5)
    for name, parameter in other.module.named_parameters():
        torch.testing.assert_close(parameter, one.module.get_parameter(name))


def test_biases_of_gates_are_in_the_state() -> None:
    one, other = (
        HookedTransformer.from_pretrained_no_processing("llama", hf_model=drawn("llama", seed, mlp_bias=True))
        for seed in (0, 1)
    )
    assert "model.layers.0.mlp.gate_proj.bias" in one.state_dict()
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other(TOKENS), one(TOKENS))


def test_states_by_the_names_of_the_model() -> None:
    one, other = (
        HookedTransformer.from_pretrained_no_processing("qwen3", hf_model=drawn("qwen3", seed)) for seed in (0, 1)
    )
    assert "blocks.0.attn.q_norm.w" in one.state_dict()
    keys = other.load_state_dict(one.module.state_dict(), strict=False)
    assert keys.unexpected_keys == []
    assert all(one.state_dict()[name].eq(0).all() for name in keys.missing_keys), "only zeros for what is not there"
    torch.testing.assert_close(other(TOKENS), one(TOKENS))


def test_a_folded_norm_that_was_changed_is_in_the_state() -> None:
    one, other = (HookedTransformer.from_pretrained("gpt2", hf_model=drawn("gpt2", seed)) for seed in (0, 1))
    assert "blocks.1.ln1.w" not in one.state_dict()
    one.blocks[1].ln1.w = torch.full_like(one.blocks[1].ln1.w, 1.5)
    assert one.state_dict()["blocks.1.ln1.w"].eq(1.5).all()
    other.load_state_dict(one.state_dict())
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
    with pytest.raises(HooklineError, match="are tied"):
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


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_go_by_a_weights_name_only_in_its_layout(kind) -> None:
    model = wrapped(kind)
    state, found = model.state_dict(), list(model.named_parameters())
    assert [id(own) for _, own in found] == [id(own) for own in model.module.parameters()]
    assert len({name for name, _ in found}) == len(found)
    for name, own in found:
        if name in state and own.ndim == 1:
            assert torch.equal(state[name].flatten(), own), name
        elif name in state:
            assert torch.equal(state[name], own), name
        else:
            assert model.module.get_parameter(name) is own


def test_named_parameters() -> None:
    names = dict(wrapped("llama").named_parameters())
    assert {"embed.W_E", "blocks.0.ln1.w", "ln_final.w", "model.layers.0.self_attn.q_proj.weight"} <= set(names)
    assert "model.norm.weight" in dict(wrapped("gemma2").named_parameters()), "w is one more"
    tied = [name for name, _ in wrapped("gpt2").named_parameters()]
    assert tied[0] == "embed.W_E"
    assert {"blocks.0.mlp.W_in", "blocks.0.attn.b_O", "transformer.h.0.attn.c_attn.weight"} <= set(tied)


def test_processed_weights_are_not_saved(tmp_path) -> None:
    model = HookedTransformer.from_pretrained("gpt2", hf_model=nudged("gpt2"))
    with pytest.raises(HooklineError, match="restore_weights"):
        model.save_pretrained(tmp_path)
    model.restore_weights()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").exists()


def test_biases_of_experts() -> None:
    model = wrapped("mixtral")
    assert model.accumulated_bias(2).eq(0).all()
    with pytest.raises(HooklineError, match="include_mlp_biases"):
        wrapped("gpt_oss").accumulated_bias(1)


def test_directions_of_one_token() -> None:
    model = wrapped("gpt2")
    for one in (3, torch.tensor(3), torch.tensor([3]), torch.tensor([[3]])):
        assert torch.equal(model.tokens_to_residual_directions(one), model.W_U[:, 3])
    assert model.tokens_to_residual_directions(torch.tensor([[3], [4]])).shape == (2, 1, model.cfg.d_model)


def test_composition_scores_are_those_of_the_products() -> None:
    model = wrapped("gpt2")
    scores = utils.composition_scores(model.OV, model.QK)
    assert scores.shape == (*model.W_Q.shape[:2], *model.W_Q.shape[:2])
    left, right = model.OV[0, 1].AB, model.QK[1, 2].AB
    torch.testing.assert_close(scores[0, 1, 1, 2], (left @ right).norm() / left.norm() / right.norm())
    assert utils.composition_scores(model.OV, model.QK, broadcast_dims=False).shape == model.W_Q.shape[:2]
    torch.testing.assert_close(model.all_composition_scores("Q")[0, 1, 1, 2], scores[0, 1, 1, 2])


def test_as_a_submodule_weights_go_by_the_models_own_names() -> None:
    model = wrapped("gpt2")
    parent = torch.nn.Sequential(model)
    assert list(parent.state_dict()) == [f"0.{name}" for name in model.module.state_dict()]
    parent.load_state_dict(parent.state_dict())
    assert [id(each) for each in parent.parameters()] == [id(each) for each in model.module.parameters()]
