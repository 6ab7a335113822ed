"""Caps and steering at the norm of the activation: closed forms, checks, files."""

import pytest
import torch
from tiny_models import causal_lm
from torch import Tensor

import hookline
from hookline.edits import add, cap
from hookline.edits import load as load_edits
from hookline.edits import save as save_edits
from hookline.errors import HookError, HooklineError
from hookline.positions import last

TOKENS = torch.arange(12).view(2, 6) + 3
RESID, Z, POST = "blocks.1.hook_resid_post", "blocks.1.attn.hook_z", "blocks.1.mlp.hook_post"


@pytest.fixture(scope="module")
def model():
    return hookline.hook(causal_lm("llama"))


def run(model, name, hook) -> tuple[Tensor, Tensor]:
    """What flows out of a point under a hook, and without it."""
    _, cache = model.run_with_cache(TOKENS, names_filter=name, fwd_hooks=[(name, hook)])
    return cache[name], model.run_with_cache(TOKENS, names_filter=name)[1][name]


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.2), (None, 0.0), (0.3, None), (0.25, 0.25)])
@pytest.mark.parametrize("name", [RESID, Z, POST])
def test_the_projection_is_clamped_and_nothing_else(model, name, low, high) -> None:
    direction = torch.randn(model.cache(TOKENS)[name].shape[-1])
    unit = direction / direction.norm()
    after, before = run(model, name, cap(3.0 * direction, low=low, high=high))
    projections = before @ unit
    assert torch.allclose(after @ unit, projections.clamp(low, high), atol=1e-5)
    orthogonal = before - projections[..., None] * unit
    assert torch.allclose(after - (after @ unit)[..., None] * unit, orthogonal, atol=1e-5)
    is_within = (projections >= (-torch.inf if low is None else low)) & (
        projections <= (torch.inf if high is None else high)
    )
    assert torch.equal(after[is_within], before[is_within])
    assert not bool(is_within.all())


def test_a_cap_at_heads_positions_masks_and_neurons(model) -> None:
    of_head, unit = torch.randn(model.cfg.d_head), None
    unit = of_head / of_head.norm()
    after, before = run(model, Z, cap(of_head, high=-1.0, head=1, pos=last))
    assert torch.allclose(after[:, -1, 1] @ unit, (before[:, -1, 1] @ unit).clamp(max=-1.0), atol=1e-5)
    after[:, -1, 1] = before[:, -1, 1]
    assert torch.equal(after, before)
    direction = torch.randn(model.cfg.d_model)
    everywhere = run(model, RESID, cap(direction, high=-1.0))[0]
    rows = torch.tensor([[[True]], [[False]]])
    after, before = run(model, RESID, cap(direction, high=-1.0, mask=rows, neuron=[0, 2]))
    chosen = torch.zeros_like(before, dtype=torch.bool)
    chosen[0, :, [0, 2]] = True
    assert torch.equal(after, torch.where(chosen, everywhere, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("coefficient", [0.5, -2.0])
def test_a_vector_is_added_at_the_norm_of_the_activation(model, dtype, coefficient) -> None:
    vector, x = torch.randn(16), torch.randn(2, 6, 4, 16).to(dtype)
    edit = add(vector * 1e-20, coefficient, match_norm=True)
    expected = x.float() + coefficient * x.float().norm(dim=-1, keepdim=True) * vector / vector.norm()
    changed = edit(x, model.hook_dict[Z])
    assert changed.dtype == dtype
    assert torch.allclose(changed.float(), expected, rtol=torch.finfo(dtype).eps * 2, atol=torch.finfo(dtype).eps * 4)


def test_norms_are_matched_per_position_head_and_row(model) -> None:
    vectors = torch.randn(2, 1, 1, model.cfg.d_head)
    after, before = run(model, Z, add(vectors, 0.5, match_norm=True, head=[0, 2], pos=[1, 3]))
    moved = after - before
    norms = torch.zeros(2, 6, before.shape[2])
    norms[:, [1, 3]] = 0.5 * before[:, [1, 3]].norm(dim=-1)
    norms[:, :, [1, 3]] = 0
    assert torch.allclose(moved.norm(dim=-1), norms, atol=1e-5)
    cosines = torch.cosine_similarity(moved, vectors.expand_as(moved), dim=-1)
    assert torch.allclose(cosines[norms > 0], torch.ones(()), atol=1e-4)
    number, before = run(model, RESID, add(-2.0, 0.25, match_norm=True))
    size = before.shape[-1]
    assert torch.allclose(number, before - 0.25 * before.norm(dim=-1, keepdim=True) / size**0.5, atol=1e-5)


def test_what_raises_at_once(model) -> None:
    direction = torch.ones(model.cfg.d_model)
    for wrong, match in (
        (lambda: cap(direction), "low="),
        (lambda: cap(direction, low=1.0, high=0.5), "above"),
        (lambda: cap(direction, high=float("nan")), "high="),
        (lambda: cap(direction, low=-float("inf")), "low="),
        (lambda: cap(direction * torch.nan, high=1.0), "direction="),
        (lambda: cap(torch.zeros(4), high=1.0), "direction="),
        (lambda: cap(torch.ones(2, 4), high=1.0), "direction="),
        (lambda: add(torch.zeros(4), match_norm=True), "match_norm"),
        (lambda: add(torch.tensor([1.0, -torch.inf]), match_norm=True), "match_norm"),
        (lambda: add(direction, match_norm=1), "match_norm="),
        (lambda: add(direction, match_norm=None), "match_norm="),
    ):
        with pytest.raises(HooklineError, match=match):
            wrong()
    for edit in (cap(torch.ones(3), high=0.0), add(torch.ones(3), match_norm=True)):
        with pytest.raises(HookError):
            run(model, RESID, edit)
    with pytest.raises(HookError):
        model.run_with_hooks(TOKENS, fwd_hooks=[("hook_tokens", cap(torch.ones(6), high=0.0))])


def test_they_print_compare_save_and_load(model, tmp_path) -> None:
    direction = torch.randn(model.cfg.d_model)
    pairs = [
        (RESID, cap(direction, low=-0.5, high=2.0, pos=last)),
        (Z, cap(torch.ones(model.cfg.d_head), high=0.25, head=1)),
        (RESID, add(direction, 0.5, match_norm=True)),
        (RESID, add(direction, 0.5)),
    ]
    save_edits(tmp_path, pairs)
    assert load_edits(tmp_path) == pairs
    assert pairs[2][1] != pairs[3][1]
    size = model.cfg.d_model
    assert [repr(edit) for _, edit in pairs] == [
        f"cap(direction=<[{size}] float32>, low=-0.5, high=2, pos=last)",
        f"cap(direction=<[{model.cfg.d_head}] float32>, high=0.25, head=1)",
        f"add(vector=<[{size}] float32>, coefficient=0.5, match_norm=True)",
        f"add(vector=<[{size}] float32>, coefficient=0.5)",
    ]


def test_gradients_pass_through_a_cap(model) -> None:
    direction = torch.eye(model.cfg.d_model)[0]
    x = torch.zeros(1, 2, model.cfg.d_model, requires_grad=True)
    with torch.no_grad():
        x[0, 0, 0] = 3.0
    cap(direction, high=1.0)(x, model.hook_dict[RESID])[..., 0].sum().backward()
    assert x.grad[0, :, 0].tolist() == [0.0, 1.0], "a clamped component does not depend on the activation"
