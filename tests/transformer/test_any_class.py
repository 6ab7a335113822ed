"""Classes of transformers that no table was made for: wrapped, called, with the points that they can have."""

import pytest
import torch
import transformers
from tiny_models import causal_lm, encoder
from torch import nn

import hookline
from hookline.errors import HooklineError, UnavailablePointError

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
VIT = SMALL | {"image_size": 32, "patch_size": 8}
DETR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
DETR |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 5}
DETR |= {"backbone_config": transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])}
DETR |= {"use_timm_backbone": False, "backbone": None}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "num_attention_heads": [1, 2]}
STAGES |= {
    "decoder_hidden_size": 16,
    "sr_ratios": [2, 1],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "mlp_ratios": [2, 2],
}
SAM = {"hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 40}
SAM |= {"image_size": 32, "patch_size": 8, "window_size": 3, "global_attn_indexes": [1], "output_channels": 16}
BIG_BIRD = {"block_size": 4, "num_random_blocks": 1, "attention_type": "block_sparse", "vocab_size": 64}


def of(name: str, **options) -> nn.Module:
    """A tiny model of a class, from its config."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**options)).eval()


def ids(n: int = 7) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(2 * n).view(2, n) % 50 + 3}


CASES = {
    "DetrModel": (DETR, {"pixel_values": IMAGE}),
    "DetrForObjectDetection": (DETR, {"pixel_values": IMAGE}),
    "SegformerModel": (STAGES, {"pixel_values": IMAGE}),
    "Dinov2Backbone": (VIT, {"pixel_values": IMAGE}),
    "DINOv3ViTModel": (VIT, {"pixel_values": IMAGE}),
    "DINOv3ViTBackbone": (VIT, {"pixel_values": IMAGE}),
    "SamVisionModel": (SAM, {"pixel_values": IMAGE}),
    "BertForQuestionAnswering": (SMALL, ids()),
    "RwkvModel": ({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, ids()),
    "BigBirdModel": (SMALL | BIG_BIRD, ids(32)),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_any_class_is_wrapped_called_and_cached(name) -> None:
    config, inputs = CASES[name]
    module = of(name, **config)
    model, own = hookline.hook(module), module(**inputs)
    wanted = own if "last_hidden_state" not in own or not isinstance(model, hookline.HookedModel) else own[0]
    for output in (model(**inputs), model.run_with_cache(**inputs)[0]):
        pairs = zip(leaves(wanted), leaves(output), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), name
    cache = model.run_with_cache(**inputs)[1]
    assert len(cache) > 10
    for point in cache:
        assert isinstance(cache[point], torch.Tensor)
    reads = dict.fromkeys(model.hook_dict, 0)

    def count(_x: torch.Tensor, hook: hookline.HookPoint) -> None:
        reads[hook.name] += 1

    if isinstance(model, hookline.HookedModel) and name != "RwkvModel":
        model.run_with_hooks(**inputs, fwd_hooks=[(point, count) for point in model.hook_dict])
        assert {*reads.values()} == {1}, [point for point, n in reads.items() if n != 1]


def leaves(output) -> list[torch.Tensor]:
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return [output] if isinstance(output, torch.Tensor) else [x for value in values for x in leaves(value)]


def test_what_is_not_computed_as_one_value_says_so() -> None:
    for name, point in (
        ("SamVisionModel", "encoder.0.hook_resid_mid"),
        ("BigBirdModel", "encoder.0.attn.hook_pattern"),
        ("BigBirdModel", "encoder.0.attn.hook_attn_scores"),
    ):
        model = hookline.hook(of(name, **CASES[name][0]))
        assert point not in model.hook_dict
        with pytest.raises(UnavailablePointError, match=r"windows|parts"):
            model.run_with_cache(**CASES[name][1], names_filter=point)
    assert "encoder.1.hook_resid_mid" in hookline.hook(of("SamVisionModel", **SAM)).hook_dict, "a global layer"


def test_an_output_without_logits_is_the_models_own() -> None:
    config, inputs = CASES["BertForQuestionAnswering"]
    model = hookline.hook(of("BertForQuestionAnswering", **config))
    output = model.run_with_hooks(**inputs, fwd_hooks=[("encoder.1.attn.hook_pattern", torch.zeros_like)])
    assert not torch.equal(output.start_logits, model.module(**inputs).start_logits)
    with pytest.raises(HooklineError, match="start_logits"):
        model(**inputs, return_type="logits")


NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads")
LACKING = (*NEEDED, "get_text_config", "model_type", "is_encoder_decoder", "num_key_value_heads")


@pytest.mark.parametrize("missing", LACKING)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_config_may_lack_anything(kind, missing) -> None:
    class Config:
        """Another library's config."""

        def __init__(self, settings) -> None:
            self._settings = settings

        def __getattr__(self, name):
            if name == missing or name.startswith("__"):
                raise AttributeError(name)
            return (lambda **_: self) if name == "get_text_config" else getattr(self._settings, name)

    module = causal_lm(kind) if kind == "llama" else encoder(kind)
    own, vars(module)["config"] = module.config, Config(module.config)
    model = hookline.hook(module)
    has_own_heads = missing == "num_attention_heads" and kind == "bert"
    assert isinstance(model, hookline.HookedModel) == (missing not in NEEDED or has_own_heads)
    module.config = own
    assert model.cache(input_ids=torch.arange(5)[None])


@pytest.mark.parametrize("method", ["get_input_embeddings", "get_output_embeddings", "can_generate"])
def test_a_class_may_lack_any_method(method) -> None:
    module = causal_lm("llama")

    def missing() -> None:
        raise NotImplementedError(method)

    setattr(module, method, missing)
    assert len(hookline.hook(module).hook_dict) > 10


@torch.no_grad()
def test_shapes_are_known_after_the_model_has_run_too() -> None:
    """A run leaves hooks that collect hidden states on the model; the copy without data needs them too."""
    config = STAGES | {"num_labels": 3}
    module = of("SegformerForSemanticSegmentation", **config)
    model = hookline.hook(module)
    before = str(model.points(input=IMAGE))
    module(IMAGE)
    assert str(model.points(input=IMAGE)) == before
