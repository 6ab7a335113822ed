"""The points of models that see or hear: proved against the model itself, in one scheme of names."""

import devices
import pytest
import tiny_models
import tiny_vision
import torch
import transformers
from releases import transformers_is_before

import hookline
from hookline import HookedModel
from hookline.demo.tinysight import Shape, draw
from hookline.errors import HooklineError, HooklineWarning, UnavailablePointError, UnknownPointError
from hookline.transformer.find_anatomy import find_anatomy
from hookline.transformer.verify.report import verify_model

QUICK = ("llava", "qwen2_5_vl", "vit", "whisper")
EVERY = (*tiny_vision.VISION_LANGUAGE, *tiny_vision.ENCODERS, *tiny_vision.SOUND)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()


def hooked(module) -> HookedModel:
    anatomy = find_anatomy(module)
    assert anatomy is not None
    return HookedModel(module, None, anatomy)


def seeing(kind: str) -> tuple[HookedModel, dict]:
    return hooked(tiny_vision.module_of(kind)), tiny_vision.inputs_of(kind)


def both_halves(kind: str) -> tuple[HookedModel, dict]:
    """CLIP or SigLIP with its text."""
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"vocab_size": 99, "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text |= {"projection_size": 40} if kind == "siglip" else {}
    seen = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4}
    seen |= {"image_size": 16, "patch_size": 4}
    config = transformers.CONFIG_MAPPING[kind](text_config=text, vision_config=seen)
    module = transformers.AutoModel.from_config(config).eval()
    tiny_models.randomise(module)
    ids = torch.tensor([[1, 5, 9, 30, 2], [1, 7, 7, 8, 2]])
    return hooked(devices.placed(module)), {"input_ids": ids, **tiny_vision.inputs_of("vit")}


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in EVERY])
def test_every_point_is_what_its_name_says(kind) -> None:
    model, inputs = seeing(kind)
    report = verify_model(model, inputs)
    assert [str(verdict) for verdict in report.failed()] == []
    stacks = {"whisper": ("encoder.0", "decoder.1")}.get(kind, ("vision.blocks.0",))
    stacks = (*stacks, "blocks.1") if kind in tiny_vision.VISION_LANGUAGE else stacks
    proved = {verdict.name for verdict in report.verdicts if verdict.status == "proved"}
    for stack in stacks:
        if (kind, stack) == ("mllama", "blocks.1"):  # that layer looks at the image alone
            stack = "blocks.0"
            assert {"blocks.1.cross_attn.hook_pattern", "blocks.1.hook_cross_attn_out"} <= proved
        inside = ("attn.hook_z", "attn.hook_pattern", "hook_mlp_out")
        since = {"vit": "5.17", "dinov2": "5.18"}.get(kind, "5.0")  # older ones have them in a module that is not known
        if not transformers_is_before(since):
            inside = ("attn.hook_q", "attn.hook_k", "attn.hook_v", *inside)
        around = ("hook_resid_pre", "hook_resid_post", "hook_attn_out", "attn.hook_attn_scores", "attn.hook_result")
        assert {f"{stack}.{point}" for point in (*inside, *around)} <= proved
    if kind in tiny_vision.VISION_LANGUAGE:
        assert {"projector.hook_in", "projector.hook_out"} <= proved


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_both_halves_of_a_model_that_compares(kind) -> None:
    model, inputs = both_halves(kind)
    assert [str(verdict) for verdict in verify_model(model, inputs).failed()] == []
    assert {"vision.blocks.2.attn.hook_z", "encoder.1.attn.hook_z"} <= set(model.hook_dict)
    assert model.point("blocks.1.attn.hook_z").site == model.point("encoder.1.attn.hook_z").site
    assert model.point("lm.attn.1.z").site == model.point("encoder.1.attn.hook_z").site


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl", "gemma3", "mllama", "clip"])
def test_points_are_listed_in_the_order_in_which_they_fire(kind) -> None:
    model, inputs = seeing(kind)
    fired: list[str] = []
    names = [point.name for point in model.index.select(None)]
    model.run_with_hooks(**inputs, fwd_hooks=[(name, lambda x, hook: fired.append(hook.name)) for name in names])
    assert fired == names


def test_roles_and_classic_names_are_the_same_points() -> None:
    model, _ = seeing("qwen2_5_vl")
    same = {
        ("vision.layer.pre", 1): "vision.blocks.1.hook_resid_pre",
        ("vision.layer.post", -1): "vision.blocks.2.hook_resid_post",
        ("vision.attn.pattern", 0): "vision.blocks.0.attn.hook_pattern",
        ("vision.attn.scores", 0): "vision.blocks.0.attn.hook_attn_scores",
        ("vision.mlp.out", 2): "vision.blocks.2.hook_mlp_out",
        ("lm.attn.z", 1): "blocks.1.attn.hook_z",
        ("q", 1, "vision"): "vision.blocks.1.attn.hook_q",
        ("q", 1): "blocks.1.attn.hook_q",
    }
    for asked, classic in same.items():
        (point,) = model.index.select(asked)
        assert point.site == model.point(classic).site
    for asked, classic in {
        "vision.attn.0.q": "vision.blocks.0.attn.hook_q",
        "lm.layer.1.post": "blocks.1.hook_resid_post",
        "lm.norm": "ln_final.hook_out",
        "projector.out": "projector.hook_out",
    }.items():
        assert model.point(asked).site == model.point(classic).site
    assert len(model.index.select("vision.attn.*.pattern")) == 3
    with pytest.raises(UnknownPointError, match=r"needs.*layer"):
        model.point("vision.attn.pattern")
    with pytest.raises(UnknownPointError, match="0 to 2"):
        model.point("vision.blocks.7.hook_resid_pre")


def test_a_model_without_eyes_says_so() -> None:
    with pytest.raises(UnknownPointError, match="vision tower"):
        hooked(tiny_models.causal_lm("llama")).point("vision.blocks.0.hook_resid_pre")


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_images_in_one_row_do_not_see_each_other(kind) -> None:
    model, inputs = seeing(kind)  # two images of 24 patches each
    _, cache = model.run_with_cache(**inputs, names_filter="vision.blocks.*.attn.hook_pattern")
    for layer, pattern in enumerate(cache.values()):
        assert pattern.shape == (1, 5, 48, 48)
        torch.testing.assert_close(pattern.sum(-1), torch.ones(1, 5, 48))
        assert not pattern[..., :24, 24:].any()
        is_windowed = kind == "qwen2_5_vl" and layer != 1  # that layer sees whole images
        assert bool((pattern[..., :24, :24] == 0).any()) == is_windowed


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_pattern_of_windows_can_be_edited(attention) -> None:
    model, inputs = seeing("qwen2_5_vl")
    model.module.set_attn_implementation(attention)
    names = ["vision.blocks.0.attn.hook_v", "vision.blocks.0.attn.hook_z"]
    first_key = torch.zeros(48, 48)
    first_key[:, 0] = 1  # also from other windows: an edit may do what the model would not

    def edit(pattern):
        return first_key.expand_as(pattern)

    with model.hooks(fwd_hooks=[("vision.blocks.0.attn.hook_pattern", edit)]):
        _, cache = model.run_with_cache(**inputs, names_filter=names)
    v, z = cache[names[0]], cache[names[1]]
    torch.testing.assert_close(z, v[:, :1].expand_as(z))


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "internvl", "vit"])
def test_all_heads_are_the_attention(kind) -> None:
    """A head is a slice of what goes into the output projection: patching all of them is patching its output."""
    model, inputs = seeing(kind)
    other = tiny_vision.inputs_of(kind, seed=1)
    z, out = "vision.blocks.0.attn.hook_z", "vision.blocks.0.hook_attn_out"
    _, cache = model.run_with_cache(**other, names_filter=[z, out])
    by_heads = model.run_with_hooks(**inputs, fwd_hooks=[(z, lambda x: cache[z])])
    at_once = model.run_with_hooks(**inputs, fwd_hooks=[(out, lambda x: cache[out])])
    bare = model(**inputs)
    torch.testing.assert_close(by_heads, at_once)
    assert not torch.allclose(by_heads, bare)


def test_layers_that_the_model_does_not_read() -> None:
    model, _ = seeing("llava")  # it reads what leaves the last layer but one
    assert "vision.blocks.1.hook_resid_post" in model.hook_dict
    with pytest.raises(UnavailablePointError, match="layer 1"):
        model.point("vision.blocks.2.hook_resid_post")


def test_the_gradient_of_the_layer_that_is_read() -> None:
    """Transformers takes notes by hooks of its own after the first run, and LLaVA reads those."""
    model, inputs = seeing("llava")
    name = "vision.blocks.1.hook_resid_post"
    for _ in range(2):
        _, cache = model.run_with_cache(
            **inputs, names_filter=name, incl_bwd=True, loss_fn=lambda logits: logits.square().sum()
        )
        assert cache[f"{name}_grad"].abs().sum() > 0


def test_a_gate_that_is_shut() -> None:
    model, inputs = seeing("mllama")
    layer = model.module.model.language_model.layers[1]
    torch.nn.init.zeros_(layer.cross_attn_attn_gate)
    _, cache = model.run_with_cache(**inputs, names_filter="blocks.1.hook_cross_attn_out")
    assert not cache["blocks.1.hook_cross_attn_out"].any()
    with pytest.raises(HooklineError, match="multiplied by 0"):
        model.run_with_hooks(**inputs, fwd_hooks=[("blocks.1.hook_cross_attn_out", torch.ones_like)])


def test_text_alone() -> None:
    model, inputs = seeing("llava")
    text = {"input_ids": inputs["input_ids"][:, -5:], "attention_mask": inputs["attention_mask"][:, -5:]}
    report = verify_model(model, text)
    assert report.failed() == []
    vision = [verdict for verdict in report.verdicts if verdict.name.startswith("vision.blocks.0.attn")]
    assert vision
    assert all(verdict.status == "unavailable" for verdict in vision)


def test_points_by_attribute() -> None:
    model, inputs = seeing("llava")
    assert len(model.vision.blocks) == 3
    assert model.vision.blocks[1].attn.hook_z.site == model.point("vision.blocks.1.attn.hook_z").site
    assert model.projector.hook_out.site == model.point("projector.out").site
    with model.hooks(fwd_hooks=[(model.vision.blocks[0].attn.hook_z, torch.zeros_like)]):
        changed = model(**inputs)
    assert not torch.equal(changed, model(**inputs))


def test_starting_at_a_layer_with_images() -> None:
    for kind in ("qwen2_5_vl", "gemma3", "mllama"):
        model, inputs = seeing(kind)
        stream = model(**inputs, stop_at_layer=1)
        whole = model(**inputs)
        others = {name: x for name, x in inputs.items() if name != "input_ids"}
        with pytest.raises(HooklineError, match="needs tokens="):
            model(stream, start_at_layer=1)
        with pytest.raises(HooklineError, match="needed"):
            model(stream, start_at_layer=1, tokens=inputs["input_ids"])
        again = model(stream, start_at_layer=1, tokens=inputs["input_ids"], **others)
        torch.testing.assert_close(again, whole)


def test_rows_of_a_batch_have_no_images() -> None:
    model, inputs = seeing("llava")
    _, cache = model.run_with_cache(
        **inputs, names_filter=["vision.blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre"]
    )
    with pytest.warns(HooklineWarning, match="left out"):
        second = cache.rows(1)
    assert list(second) == ["blocks.0.hook_resid_pre"]
    inputs = tiny_vision.inputs_of("llava", rows=1)
    _, cache = model.run_with_cache(**inputs, names_filter="vision.blocks.0.hook_resid_pre")
    assert cache.rows(0)["vision.blocks.0.hook_resid_pre"].shape == (17, 40)  # all images are of the one row


def test_positions_in_the_text_and_in_images() -> None:
    model, inputs = seeing("llava")
    seen, read = "vision.blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre"
    _, both = model.run_with_cache(**inputs, names_filter=[seen, read], pos_slice=3)
    assert both[seen].shape == (2, 17, 40)  # the position is one of the text
    assert both[read].shape == (2, 32)
    _, patch = model.run_with_cache(**inputs, names_filter=seen, pos_slice=3)
    assert torch.equal(patch[seen], both[seen][:, 3])
    assert patch.logits is None, "a patch is no position of the text"
    for place in (hookline.last, hookline.positions.new_tokens, hookline.positions.step(0)):
        with pytest.raises(HooklineError, match=r"position.*prompt"):
            model.run_with_cache(**inputs, names_filter=seen, pos_slice=place)
        with pytest.raises(HooklineError, match=r"position.*prompt"):
            model.run_with_hooks(**inputs, fwd_hooks=[(seen, hookline.edits.zero(pos=place))])


def test_steps_at_the_tower() -> None:
    model = hookline.load("tinysight")
    image = draw([Shape("circle", "red", x=14, y=14, size=15)])
    steps = []
    with model.hooks([("vision.blocks.0.hook_resid_post", lambda x, hook: steps.append(hook.step))]):
        for _ in range(2):
            model.generate("<image> What colour is the circle?", 3, images=[image], do_sample=False)
    assert steps == [0, 0]

    def ask(x, hook):
        hook.positions

    with pytest.raises(hookline.HookError, match="patches"):
        model.run_with_hooks("<image> What?", images=[image], fwd_hooks=[("vision.blocks.0.hook_resid_post", ask)])


def test_the_loss_is_that_of_text() -> None:
    model, inputs = seeing("llava")
    per_token = model(**inputs, return_type="loss", loss_per_token=True)
    seen = inputs["input_ids"][:, 1:] == tiny_vision.IMAGE
    assert not per_token[seen].any()
    assert bool((per_token[~seen] > 0).all())
    torch.testing.assert_close(model(**inputs, return_type="loss"), per_token[~seen].mean())
    only = torch.full((1, 16), tiny_vision.IMAGE)
    with pytest.raises(HooklineError, match="first position"):
        model(input_ids=only, pixel_values=inputs["pixel_values"][:1], return_type="loss")


def test_what_the_projector_gives_is_in_the_order_of_the_text() -> None:
    model, inputs = seeing("qwen2_5_vl")  # whose tower goes by windows
    _, cache = model.run_with_cache(**inputs, names_filter=["projector.hook_out", "blocks.0.hook_resid_pre"])
    seen = inputs["input_ids"] == tiny_vision.IMAGE
    torch.testing.assert_close(cache["blocks.0.hook_resid_pre"][seen], cache["projector.hook_out"][0])


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_both_halves_are_wrapped(kind) -> None:
    model, inputs = both_halves(kind)
    assert isinstance(hookline.hook(model.module), HookedModel)
    assert model(**inputs).shape == (2, 2)  # how alike each text and each image are


READS = {"model_type": "mistral"} | tiny_vision.TEXT
SEES = {"model_type": "siglip_vision_model"} | tiny_vision.SEEN
CLIP = {"model_type": "clip_vision_model"} | tiny_vision.SEEN
PIXTRAL = {**tiny_vision.SEEN, "model_type": "pixtral", "head_dim": 10}
OTHERS = {
    "vipllava": ("llava", {"text_config": READS, "vision_config": CLIP, "vision_feature_layers": [-2, -3]}),
    "aya_vision": ("internvl", {"text_config": READS, "vision_config": SEES, "downsample_factor": 2}),
    "cohere2_vision": ("internvl", {"text_config": READS, "vision_config": SEES, "downsample_factor": 2}),
    "mistral3": ("internvl", {"text_config": READS, "vision_config": PIXTRAL, "spatial_merge_size": 2}),
}
"""Families that nothing here was written for, each with inputs like another's."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_families_that_were_not_thought_of(kind) -> None:
    like, settings = OTHERS[kind]
    config = transformers.CONFIG_MAPPING[kind](**settings, image_token_index=tiny_vision.IMAGE)
    config.image_token_id = tiny_vision.IMAGE
    module = transformers.AutoModelForImageTextToText.from_config(config).eval()
    tiny_models.randomise(module)
    inputs = tiny_vision.inputs_of(like)
    if kind == "mistral3":
        inputs["image_sizes"] = torch.tensor([[16, 16]] * 2)
    model = hookline.hook(module)
    report = verify_model(model, inputs)
    assert [str(verdict) for verdict in report.failed()] == []
    proved = {verdict.name for verdict in report.verdicts if verdict.status == "proved"}
    assert {"vision.blocks.0.attn.hook_pattern", "vision.blocks.0.hook_mlp_out", "projector.hook_out"} <= proved
