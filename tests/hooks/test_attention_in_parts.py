"""Attention that is computed in parts, or beside other products and softmaxes: right, or refused; never changed."""

import pytest
import tiny_models
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface

import hookline
from hookline.errors import HooklineError, UnavailablePointError

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
PARTS = ("heads", "rows", "tokens")


def in_parts(how: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
    """Attention in several fused calls: for groups of heads, for each row, or for groups of tokens."""
    qkv, dim = (q, k, v), {"rows": 0, "heads": 1, "tokens": 2}[how]
    sizes = {"rows": [1] * len(q), "heads": [2, 2], "tokens": [2, q.shape[2] - 2]}[how]
    parts = zip(*(x.split(sizes, dim) for x in qkv), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*part, **options) for part in parts], dim)


def beside_others(how: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention, and another product or softmax before it."""
    if how == "gate over heads":
        gate = q.mean(-1).softmax(1)
    else:  # the angles of rotary embeddings
        angles = torch.ones(len(q), 2, 1) @ torch.arange(q.shape[2], dtype=q.dtype).expand(len(q), 1, -1)
        gate = angles.cos().mean(1)[:, None]
    return (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v * gate[..., None]


class Attention(nn.Module):
    def __init__(self, compute, how: str) -> None:
        super().__init__()
        self.compute, self.how, self.heads = compute, how, 4
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        return self.out(self.compute(self.how, q, k, v).transpose(1, 2).flatten(2))


def net(compute, how: str) -> hookline.HookedModule:
    torch.manual_seed(0)
    return hookline.hook(nn.Sequential(Attention(compute, how)).eval())


@pytest.mark.parametrize("how", PARTS)
def test_reading_parts_changes_nothing(how) -> None:
    model = net(in_parts, how)
    output, cache = model.run_with_cache(X, names_filter=["0.pattern", "0.scores"])
    assert torch.equal(output, model(X))
    assert len(cache.calls("0.pattern")) == 2
    with pytest.raises(HooklineError, match="2 times"):
        cache["0.pattern"]
    report = model.verify(X)
    assert report.is_sound, report
    assert [*report.patterns] == ["0"]


@pytest.mark.parametrize("how", PARTS)
@pytest.mark.parametrize("name", ["q", "scores", "pattern"])
def test_an_edit_of_a_part_names_it(how, name) -> None:
    model = net(in_parts, how)
    with pytest.raises(UnavailablePointError, match="#0"):
        model.run_with_hooks(X, fwd_hooks=[(f"0.{name}", torch.zeros_like)])
    edited = model.run_with_hooks(X, fwd_hooks=[(f"0.{name}#1", torch.zeros_like)])
    assert not torch.equal(edited, model(X))
    if how == "rows":
        assert torch.equal(edited[0], model(X)[0])
    only_last = iter([None, lambda x: x * 0])
    with pytest.raises(UnavailablePointError, match="#0"):
        model.run_with_hooks(X, fwd_hooks=[(f"0.{name}", lambda x: (f := next(only_last)) and f(x))])


@pytest.mark.parametrize("how", ["gate over heads", "rotary"])
def test_other_softmaxes_and_products_are_not_the_attention(how) -> None:
    model, seen = net(beside_others, how), []
    output, cache = model.run_with_cache(X, names_filter=["0.q", "0.k", "0.scores", "0.pattern"])
    assert torch.equal(output, model(X))
    assert cache["0.pattern"].shape == (2, 4, 5, 5)
    torch.testing.assert_close(cache["0.scores"], cache["0.q"] @ cache["0.k"].transpose(-2, -1) / 2)
    model.run_with_hooks(X, fwd_hooks=[("0.pattern", lambda p: seen.append(p.shape))])
    assert seen == [(2, 4, 5, 5)]
    assert model.verify(X).is_sound


KINDS = (*PARTS, "gate")


def llama(how: str) -> hookline.HookedModel:
    """A tiny Llama with another attention function."""

    def attention(module, query, key, value, mask, scaling=None, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        if how == "gate":
            gate = query.mean(-1).softmax(1)[..., None]
            causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
            scores = (query @ key.transpose(-2, -1) * scaling).masked_fill(~causal, -torch.inf)
            return (scores.softmax(-1) @ value * gate).transpose(1, 2), None
        return in_parts(how, query, key, value, scale=scaling, is_causal=True).transpose(1, 2), None

    AttentionInterface.register("in_parts", attention)
    module = tiny_models.causal_lm("llama")
    module.config._attn_implementation = "in_parts"
    return hookline.hook(module)


@pytest.mark.parametrize("how", KINDS)
def test_of_a_transformer(how) -> None:
    try:
        model, names = llama(how), ["blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_pattern"]
        tokens = model.example_tokens()
        with torch.no_grad():
            logits = model(tokens)
            output, cache = model.run_with_cache(tokens)
            assert torch.equal(output, logits)
            if how == "gate":
                assert cache[names[1]].shape == (2, 4, 7, 7)
                assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[(names[1], lambda p: None)]), logits)
                zeroed = model.run_with_hooks(tokens, fwd_hooks=[(names[1], torch.zeros_like)])
                assert not torch.allclose(zeroed, logits)
                return
            for name in names:
                assert name not in cache
                with pytest.raises(UnavailablePointError):
                    model.run_with_hooks(tokens, fwd_hooks=[(name, hookline.edits.zero(head=1))])
                with pytest.raises(UnavailablePointError):
                    model.run_with_cache(tokens, names_filter=name)
    finally:
        AttentionInterface._global_mapping.pop("in_parts", None)


class WithBias(nn.Module):
    """Adds a product of the queries and positions to the scores of a fused call, like SAM."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.places = nn.Parameter(torch.randn(1, 1, 5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
        bias = q @ self.places.transpose(-2, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def test_queries_of_a_product_before_the_attention_can_be_read_and_told_apart() -> None:
    net, x = hookline.hook(nn.Sequential(WithBias())), torch.randn(1, 5, 8)
    seen: list[torch.Tensor] = []
    output = net.run_with_hooks(x, fwd_hooks=[("0.q", seen.append)])
    assert torch.equal(output, net(x))
    assert len(seen) == 2
    with pytest.raises(UnavailablePointError, match="#1"):
        net.run_with_hooks(x, fwd_hooks=[("0.q", torch.zeros_like)])
    edited = net.run_with_hooks(x, fwd_hooks=[("0.q#1", torch.zeros_like)])
    q, k, v = net.module[0].qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
    bias = q @ net.module[0].places.transpose(-2, -1)
    torch.testing.assert_close(edited, nn.functional.scaled_dot_product_attention(0 * q, k, v, attn_mask=bias))
    assert "#1" in str(net.eval().verify(x))
