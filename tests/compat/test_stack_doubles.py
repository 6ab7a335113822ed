"""Doubles of what sae-lens does beyond attaching modules: a bridge with autoencoders, and a proxy of any model."""

from typing import Any

import pytest
import torch
from tiny_models import causal_lm
from torch import nn

from hookline.compat.transformer_lens import HookedRootModule, HookedTransformer, HookPoint, TransformerBridge
from hookline.errors import HooklineError

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6]])


class Sae(HookedRootModule):
    """A double of a sparse autoencoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(width, 24), nn.Linear(24, width)
        self.hook_acts = HookPoint()
        self.setup()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.hook_acts(self.encoder(x).relu()))


def bridge(kind: str = "gpt2") -> TransformerBridge:
    return TransformerBridge.boot_transformers(kind, hf_model=causal_lm(kind))


def deep_set(model: Any, path: str, value: Any) -> None:
    """Assign a module as sae-lens does, by walking the attributes."""
    *parts, last = path.split(".")
    for part in parts:
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    setattr(model, last, value)


@pytest.mark.parametrize(
    ("usual", "of_bridge"),
    [
        ("blocks.0.hook_resid_pre", "blocks.0.hook_in"),
        ("blocks.1.hook_mlp_out", "blocks.1.mlp.hook_out"),
        ("blocks.1.hook_attn_out", "blocks.1.attn.hook_out"),
    ],
)
def test_a_module_attached_by_a_bridge_name_is_called_at_that_point(usual: str, of_bridge: str) -> None:
    model = bridge()
    assert model._collect_hook_aliases_from_registry()[usual] == of_bridge
    assert usual not in model._hook_registry
    assert isinstance(model._hook_registry[of_bridge], HookPoint)
    sae, plain = Sae(model.cfg.d_model), model(TOKENS)
    expected = HookedTransformer.from_pretrained_no_processing("gpt2", hf_model=causal_lm("gpt2")).run_with_hooks(
        TOKENS, fwd_hooks=[(usual, lambda x, hook: sae(x))]
    )
    deep_set(model, of_bridge, sae)
    model._hook_registry[of_bridge] = sae
    assert model._hook_registry[of_bridge] is sae
    assert torch.equal(model(TOKENS), expected)
    logits, cache = model.run_with_cache(TOKENS)
    assert f"{of_bridge}.hook_acts" in cache
    assert f"{usual}.hook_acts" not in cache
    changed = model.run_with_hooks(TOKENS, fwd_hooks=[(f"{of_bridge}.hook_acts", lambda x, hook: x * 0)])
    assert not torch.allclose(changed, logits)
    deep_set(model, of_bridge, HookPoint())
    assert torch.equal(model(TOKENS), plain)
    assert isinstance(model._hook_registry[of_bridge], HookPoint)


def test_both_names_of_a_point_have_the_same_module() -> None:
    model = bridge()
    first, second = Sae(model.cfg.d_model), nn.Identity()
    model.blocks[0].hook_mlp_out = first
    assert model.blocks[0].mlp.hook_out is first
    plain = model(TOKENS)
    model.blocks[0].mlp.hook_out = second
    assert model.blocks[0].hook_mlp_out is second
    assert list(model._attached.modules.values()) == [second]
    assert not torch.allclose(model(TOKENS), plain)
    del model.blocks[0].hook_mlp_out
    assert not model._attached.modules


def test_a_module_at_the_input_of_the_output_projection_gets_the_heads_side_by_side() -> None:
    model, shapes = bridge(), []
    z = model.run_with_cache(TOKENS)[1]["blocks.0.attn.hook_z"]

    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shapes.append(x.shape)
            return 2 * x

    model.blocks[0].attn.hook_z = Double()
    deep = model(TOKENS)
    del model.blocks[0].attn.hook_z
    model._hook_registry["blocks.0.attn.o.hook_in"] = Double()
    assert torch.equal(model(TOKENS), deep)
    assert shapes == [z.shape, z.flatten(2).shape]


def test_a_bridge_name_of_a_gated_mlp_is_its_own() -> None:
    model = bridge("llama")
    aliases = model._collect_hook_aliases_from_registry()
    assert aliases["blocks.0.mlp.hook_pre"] == "blocks.0.mlp.gate.hook_out"
    assert all(model.point(name).site == model.point(other).site for name, other in aliases.items())


class Proxy(HookedRootModule):
    """A double of a wrapper around any model, which makes its own dict of points."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.setup()

    def setup(self) -> None:
        self.mod_dict: dict[str, Any] = {}
        self.hook_dict: dict[str, HookPoint] = {}
        for name, module in self.model.named_modules():
            if name:
                point = HookPoint()
                point.name = name
                module.register_forward_hook(lambda _, _input, output, point=point: point(output))
                self.hook_dict[name] = self.mod_dict[name] = point

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.kwargs = kwargs
        return self.model(x)


def test_a_model_may_make_its_own_dict_of_points() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    plain = inner(x)
    proxy = Proxy(inner)
    assert list(proxy.hook_dict) == ["0", "1", "2"] == list(proxy.mod_dict)
    output, cache = proxy.run_with_cache(x, names_filter=["1"], prepend_bos=False, stop_at_layer=1)
    assert proxy.kwargs == {"prepend_bos": False, "stop_at_layer": 1}
    assert torch.equal(output, plain)
    assert list(cache) == ["1"]
    assert cache["1"].shape == (5, 4)
    edited = proxy.run_with_hooks(x, fwd_hooks=[("1", lambda x, hook: x * 0)])
    assert torch.equal(edited, inner[2].bias.expand(5, 2))
    assert torch.equal(proxy(x), plain)
    proxy.add_hook("2", lambda x, hook: x + 1)
    assert torch.equal(proxy(x), plain + 1)
    proxy.reset_hooks()
    assert torch.equal(proxy(x), plain)
    with pytest.raises(HooklineError, match="nothing"):
        proxy.run_with_cache(x, names_filter="nothing")


def test_points_that_were_replaced_for_a_while_can_be_restored() -> None:
    sae, x = Sae(4), torch.randn(3, 4)
    plain, points = sae(x), dict(sae.hook_dict)
    for name in sae.hook_dict:
        setattr(sae, name, nn.Identity())
    output, cache = sae.run_with_cache(x)
    assert torch.equal(output, plain)
    assert list(cache) == []
    assert sae.hook_dict == points
    for name, point in sae.hook_dict.items():
        setattr(sae, name, point)
    assert sae.hook_acts is points["hook_acts"]
    assert list(sae.run_with_cache(x)[1]) == ["hook_acts"]
