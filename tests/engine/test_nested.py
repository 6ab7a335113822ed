"""Nested tensors, and torch's fused path of nn.TransformerEncoderLayer, which any torch hook ends."""

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

import hookline
from hookline import NeverFiredWarning
from hookline.errors import UnavailablePointError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor")

X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
PADDED = {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])}


def encoder(**options) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, **options).eval()


def half(x: Tensor) -> Tensor:
    return x * 0.5


def half_in_place(x: Tensor) -> None:
    x.mul_(0.5)


def under_empty_hooks(model: nn.Module, *args, **kwargs) -> Tensor:
    """The output of a pass in which every module has a torch hook that does nothing."""
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(lambda *_: None))
        return model(*args, **kwargs)


@pytest.mark.parametrize("name", ["layers.0.input", "layers.1.input", "layers.0", "layers.0.norm1.input"])
@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_nested_tensors_inside_an_encoder_are_edited_as_by_hand(name, no_grad) -> None:
    with no_grad():
        check_edits_inside_an_encoder(name)


def check_edits_inside_an_encoder(name: str) -> None:
    model, given = encoder(), X.clone()
    net, module = hookline.hook(model), model.get_submodule(name.removesuffix(".input"))
    if name.endswith(".input"):
        handle = module.register_forward_pre_hook(lambda _, args: (half(args[0]), *args[1:]))
    else:
        handle = module.register_forward_hook(lambda _, __, output: half(output))
    with handle:
        expected = model(given, **PADDED)
    for hook in (half, half_in_place):
        assert torch.equal(net.run_with_hooks(given, **PADDED, fwd_hooks=[(name, hook)]), expected)
    assert torch.equal(given, X)


@pytest.mark.parametrize("inference", [True, False])
def test_reading_the_nested_tensor_that_is_query_key_and_value_leaves_it_one_tensor(inference) -> None:
    model, seen = encoder(), []
    name = "layers.0.self_attn.input"
    with torch.inference_mode(inference), torch.no_grad():
        expected = under_empty_hooks(model, X, **PADDED)
        net = hookline.hook(model)
        output = net.run_with_hooks(X, **PADDED, fwd_hooks=[(name, lambda x: seen.append(x.is_nested))])
    assert seen == [True]
    assert torch.allclose(output, expected, atol=1e-6)


@torch.no_grad()
def test_verify_says_that_torch_computes_attention_of_nested_tensors_in_one_step() -> None:
    net = hookline.hook(encoder())
    assert not net.verify(X, **PADDED).is_sound
    with pytest.warns(NeverFiredWarning, match="enable_nested_tensor=False"):
        net.run_with_cache(X, **PADDED, names_filter="layers.0.self_attn.pattern")
    report = hookline.hook(encoder(enable_nested_tensor=False)).verify(X, **PADDED)
    assert report.is_sound
    assert list(report.patterns) == ["layers.0.self_attn", "layers.1.self_attn"]


@pytest.mark.parametrize("norm_first", [True, False])
@torch.no_grad()
def test_a_full_cache_of_a_padded_transformer_equals_a_pass_under_empty_hooks(norm_first) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True, norm_first=norm_first).eval()
    inputs = {"src": X, "tgt": X[:, :4], **PADDED}
    expected = under_empty_hooks(model, **inputs)
    assert torch.equal(expected, model(**inputs)) != norm_first, "torch has a fused path, which it leaves for hooks"
    output, cache = hookline.hook(model).run_with_cache(**inputs)
    assert torch.equal(output, expected)
    assert torch.equal(cache["output"], expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.norm(x))


NAMES = ["input", "0.input", "0", "0.fc.input", "1.input", "1.norm", "1.fc", "output"]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).eval()


def ragged(layout: torch.layout = torch.jagged) -> Tensor:
    make = torch.Generator().manual_seed(0)
    rows = [torch.randn(length, 4, generator=make) for length in (3, 5)]
    return torch.nested.nested_tensor(rows, layout=layout)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_jagged_tensors_are_those_of_their_rows(name) -> None:
    model, x, gradients = blocks(), ragged(), []
    net = hookline.hook(model)
    net.run_with_hooks(x, bwd_hooks=[(name, lambda grad: gradients.append(grad))]).values().pow(2).sum().backward()
    _, cache = net.run_with_cache(x, names_filter=name, incl_bwd=True, loss_fn=lambda out: out.values().pow(2).sum())
    for row, gradient, cached in zip(x.unbind(), gradients[0].unbind(), cache[f"{name}_grad"].unbind(), strict=True):
        _, dense = net.run_with_cache(row, names_filter=name, incl_bwd=True, loss_fn=lambda out: out.pow(2).sum())
        torch.testing.assert_close(gradient, dense[f"{name}_grad"])
        torch.testing.assert_close(cached, dense[f"{name}_grad"])


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("name", NAMES)
def test_edits_of_nested_tensors_are_those_of_their_rows(name, layout) -> None:
    x, net = ragged(layout), hookline.hook(blocks())
    for hook in (half, half_in_place):
        output = net.run_with_hooks(x, fwd_hooks=[(name, hook)])
        for row, got in zip(ragged().unbind(), output.unbind(), strict=True):
            torch.testing.assert_close(got, net.run_with_hooks(row, fwd_hooks=[(name, half)]))
    assert all(map(torch.equal, x.unbind(), ragged().unbind()))


def test_gradients_of_strided_nested_tensors_are_refused() -> None:
    with pytest.raises(UnavailablePointError, match=r"0\.fc\.input.*torch\.jagged"):
        hookline.hook(blocks()).run_with_hooks(ragged(torch.strided), bwd_hooks=[("0.fc.input", lambda _grad: None)])
