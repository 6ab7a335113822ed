"""vlm-spectra's hooks by name: patches, ablations and attention masks, on tiny vision-language models."""

import numpy as np
import pytest
import tiny_vision
import torch

from hookline.compat.vlm_spectra import (
    AddActivation,
    BlockAttention,
    HookedVLM,
    ModelRegistry,
    PatchActivation,
    PatchHead,
    ScaleActivation,
    SetAttentionMask,
    ZeroAblation,
    validate_patch_hook_type,
)
from hookline.compat.vlm_spectra.core.hook_points import HookPoint
from hookline.compat.vlm_spectra.preprocessing.spatial import ImageInfo
from hookline.errors import HooklineError, InvalidHookError

RESID, Z, MASK = "lm.blocks.1.hook_resid_post", "lm.blocks.1.attn.hook_z", "lm.blocks.1.attn.hook_mask"


@pytest.fixture(scope="module", params=["smolvlm", "qwen2_5_vl"])
def model(request):
    return HookedVLM.from_model(tiny_vision.module_of(request.param), tiny_vision.processor_of(request.param))


@pytest.fixture(scope="module")
def inputs(model):
    return tiny_vision.inputs_of(model.model.config.model_type)


def cached(model, inputs, name, *hooks):
    with model.run_with_hooks(hooks), model.run_with_cache([name]) as cache:
        model.forward(inputs)
    return cache[name]


def test_edits_change_one_row_at_one_token(model, inputs) -> None:
    before = cached(model, inputs, RESID)
    vector = torch.randn(before.shape[-1])
    edits = {
        ZeroAblation(token_idx=2): 0 * before,
        PatchActivation(vector, token_idx=2): vector.expand(before.shape),
        AddActivation(vector, scale=3.0, token_idx=2): before + 3 * vector,
        ScaleActivation(0.5, token_idx=2): before / 2,
    }
    for edit, changed in edits.items():
        expected = before.clone()
        expected[0, 2] = changed[0, 2]
        assert torch.allclose(cached(model, inputs, RESID, (RESID, edit)), expected, atol=1e-6)


def test_without_a_token_all_positions_change(model, inputs) -> None:
    before = cached(model, inputs, RESID)
    assert torch.equal(cached(model, inputs, RESID, (RESID, ScaleActivation(2.0)))[1], before[1])
    assert torch.equal(cached(model, inputs, RESID, (RESID, ScaleActivation(2.0, batch_idx=None))), before * 2)
    whole = torch.randn(before.shape[1:])
    assert torch.equal(cached(model, inputs, RESID, (RESID, PatchActivation(whole)))[0], whole)


def test_a_head_is_replaced_at_z(model, inputs) -> None:
    before = cached(model, inputs, Z)
    n_heads, vector = before.shape[2], torch.randn(before.shape[3])
    after = cached(model, inputs, Z, (Z, PatchHead(1, vector, n_heads, token_idx=-1)))
    expected = before.clone()
    expected[0, -1, 1] = vector
    assert torch.equal(after, expected)
    with pytest.raises(HooklineError, match="num_heads is 3"):
        cached(model, inputs, Z, (Z, PatchHead(1, vector, 3)))
    with pytest.raises(InvalidHookError, match="with heads"):
        cached(model, inputs, RESID, (RESID, PatchHead(1, vector, n_heads)))


def test_functions_see_heads_side_by_side(model, inputs) -> None:
    before, width = cached(model, inputs, Z), cached(model, inputs, Z).shape[3]

    def second_head(_module, _args, _kwargs, output):
        assert output.ndim == 3
        output = output.clone()
        output[..., width : 2 * width] = 0
        return output

    after = cached(model, inputs, Z, (Z, second_head))
    assert not after[:, :, 1].any()
    assert torch.equal(after[:, :, 0], before[:, :, 0])


def test_blocked_attention_is_zero_in_the_pattern(model, inputs) -> None:
    name = "lm.blocks.1.attn.hook_pattern"
    before = cached(model, inputs, name)
    after = cached(model, inputs, name, (MASK, BlockAttention([(5, 2), (-1, 0)])))
    assert not after[0, :, 5, 2].any()
    assert not after[0, :, -1, 0].any()
    assert (before[0, :, 5, 2] > 0).all()
    assert torch.equal(after[1], before[1])
    kept = torch.ones_like(before[0], dtype=torch.bool)
    kept[:, [5, -1]] = False
    assert torch.allclose(after[0][kept], before[0][kept], atol=1e-6)


def test_masks_are_added_to_scores_and_may_be_replaced(model, inputs) -> None:
    seen = []
    with model.run_with_hooks([("lm.blocks.*.attn.hook_mask", lambda _m, _a, _k, mask: seen.append(mask))]):
        bare = model.forward(inputs).logits
    n_tokens = inputs["input_ids"].shape[1]
    assert len(seen) == model.lm_num_layers
    assert (seen[0][0, 0].tril() == 0).all()
    assert torch.equal(seen[0][0, 0] < -1e30, torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1))
    with model.run_with_hooks([("lm.blocks.*.attn.hook_mask", SetAttentionMask(seen[0]))]):
        same = model.forward(inputs).logits
    assert torch.allclose(same, bare, atol=1e-5)
    with model.run_with_hooks([(MASK, lambda _m, _a, _k, mask: mask * 0 if mask.isfinite().all() else mask.clamp(0))]):
        assert not torch.allclose(model.forward(inputs).logits, bare, atol=1e-3)
    with pytest.raises(HooklineError, match="not fit"), model.run_with_hooks([(MASK, SetAttentionMask(bare))]):
        model.forward(inputs)


def test_blocked_attention_stays_blocked_in_generation(model, inputs) -> None:
    n_tokens, rows = inputs["input_ids"].shape[1], []
    pattern = ("lm.blocks.1.attn.hook_pattern", lambda _m, _a, _k, x: rows.append(x[:, :, -1, 0].max().item()))
    block = BlockAttention([(n_tokens, 0), (n_tokens + 1, 0)], batch_idx=None)
    with pytest.raises(HooklineError, match="range"), model.run_with_hooks([(MASK, block)]):
        model.forward(inputs)

    def later(*given):
        mask = given[-1]
        return block(*given) if mask.shape[-1] > n_tokens + 1 else None

    with model.run_with_hooks([(MASK, later), pattern]):
        model.generate(inputs, max_new_tokens=3, min_new_tokens=3)
    assert [row > 0 for row in rows] == [True, True, False]


def test_names_are_parsed_and_checked() -> None:
    assert HookPoint.parse("lm.blocks.3.attn.hook_mask") == ("attn.hook_mask", 3)
    assert HookPoint.expand("lm.blocks.*.hook_resid_pre", 2)[1] == "lm.blocks.1.hook_resid_pre"
    assert HookPoint.matches_pattern("lm.blocks.12.mlp.hook_out", "lm.blocks.*.mlp.hook_out")
    assert (validate_patch_hook_type("attn.hook_z"), validate_patch_hook_type("hook_resid_post")) == (True, False)
    for name, words in {"attn.hook_pattern": "virtual", "hook_there": "Unknown hook type"}.items():
        with pytest.raises(ValueError, match=words):
            validate_patch_hook_type(name)
    with pytest.raises(ValueError, match="Invalid hook"):
        HookPoint.parse("lm_resid_post")
    adapter = ModelRegistry.get_adapter_class(ModelRegistry.list_supported_models()[0])
    assert adapter.SUPPORTED_MODELS
    with pytest.raises(ValueError, match="not supported"):
        ModelRegistry.get_adapter_class("someone/else")


def test_regions_of_an_image_are_patches() -> None:
    info = ImageInfo(None, (100, 60), (80, 40), (10, 0, 90, 60), 5, 2, grid_h=4, grid_w=8)
    box = info.correct_bbox((0, 15, 50, 30))
    assert (box.bbox, box.clipped) == ((0, 10, 40, 20), True)
    assert info.correct_bbox((95, 0, 99, 5)).bbox == (0, 0, 0, 0)
    mask = np.zeros((60, 100), bool)
    mask[15:30, 10:50] = True
    seen = info.correct_seg(mask)
    assert seen.mask.shape == (40, 80)
    assert not seen.clipped
    by_box, by_mask = info.calc_overlay(bbox=box.bbox), info.calc_overlay(mask=seen.mask)
    assert by_box.patch_indices == by_mask.patch_indices == [8, 9, 10, 11]
    assert by_box.overlap_fractions == by_mask.overlap_fractions == [1, 1, 1, 1]
    assert info.calc_overlay(bbox=(0, 0, 5, 10)).overlap_fractions == [0.5]
    with pytest.raises(ValueError, match="not both"):
        info.calc_overlay()
