"""Caches, matrices, generation and loading, as the tests of TransformerLens ask for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.compat.transformer_lens import (
    FactoredMatrix,
    HookedRootModule,
    HookedTransformer,
    HookedTransformerConfig,
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


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, list | tuple) else [result]
        self.size = max(self.size, *(each.numel() for each in made if isinstance(each, torch.Tensor)))
        return result


def test_a_batch_of_several_rows_stays() -> None:
    _, cache = toy().run_with_cache(TOKENS)
    with pytest.raises(AssertionError, match="2"):
        cache.remove_batch_dim()
    assert cache.has_batch_dim
    assert len(cache["hook_embed"]) == 2


def test_answers_of_different_shapes() -> None:
    _, cache = toy().run_with_cache(TOKENS)
    stack = cache.accumulated_resid(pos_slice=-1)
    with pytest.raises(ValueError, match="incorrect_tokens"):
        cache.logit_attrs(stack, TOKENS[:, 0], TOKENS[:, :1], pos_slice=-1)


@torch.no_grad()
@pytest.mark.parametrize("norm", ["LN", "RMS", None])
@pytest.mark.parametrize("apply_ln", [False, True])
@pytest.mark.parametrize("shape", [(12,), (12, 2)])
def test_projected_neurons_are_never_as_wide_as_the_stream(norm, apply_ln, shape) -> None:
    model, onto = toy(normalization_type=norm), torch.randn(shape)
    _, cache = model.run_with_cache(TOKENS)
    options = {"apply_ln": apply_ln, "incl_remainder": True, "return_labels": True, "pos_slice": -1}
    whole, labels = cache.stack_neuron_results(2, **options)
    with Largest() as largest:
        found, same = cache.stack_neuron_results(2, **options, project_output_onto=onto)
    torch.testing.assert_close(found, whole @ onto, rtol=1e-4, atol=1e-5)
    assert same == labels
    assert largest.size < whole.numel() / 4
    some = cache.stack_neuron_results(2, neuron_slice=[1, 5], project_output_onto=onto)
    torch.testing.assert_close(some, cache.stack_neuron_results(2, neuron_slice=[1, 5]) @ onto)
    each = cache.get_neuron_results(1, neuron_slice=3, project_output_onto=onto)
    torch.testing.assert_close(each, cache.get_neuron_results(1, neuron_slice=3) @ onto)


def test_vh_is_v_as_in_transformer_lens() -> None:
    matrix = toy().OV[0, 1]
    assert isinstance(matrix, FactoredMatrix)
    assert utils.FactoredMatrix is FactoredMatrix
    with pytest.warns(DeprecationWarning, match="V"):
        assert torch.equal(matrix.Vh, matrix.V)
    for other in (matrix.T, matrix * 2, matrix @ matrix, matrix @ torch.randn(12, 3), torch.randn(3, 12) @ matrix):
        assert isinstance(other, FactoredMatrix)


def test_the_to_of_a_class_of_one_s_own_may_update_its_config() -> None:
    class Net(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.cfg = SimpleNamespace(device="meta", dtype=torch.float32)
            self.linear = torch.nn.Linear(2, 2)
            self.setup()

        def to(self, device_or_dtype, print_details=True):
            return utils.move_to_and_update_config(self, device_or_dtype, print_details)

    net = Net()
    assert net.to(torch.float64) is net
    assert net.cfg.dtype == net.linear.weight.dtype == torch.float64
    assert net.to(torch.device("cpu")).cfg.device == "cpu"
    model = toy()
    assert utils.move_to_and_update_config(model, torch.float64) is model
    assert model.cfg.dtype == model.W_E.dtype == torch.float64


class Wrapped:
    """Not a tensor, but it has what a product needs."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.ndim = tensor, tensor.shape, tensor.ndim

    def broadcast_to(self, shape):
        return Wrapped(self.tensor.broadcast_to(shape))

    def __rmatmul__(self, other):
        return Wrapped(other @ self.tensor)


def test_products_with_what_is_like_a_tensor() -> None:
    matrix, other = FactoredMatrix(torch.randn(4, 2), torch.randn(2, 5)), torch.randn(5, 3)
    torch.testing.assert_close((matrix @ Wrapped(other)).AB.tensor, matrix.AB @ other)


def test_output_options_of_generate_are_ignored_with_a_warning() -> None:
    model = toy()
    options = {"max_new_tokens": 2, "do_sample": False, "stop_at_eos": False, "verbose": False}
    plain = model.generate(TOKENS, **options)
    with pytest.warns(UserWarning, match="output_attentions.*output_scores"):
        found = model.generate(TOKENS, output_scores=True, output_attentions=True, output_logits=False, **options)
    assert torch.equal(found, plain)


def test_positions_can_be_switched_off_and_left_out_of_training() -> None:
    model = toy()
    model.pos_embed.W_pos.data[:] = 0.0
    model.pos_embed.W_pos.requires_grad = False
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == ["pos_embed.W_pos"]
    model(TOKENS, return_type="loss").backward()
    assert model.module.pos_embed.weight.grad is None
    _, cache = model.run_with_cache(TOKENS)
    assert not cache["hook_pos_embed"].any()


@pytest.mark.parametrize(("kind", "act_fn"), [("LN", "gelu"), ("LN", "solu_ln"), ("RMS", "gelu")])
def test_weights_of_norms_are_folded_into_a_model_without_them(kind, act_fn) -> None:
    source = toy(normalization_type=kind, act_fn=act_fn)
    model = toy(normalization_type=f"{kind}Pre", act_fn=act_fn)
    model.load_and_process_state_dict(source.state_dict(), center_writing_weights=kind == "LN")
    torch.testing.assert_close(model(TOKENS).log_softmax(-1), source(TOKENS).log_softmax(-1))
    assert model.cfg.normalization_type == f"{kind}Pre"
    with pytest.raises(HooklineError, match=r"ln_final\.w"):
        model.load_and_process_state_dict(source.state_dict(), fold_ln=False)
