"""Edits of points that have integers or truth values: what does not fit is refused, not rounded."""

import pytest
import tiny_models
import torch
from torch import nn

import hookline
from hookline import HookError, HooklineError, at, edits, last
from hookline.values.casting import cast

IDS = torch.tensor([[5, 17, 42, 7, 3, 9, 22]])


@pytest.fixture(scope="module")
def lm():
    return hookline.hook(tiny_models.causal_lm("llama"))


def write(value):
    def hook(x):
        x[0, 1] = value

    return hook


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda x: x + 0.5, r"5\.5.*torch\.int64"),
        (lambda x: x * float("nan"), "nan"),
        (lambda x: x.bfloat16() * 1e30, "torch.int64"),
        (edits.replace(3.5), "with fractions"),
        (lambda x: x + 1000, "token 1005.* 64"),
        (lambda x: x - 100, "token -95.* 64"),
        (write(64), "token 64"),
        (edits.replace(64), "token 64"),
    ],
    ids=["half", "nan", "huge", "replace", "beyond", "negative", "in place", "edit beyond"],
)
@pytest.mark.parametrize("point", ["hook_tokens", "model.embed_tokens.input"])
def test_tokens_that_do_not_fit(lm, point, hook, message) -> None:
    with pytest.raises(HookError, match=message):
        lm.run_with_hooks(IDS, fwd_hooks=[(point, hook)])


def test_tokens_at_positions(lm) -> None:
    with pytest.raises(HookError, match=r"27\.5.*torch\.int64"):
        lm.run_with_hooks(IDS, fwd_hooks=[("hook_tokens", at(last, lambda x: x * 1.25))])
    doubled = lm.run_with_hooks(IDS, fwd_hooks=[("hook_tokens", at(last, lambda x: x * 2.0))])
    assert torch.equal(doubled, lm(torch.cat([IDS[:, :-1], IDS[:, -1:] * 2], 1)))


@pytest.mark.parametrize("hook", [lambda x: (x + 1).double(), lambda x: x + 1, lambda x: (x + 1).to(torch.int32)])
def test_tokens_that_fit(lm, hook) -> None:
    assert torch.equal(lm.run_with_hooks(IDS, fwd_hooks=[("hook_tokens", hook)]), lm(IDS + 1))


def test_other_positions_keep_their_digits() -> None:
    """A hook that returns few digits changes its own positions only."""
    embed = nn.Embedding(3000, 2)
    net = hookline.hook(nn.Sequential(embed))
    ids = torch.tensor([[[2049], [2], [3]]])
    _, cache = net.run_with_cache(ids, fwd_hooks=[("0.input", at(1, lambda x: x.half() * 2))])
    assert cache["0.input"].flatten().tolist() == [2049, 4, 3]


class ByLength(nn.Embedding):
    """Positions as BART has them: of the tokens that it gets, it uses the shape."""

    def forward(self, tokens):
        return super().forward(torch.arange(tokens.shape[1]).expand(tokens.shape))


def test_tokens_that_are_not_looked_up() -> None:
    net = hookline.hook(nn.Sequential(ByLength(8, 2)))
    expected = net(IDS)
    assert torch.equal(net.run_with_hooks(IDS, fwd_hooks=[("0.input", lambda x: x + 50)]), expected)


def test_chosen_experts() -> None:
    model = hookline.hook(tiny_models.causal_lm("mixtral"))
    name = "blocks.0.mlp.hook_expert_indices"
    for hook, message in ((lambda x: x + 0.5, "torch.int64"), (lambda x: x + 100, "expert 10")):
        with pytest.raises(HookError, match=message):
            model.run_with_hooks(IDS, fwd_hooks=[(name, hook)])


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(2, torch.bool), (0.5, torch.bool), (300, torch.uint8), (2**40, torch.int32), (1j, torch.float32)],
)
def test_what_a_dtype_cannot_hold(value, dtype) -> None:
    with pytest.raises(HooklineError, match=str(dtype)):
        cast(torch.tensor([value]), torch.zeros(1, dtype=dtype))


@pytest.mark.parametrize(
    ("value", "dtype"), [(1.0, torch.bool), (255.0, torch.uint8), (1.1, torch.float16), (3 + 0j, torch.float64)]
)
def test_what_it_can(value, dtype) -> None:
    assert cast(torch.tensor([value]), torch.zeros(1, dtype=dtype)).dtype == dtype
