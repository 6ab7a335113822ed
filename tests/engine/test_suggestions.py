"""The name that is meant is the first or the second of those that an error suggests."""

import re

import pytest
import tiny_models
import torch
from torch import nn

import hookline


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu, self.layers = nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4))

    def forward(self, x):
        return self.relu(self.layers(self.relu(self.fc(x))))


def suggested(error: Exception) -> list[str]:
    return re.findall(r"'([^']*)'", str(error).partition("Did you mean")[2])


@pytest.fixture(scope="module")
def models():
    return {
        **{kind: hookline.hook(tiny_models.causal_lm(kind)) for kind in ("llama", "gpt2")},
        "plain": hookline.hook(Repeats()),
        "inside": hookline.hook(nn.ModuleDict({"model": tiny_models.causal_lm("llama")})),
    }


@pytest.mark.parametrize(
    ("kind", "written", "meant"),
    [
        ("llama", "blocks.1", "blocks.1.hook_out"),
        ("llama", "blocks.1.mlp", "blocks.1.hook_mlp_out"),
        ("llama", "blocks.1.attn", "blocks.1.hook_attn_out"),
        ("llama", "unembed", "unembed.hook_out"),
        ("llama", "blocks[1].hook_resid_post", "blocks.1.hook_resid_post"),
        ("llama", "transformer.h.1", "model.layers.1"),
        ("llama", "transformer.h.1.attn.c_proj", "model.layers.1.self_attn.o_proj"),
        ("llama", "transformer.h.1.mlp.c_proj", "model.layers.1.mlp.down_proj"),
        ("llama", "transformer.h.1.ln_1.input", "model.layers.1.input_layernorm.input"),
        ("gpt2", "model.layers.1", "transformer.h.1"),
        ("gpt2", "model.layers.1.self_attn", "transformer.h.1.attn"),
        ("gpt2", "h.1", "transformer.h.1"),
        ("llama", "module.model.layers.1.mlp", "model.layers.1.mlp"),
        ("llama", "base_model.model.model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj"),
        ("inside", "model.layers.1.mlp", "model.model.layers.1.mlp"),
        ("plain", "relu#1.input", "relu.input#1"),
        ("plain", "relu#1.output", "relu#1"),
        ("plain", "fc.weight", "fc"),
        ("plain", "module.fc", "fc"),
        ("plain", "_orig_mod.module.fc.input", "fc.input"),
        ("plain", "layers[0].input", "layers.0.input"),
    ],
)
def test_the_point_that_is_meant_is_suggested(models, kind, written, meant) -> None:
    model = models[kind]
    model.point(meant)
    with pytest.raises(hookline.UnknownPointError) as error:
        model.point(written)
    assert meant in suggested(error.value)[:2]


def test_a_cache_suggests_only_what_it_has(models) -> None:
    with torch.no_grad():
        cache = models["plain"].run_with_cache(torch.ones(1, 4), names_filter=["fc"])[1]
    with pytest.raises(hookline.UnknownPointError) as error:
        cache["module.fc"]
    assert suggested(error.value) == ["fc"]
    with pytest.raises(hookline.UnknownPointError) as error:
        cache["module.relu"]
    assert suggested(error.value) == []
