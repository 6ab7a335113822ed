"""Weights of a HookedTransformer are used like parameters: their gradients, `requires_grad`, and writing to them."""

import copy

import pytest
import torch
from tiny_models import nudged

from hookline.compat.transformer_lens import HookedTransformer, HookedTransformerConfig
from hookline.errors import HooklineError

TOKENS = torch.arange(3, 17).view(2, 7)
SIZES = {"n_layers": 2, "d_model": 16, "d_head": 8, "d_mlp": 32, "d_vocab": 20, "n_ctx": 10, "act_fn": "relu"}


def toy(**options) -> HookedTransformer:
    return HookedTransformer(HookedTransformerConfig(**SIZES, seed=1, device="cpu", **options))


def wrapped(kind: str) -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing(kind, hf_model=nudged(kind))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "toy"])
@pytest.mark.parametrize("name", ["attn.W_Q", "attn.W_O", "mlp.W_in", "mlp.W_out"])
def test_the_gradient_of_a_weight_is_its_part_of_the_parameters(kind, name) -> None:
    model = toy() if kind == "toy" else wrapped(kind)
    model(TOKENS, return_type="loss").backward()
    part, last = name.split(".")
    weight = getattr(getattr(model.blocks[1], part), last)
    before = weight.detach().clone()
    found = weight.grad
    loss = model(TOKENS, return_type="loss").item()
    step = 1e-2 * found / found.norm()
    weight.data = before - step
    assert torch.equal(getattr(getattr(model.blocks[1], part), last), before - step), "written into the model"
    slope = (loss - model(TOKENS, return_type="loss").item()) / 1e-2
    assert slope == pytest.approx(found.norm().item(), rel=0.05), "it is the gradient"


def test_the_gradient_of_a_fused_weight() -> None:
    model = wrapped("gpt2")
    model(TOKENS, return_type="loss").backward()
    own, width = model.module.transformer.h[0].attn.c_attn.weight.grad, model.cfg.d_model
    heads = own[:, 2 * width :].reshape(width, model.cfg.n_heads, model.cfg.d_head).movedim(1, 0)
    assert torch.equal(model.blocks[0].attn.W_V.grad, heads)
    assert torch.equal(model.unembed.W_U.grad, model.module.lm_head.weight.grad.T)
    model.zero_grad(set_to_none=True)
    assert model.blocks[0].attn.W_V.grad is None


def test_a_weight_can_be_frozen() -> None:
    model = toy()
    model.pos_embed.W_pos.data[:] = 0.0
    model.pos_embed.W_pos.requires_grad = False
    model.blocks[0].attn.W_Q.requires_grad_(False)
    model(TOKENS, return_type="loss").backward()
    assert model.blocks[0].attn.W_Q.requires_grad is model.pos_embed.W_pos.requires_grad is False
    assert model.blocks[0].attn.W_Q.grad is model.pos_embed.W_pos.grad is None
    assert model.blocks[0].attn.W_K.grad.any()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.step()
    assert not model.W_pos.any()


def test_a_part_of_a_parameter_cannot_be_frozen_alone() -> None:
    weight = wrapped("gpt2").blocks[0].attn.W_Q
    weight.requires_grad = True  # as it is
    with pytest.raises(HooklineError, match=r"blocks\.0\.attn\.W_Q.*model\.module"):
        weight.requires_grad = False
    with pytest.raises(HooklineError, match="shape"):
        weight.data = torch.zeros(3)


def test_gradients_can_be_set() -> None:
    model = toy()
    weight = model.blocks[0].mlp.W_in
    weight.grad = torch.ones_like(weight)
    assert model.blocks[0].mlp.W_in.grad.eq(1).all()
    weight.grad = None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_computed_or_copied_is_a_plain_tensor(tmp_path) -> None:
    weight = toy().blocks[0].attn.W_Q
    copied = copy.deepcopy(weight)
    torch.save(weight, tmp_path / "weight.pt")
    for each in (weight @ weight.mT, weight[0], copied, torch.load(tmp_path / "weight.pt"), weight.data):
        assert type(each) is torch.Tensor
    assert copied.requires_grad
    assert copied.is_leaf
    assert not torch.equal(copied.detach().zero_(), weight)


@pytest.mark.parametrize("kind", ["LN", "RMS"])
def test_weights_with_norms_are_folded_into_a_model_without(kind) -> None:
    source = toy(normalization_type=kind)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += torch.randn_like(parameter) * 0.3
    expected = source(TOKENS).log_softmax(-1)
    model = toy(normalization_type=f"{kind}Pre", init_weights=False)
    model.load_and_process_state_dict(source.state_dict(), center_writing_weights=kind == "LN")
    torch.testing.assert_close(model(TOKENS).log_softmax(-1), expected, atol=1e-4, rtol=1e-4)
    assert "ln_final.w" not in model.state_dict()
    with pytest.raises(HooklineError, match="unexpected weights"):
        model.load_and_process_state_dict(source.state_dict(), fold_ln=False)
