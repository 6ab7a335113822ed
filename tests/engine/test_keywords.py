"""Keywords that no part of a model takes are refused; those that some part takes are passed on."""

import pytest
import tiny_models
import torch
from torch import nn

import hookline
from hookline import HooklineError

IDS = torch.tensor([[5, 17, 42, 7, 3, 9, 22]])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "xlnet"])
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("some_typo", "its own arguments are input_ids"),
        ("output_attention", "did you mean 'output_attentions'"),
        ("position_idx", "did you mean 'position_ids'|its own arguments"),
        ("max_new_tokens", ""),
    ],
)
def test_a_keyword_that_nothing_takes(kind, name, advice) -> None:
    model = hookline.hook(tiny_models.causal_lm(kind))
    inputs = {"input_ids": IDS, name: 1}
    with pytest.raises(HooklineError, match=f"'{name}'.*{advice}"):
        model(**inputs)
    with pytest.raises(HooklineError, match=f"'{name}'"):
        model.run_with_cache(**inputs)
    with pytest.raises(HooklineError, match=f"'{name}'"):
        model.run_with_hooks(**inputs)


@pytest.mark.parametrize(
    "taken",
    [
        {"output_hidden_states": True, "return_type": "output"},
        {"output_attentions": True, "return_type": "output"},
        {"use_cache": False},
        {"logits_to_keep": 1},
        {"return_dict": True},
        {"position_ids": torch.arange(7)[None]},
        {"is_causal": True},
        {"token_type_ids": torch.zeros_like(IDS)},
        {"num_items_in_batch": 3},
    ],
    ids=lambda taken: next(iter(taken)),
)
def test_a_keyword_that_something_takes(taken) -> None:
    model = hookline.hook(tiny_models.causal_lm("llama", attn_implementation="eager"))
    output = model(IDS, **taken)
    taken.pop("return_type", None)
    assert torch.equal(output if isinstance(output, torch.Tensor) else output.logits, model.module(IDS, **taken).logits)


class Reads(nn.Module):
    """Looks its keywords up."""

    def forward(self, x, **kwargs):
        return x * kwargs.get("factor", 1)


class Holds(nn.Module):
    """A module that hands its keywords to whatever it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Reads()

    def forward(self, x, **kwargs):
        return self.inner(x, **kwargs)


def test_other_networks_get_their_keywords(x) -> None:
    assert torch.equal(hookline.hook(Holds())(x, factor=2), 2 * x)
    assert torch.equal(hookline.hook(Holds()).run_with_cache(x, whatever=2)[0], x), "what a network takes is not known"


def test_what_a_layer_looks_up_is_taken() -> None:
    module = tiny_models.causal_lm("llama")
    module.model.layers[0].mlp = type(
        "Own", (nn.Module,), {"forward": lambda self, x, **kwargs: x * kwargs["factor"]}
    )()
    from hookline.functions.keywords import _names_in

    assert "factor" in _names_in(module)


def test_token_types_of_a_model_without_them() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    with pytest.raises(HooklineError, match="token_type_ids"):
        model(IDS, token_type_ids=torch.ones_like(IDS))
    model = hookline.hook(tiny_models.encoder("bert"))
    assert not torch.equal(model(IDS, token_type_ids=torch.ones_like(IDS)), model(IDS))


def test_a_slip_in_images() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    with pytest.raises(HooklineError, match="mean 'images'"):
        model(IDS, imges=[])
