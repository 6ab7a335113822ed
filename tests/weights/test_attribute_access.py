"""Paths of points, such as `model.blocks[1].mlp`, can be called: they apply the model's own modules."""

import pytest
import tiny_models
import torch

import hookline
from hookline import HooklineError

IDS = torch.tensor([[5, 17, 42, 7]])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "gemma2", "opt", "mixtral", "olmo2"])
def test_a_path_applies_its_module(kind) -> None:
    model = hookline.hook(tiny_models.causal_lm(kind))
    _, cache = model.run_with_cache(IDS, names_filter=["*hook_resid_*", "ln_final.hook_out", "unembed.hook_out"])
    normed = model.ln_final(cache["resid_post", model.cfg.n_layers - 1])
    assert torch.equal(normed, cache["ln_final.hook_out"])
    assert torch.equal(model.unembed(normed), cache["unembed.hook_out"])
    norms = ("ln1", "ln1_post", "ln2", "ln2_post")
    parts = [part for part in norms if f"blocks.1.{part}.hook_normalized" in model.hook_dict]
    ends = {part: (f"blocks.1.{part}.hook_in", f"blocks.1.{part}.hook_out") for part in parts}
    if kind == "opt":
        with pytest.raises(HooklineError, match=r"blocks\.1\.mlp"):
            model.blocks[1].mlp(torch.zeros(1, 2, model.cfg.d_model))
    elif "ln2_post" not in parts:  # after which hook_mlp_out is
        ends["mlp"] = ("blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out")
    _, cache = model.run_with_cache(IDS, names_filter=[name for pair in ends.values() for name in pair])
    for part, (before, after) in ends.items():
        assert torch.equal(getattr(model.blocks[1], part)(cache[before]), cache[after]), part


def test_hooks_at_the_module_fire() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    x = torch.randn(1, 3, model.cfg.d_model)
    with model.hooks([("blocks.0.hook_mlp_out", torch.zeros_like)]):
        assert not model.blocks[0].mlp(x).any()
    assert model.blocks[0].mlp(x).any()


def test_parts_of_images_and_encoders() -> None:
    sight, bert = hookline.load("tinysight"), hookline.hook(tiny_models.encoder("bert", True))
    inputs = sight.example_inputs()
    names = ["vision.blocks.1.attn.hook_in", "vision.blocks.1.hook_attn_out", "projector.hook_in", "projector.hook_out"]
    _, cache = sight.run_with_cache(**inputs, names_filter=names)
    assert torch.equal(sight.projector(cache["projector.hook_in"]), cache["projector.hook_out"])
    assert torch.equal(sight.vision.blocks[1].attn(cache[names[0]])[0], cache[names[1]])
    _, cache = bert.run_with_cache(IDS, names_filter=["unembed.*"])
    assert torch.equal(bert.unembed(cache["unembed.hook_in"]), cache["unembed.hook_out"])


def test_a_path_without_a_module() -> None:
    model = hookline.hook(tiny_models.causal_lm("gpt2"))
    with pytest.raises(HooklineError, match="start_at_layer"):
        model.blocks(IDS)


ANY_MODULE = {"trace": "run_with_cache", "edit": "add_hook", "scan": "points"}


@pytest.mark.parametrize(
    ("name", "way"), [*ANY_MODULE.items(), ("show_attention", "explore"), ("logit_lens", "of a cache")]
)
def test_methods_of_other_libraries(name, way) -> None:
    language = hookline.hook(tiny_models.causal_lm("gpt2"))
    for model in (language, hookline.hook(torch.nn.Linear(2, 2))) if name in ANY_MODULE else (language,):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=way) as error:
            getattr(model, name)
        assert error.value.name == name
