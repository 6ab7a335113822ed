"""Sparse autoencoders: each kind against its formula, and what does not fit is refused."""

import pytest
import torch
from autoencoders import KINDS
from autoencoders import random_sae as make
from torch import nn

from hookline import HooklineError
from hookline.sae import SAEConfig, SparseAutoencoder


def expected(sae, x) -> list[float]:
    """The features of one vector, written out feature by feature."""
    x = [float(value) for value in x]
    if sae.cfg.apply_b_dec_to_input:
        x = [value - float(b) for value, b in zip(x, sae.b_dec, strict=True)]
    dots = [sum(v * float(w) for v, w in zip(x, sae.W_enc[:, i], strict=True)) for i in range(sae.d_sae)]
    if sae.cfg.architecture == "gated":
        sizes = [d * float(r.exp()) + float(b) for d, r, b in zip(dots, sae.r_mag, sae.b_mag, strict=True)]
        return [max(0.0, s) if d + float(g) > 0 else 0.0 for s, d, g in zip(sizes, dots, sae.b_gate, strict=True)]
    found = [d + float(b) for d, b in zip(dots, sae.b_enc, strict=True)]
    if sae.cfg.architecture == "jumprelu":
        return [max(0.0, f) if f > float(t) else 0.0 for f, t in zip(found, sae.threshold, strict=True)]
    if sae.cfg.architecture == "topk":
        best = sorted(range(sae.d_sae), key=lambda i: -found[i])[: sae.cfg.k]
        return [max(0.0, f) if i in best else 0.0 for i, f in enumerate(found)]
    return [max(0.0, f) for f in found]


@pytest.mark.parametrize("applies_b_dec", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_each_kind_is_its_formula(kind, applies_b_dec) -> None:
    sae, x = make(kind, apply_b_dec_to_input=applies_b_dec), torch.randn(7, 6, dtype=torch.float64)
    features = sae.encode(x)
    wanted = torch.tensor([expected(sae, row) for row in x], dtype=torch.float64)
    torch.testing.assert_close(features, wanted)
    assert (features > 0).any()
    assert (features == 0).any()
    sums = torch.stack([sum(f * w for f, w in zip(row, sae.W_dec, strict=True)) + sae.b_dec for row in features])
    torch.testing.assert_close(sae.decode(features), sums)
    torch.testing.assert_close(sae(x), sums)


def test_top_k_has_k_features_at_most_and_never_negative_ones() -> None:
    sae = make("topk", k=5)
    features = sae.encode(torch.randn(50, 6))
    assert ((features != 0).sum(-1) <= 5).all()
    assert (features >= 0).all()
    with torch.no_grad():
        sae.b_enc.fill_(-100.0)
    assert not sae.encode(torch.randn(50, 6)).any()


def test_rescaled_features_count_what_they_add() -> None:
    plain = make("topk", k=3)
    rescaled = make("topk", k=3, rescale_acts_by_decoder_norm=True)
    rescaled.load_state_dict(plain.state_dict())
    x, norms = torch.randn(9, 6, dtype=torch.float64), plain.W_dec.norm(dim=1)
    features = rescaled.encode(x)
    best = ((x - plain.b_dec) @ plain.W_enc + plain.b_enc).mul(norms).topk(3).indices
    chosen = torch.zeros_like(features).scatter(-1, best, 1.0)
    torch.testing.assert_close(features, ((x - plain.b_dec) @ plain.W_enc + plain.b_enc).relu() * norms * chosen)
    unit = plain.W_dec / norms[:, None]
    torch.testing.assert_close(rescaled.decode(features), features @ unit + plain.b_dec)


@pytest.mark.parametrize("kind", ["layer_norm", "constant_norm_rescale"])
def test_normalization_is_done_and_undone(kind) -> None:
    plain, sae = make("standard"), make("standard", normalize_activations=kind)
    sae.load_state_dict(plain.state_dict())
    x = torch.randn(4, 6, dtype=torch.float64) * 3 + 1
    if kind == "layer_norm":
        inner = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
        outer = plain(inner) * x.std(-1, keepdim=True) + x.mean(-1, keepdim=True)
    else:
        scale = 6**0.5 / x.norm(dim=-1, keepdim=True)
        inner, outer = x * scale, plain(x * scale) / scale
    torch.testing.assert_close(sae.encode(x), plain.encode(inner))
    torch.testing.assert_close(sae(x), outer)
    with pytest.raises(HooklineError, match=r"decode\(features, x\)"):
        sae.decode(sae.encode(x))


@pytest.mark.parametrize("kind", KINDS)
def test_any_axes_before_the_last_and_gradients_to_everything_used(kind) -> None:
    sae, x = make(kind), torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    y = sae(x)
    assert sae.encode(x).shape == (2, 3, 4, 20)
    assert torch.equal(y[1, 2, 3], sae(x[1, 2, 3])) or torch.allclose(y[1, 2, 3], sae(x[1, 2, 3]))
    y.sum().backward()
    assert x.grad.abs().sum() > 0
    assert all(
        parameter.grad is not None
        for name, parameter in sae.named_parameters()
        if name != "threshold" and name != "b_gate"
    )


def test_it_computes_in_its_own_dtype() -> None:
    sae = make("standard", dtype="float32")
    x = torch.randn(5, 6, dtype=torch.bfloat16)
    assert sae.encode(x).dtype == torch.float32
    assert torch.equal(sae.encode(x), sae.encode(x.float()))
    assert sae.bfloat16()(x).dtype == torch.bfloat16
    assert isinstance(sae, nn.Module)


def test_the_same_seed_gives_the_same_directions_of_norm_1() -> None:
    cfg = SAEConfig("standard", d_in=6, d_sae=20)
    a, b, c = (SparseAutoencoder(cfg, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.W_dec, b.W_dec)
    assert not torch.equal(a.W_dec, c.W_dec)
    torch.testing.assert_close(a.W_dec.norm(dim=1), torch.ones(20))
    assert torch.equal(a.W_enc, a.W_dec.T)


def test_what_does_not_fit_is_named() -> None:
    sae = make("standard")
    with pytest.raises(HooklineError, match=r"width 6, .*\[2, 7\]"):
        sae.encode(torch.randn(2, 7))
    with pytest.raises(HooklineError, match=r"width 20, .*\[2, 6\]"):
        sae.decode(torch.randn(2, 6))
    with pytest.raises(HooklineError, match="meta"):
        sae.encode(torch.randn(2, 6, device="meta"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "transcoder"}, "architecture is 'transcoder'; expected one of 'standard'"),
        ({"normalize_activations": "softmax"}, "normalize_activations is 'softmax'"),
        ({"reshape_activations": "hook_q"}, "reshape_activations is 'hook_q'"),
        ({"d_in": 0}, "d_in"),
        ({"d_sae": 2.5}, "d_sae"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"apply_b_dec_to_input": "yes"}, "apply_b_dec_to_input"),
        ({"architecture": "topk"}, "needs k from 1 to d_sae"),
        ({"architecture": "topk", "k": 21}, "needs k from 1 to d_sae"),
        ({"k": 3}, 'k and rescale_acts_by_decoder_norm apply to "topk"'),
        ({"rescale_acts_by_decoder_norm": True}, 'apply to "topk" autoencoders'),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(options, message) -> None:
    with pytest.raises(HooklineError, match=message):
        SAEConfig(**{"architecture": "standard", "d_in": 6, "d_sae": 20} | options)


def test_a_factor_that_is_not_known_is_not_left_out() -> None:
    cfg = SAEConfig("standard", d_in=6, d_sae=20, normalize_activations="expected_average_only_in")
    with pytest.raises(HooklineError, match="norm_scaling_factor"):
        SparseAutoencoder(cfg)


def test_it_prints_what_it_is() -> None:
    assert "topk, k=3, 6 → 20, at 'blocks.0.hook_mlp_out'" in repr(make("topk", hook_name="blocks.0.hook_mlp_out"))


def test_one_for_all_heads_takes_them_apart_or_together() -> None:
    sae = make("standard", reshape_activations="hook_z")
    x = torch.randn(2, 3, sae.d_in, dtype=torch.float64)
    heads = x.unflatten(-1, (2, -1))
    assert torch.equal(sae.encode(heads), sae.encode(x))
    assert torch.equal(sae(heads), sae(x).view(heads.shape))
    with pytest.raises(HooklineError, match="width"):
        sae.encode(heads[..., :-1])
    with pytest.raises(HooklineError, match="width"):
        make("standard").encode(heads)
