"""vlm-spectra's interface: every row and every claim of its plan, on models that see and on one that does not."""

from __future__ import annotations

import inspect
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import tiny_models
import tiny_vision
import torch
from networks import has_taps
from torch import Tensor, nn

from hookline import NeverFiredWarning
from hookline.compat import vlm_spectra
from hookline.compat.vlm_spectra import ActivationCache, HookedVLM
from hookline.compat.vlm_spectra.core.hooked_vlm import HookedVLM as SameVLM
from hookline.compat.vlm_spectra.hooks import (
    CaptureInputHook,
    CaptureOutputHook,
    Hook,
    PatchHeadHook,
    PatchMLPHook,
    PatchResidualHook,
)
from hookline.compat.vlm_spectra.hooks.base import Hook as SameHook
from hookline.compat.vlm_spectra.hooks.patch_hooks import PatchHeadHook as SamePatch
from hookline.edits import zero
from hookline.errors import HookError, HooklineError, InvalidHookError, UnknownPointError
from hookline.positions import image_tokens

KINDS = ("llava", "qwen2_5_vl", "llama")
ROWS = {  # the plan's table: hook_point, the module, whether it is called before it
    "lm.layer.pre": ("", True),
    "lm.layer.post": ("", False),
    "lm.mlp.out": ("mlp", False),
    "lm.attn.out": ("self_attn.o_proj", False),
    "lm.attn.pre": ("self_attn", True),
}


def inputs_of(kind: str, seed: int = 0, rows: int = 1) -> dict[str, Tensor]:
    if kind == "llama":
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 60, (rows, 12), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return tiny_vision.inputs_of(kind, rows=rows, seed=seed)


def made(kind: str) -> HookedVLM:
    if kind == "llama":
        return HookedVLM.from_model(tiny_models.causal_lm("llama"))
    return HookedVLM.from_model(tiny_vision.module_of(kind), tiny_vision.processor_of(kind))


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def model(kind) -> HookedVLM:
    return made(kind)


def layer_of(model: HookedVLM, index: int) -> nn.Module:
    """Found without hookline."""
    return next(
        each
        for name, each in model.model.named_modules()
        if name.endswith(f"layers.{index}") and ("language_model" in name or name == f"model.layers.{index}")
    )


def logits(model: HookedVLM, inputs: Any, hooks: list[Any] | None = None) -> Tensor:
    with model.run_with_hooks(hooks or []):
        return model.forward(inputs).logits


def cached(model: HookedVLM, inputs: Any, *names: Any) -> ActivationCache:
    with model.run_with_cache(names) as cache:
        model.forward(inputs)
    return cache


def is_clean(model: HookedVLM) -> bool:
    return not any(has_taps(module) for module in model.model.modules())


class Doubles(Hook):
    """Twice the output; before a module, of its first argument."""

    def __init__(self, hook_point: str, layer: int) -> None:
        self.hook_point, self.layer = hook_point, layer
        self.calls: list[Any] = []

    def __call__(self, module, args, kwargs, output):
        self.calls.append((module, args, dict(kwargs), output))
        if output is not None:
            return output * 2
        if args:
            return (args[0] * 2, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 2}


class Plain:
    """No subclass of anything."""

    hook_point = "lm.mlp.out"

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __call__(self, module, args, kwargs, output):
        return torch.zeros_like(output)


class Unplaced:
    layer = 0

    def __call__(self, module, args, kwargs, output):
        return torch.zeros_like(output)


# The plan's table


@pytest.mark.parametrize("hook_point", ROWS)
def test_each_hook_point_is_at_the_module_of_the_table(model, kind, hook_point) -> None:
    path, is_pre = ROWS[hook_point]
    module = layer_of(model, 1).get_submodule(path)
    inputs = inputs_of(kind)
    seen: list[Any] = []

    def by_torch(module, args, kwargs, output=None):
        seen.append((args, kwargs, output))
        return Doubles(hook_point, 1)(module, args, kwargs, output)

    register = module.register_forward_pre_hook if is_pre else module.register_forward_hook
    handle = register(by_torch, with_kwargs=True)
    expected = model.forward(inputs).logits
    handle.remove()

    hook = Doubles(hook_point, 1)
    found = logits(model, inputs, [hook])
    assert torch.equal(found, expected)
    assert not torch.equal(found, model.forward(inputs).logits)
    ((given, args, kwargs, output),) = hook.calls
    assert given is module
    assert len(args) == len(seen[0][0])
    assert kwargs.keys() == seen[0][1].keys()
    if is_pre:
        assert output is None
    else:
        assert torch.equal(output, seen[0][2])
        assert output.shape == (*inputs["input_ids"].shape, model.adapter.lm_hidden_dim)
        assert torch.equal(args[0], seen[0][0][0])


def test_attention_is_called_by_keyword(model, kind) -> None:
    hook = Doubles("lm.attn.pre", 0)
    logits(model, inputs_of(kind), [hook])
    _, args, kwargs, _ = hook.calls[0]
    assert args == ()
    assert kwargs["hidden_states"].shape == (*inputs_of(kind)["input_ids"].shape, model.adapter.lm_hidden_dim)
    assert {"position_embeddings", "attention_mask"} <= kwargs.keys()


def test_a_pre_hook_may_change_any_argument(model, kind) -> None:
    class Alone(Hook):
        """Lets each position see itself only."""

        hook_point, layer = "lm.attn.pre", 0

        def __call__(self, module, args, kwargs, output):
            n = kwargs["hidden_states"].shape[1]
            mask = torch.full((1, 1, n, n), torch.finfo(torch.float32).min)
            return args, {**kwargs, "attention_mask": mask.masked_fill(torch.eye(n, dtype=torch.bool), 0.0)}

    inputs = inputs_of(kind)
    with model.run_with_hooks([Alone()]), model.run_with_cache(["lm.attn.pattern"]) as cache:
        model.forward(inputs)
    n = inputs["input_ids"].shape[1]
    assert torch.allclose(cache[("lm.attn.pattern", 0)], torch.eye(n).expand(1, model.adapter.lm_num_heads, n, n))


def test_none_keeps_what_is_there(model, kind) -> None:
    inputs = inputs_of(kind)
    before = model.forward(inputs).logits
    for hook_point in ROWS:

        class Looks(Hook):
            layer = 0

            def __call__(self, module, args, kwargs, output):
                return None

        Looks.hook_point = hook_point
        assert torch.equal(logits(model, inputs, [Looks()]), before)


def test_the_hooks_declare_what_the_plan_says() -> None:
    assert Hook.hook_point == PatchResidualHook.hook_point == "lm.layer.post"
    assert PatchHeadHook.hook_point == "lm.attn.out"
    assert PatchMLPHook.hook_point == "lm.mlp.out"
    assert all(issubclass(each, Hook) for each in (PatchResidualHook, PatchHeadHook, PatchMLPHook))
    with pytest.raises(TypeError, match="abstract"):
        Hook()


def test_the_constructors_are_theirs() -> None:
    def names(of: Any) -> list[str]:
        return [name for name in inspect.signature(of).parameters if name != "options"]

    assert names(PatchResidualHook) == ["layer", "token_idx", "replacement"]
    assert names(PatchHeadHook) == ["layer", "head_idx", "replacement", "token_idx"]
    assert names(PatchMLPHook) == ["layer", "replacement", "token_idx"]
    assert names(HookedVLM.run_with_cache) == ["self", "cache_names"]
    assert names(HookedVLM.generate)[:6] == [
        *("self", "inputs", "max_new_tokens", "require_grads", "do_sample", "return_dict_in_generate")
    ]


def test_what_the_plan_deletes_is_not_there() -> None:
    for name in ("run_with_module_hooks", "run_with_attn_hooks"):
        assert not hasattr(HookedVLM, name)
    for name in ("ZeroAblationHook", "MeanAblationHook"):
        assert not hasattr(vlm_spectra.hooks, name)
        assert not hasattr(vlm_spectra.hooks.patch_hooks, name)


def test_their_paths_lead_to_the_same_things() -> None:
    assert (SameVLM, SameHook, SamePatch) == (HookedVLM, Hook, PatchHeadHook)
    assert vlm_spectra.core.HookedVLM is HookedVLM


# Unknown targets


@pytest.mark.parametrize("hook_point", ["lm.layer.middle", "lm.foo", "mlp", ""])
def test_an_unknown_hook_point_is_a_value_error_with_the_list(model, hook_point) -> None:
    with pytest.raises(ValueError, match=r"lm\.layer\.post") as caught:
        model.run_with_hooks([Doubles(hook_point or "lm.", 0)])
    for known in ROWS:
        assert repr(known) in str(caught.value)
    assert is_clean(model)


def test_an_unknown_layer_is_one_too(model) -> None:
    last = model.lm_num_layers - 1
    with pytest.raises(ValueError, match=f"0 to {last}"):
        model.run_with_hooks([Doubles("lm.layer.post", last + 1)])
    with pytest.raises(ValueError, match=r"lm\.layer\.post"):
        model.run_with_cache([("lm.layer.post", 99)])
    with pytest.raises(ValueError, match=r"lm\.layer\.post"):
        model.run_with_cache(["lm.layer.middle"])


def test_a_bad_hook_among_good_ones_attaches_nothing(model, kind) -> None:
    good = Doubles("lm.layer.post", 0)
    for bad in (Doubles("lm.nothing", 0), Hook, PatchMLPHook, object(), lambda *given: None, ("lm.nope", good), 3):
        with pytest.raises(HooklineError), model.run_with_hooks([good, bad]):
            raise AssertionError
    with pytest.raises(InvalidHookError, match=r"list.*hooks"):
        model.run_with_hooks(good)
    model.forward(inputs_of(kind))
    assert good.calls == []
    assert is_clean(model)


# The life of hooks


def test_nested_contexts_keep_the_outer_hooks(model, kind) -> None:
    inputs = inputs_of(kind)
    outer, inner = Doubles("lm.mlp.out", 0), Doubles("lm.attn.out", 1)
    both = logits(model, inputs, [Doubles("lm.mlp.out", 0), Doubles("lm.attn.out", 1)])
    alone = logits(model, inputs, [Doubles("lm.mlp.out", 0)])
    with model.run_with_hooks([outer]):
        with model.run_with_hooks([inner]):
            assert torch.equal(model.forward(inputs).logits, both)
        assert torch.equal(model.forward(inputs).logits, alone)
    assert (len(outer.calls), len(inner.calls)) == (2, 1)
    assert is_clean(model)


def test_a_cache_around_hooks_and_hooks_around_a_cache_see_the_same(model, kind) -> None:
    inputs = inputs_of(kind)
    with model.run_with_cache(["lm.layer.post"]) as outside, model.run_with_hooks([Doubles("lm.layer.post", 0)]):
        model.forward(inputs)
    with model.run_with_hooks([Doubles("lm.layer.post", 0)]), model.run_with_cache(["lm.layer.post"]) as inside:
        model.forward(inputs)
    plain = cached(model, inputs, "lm.layer.post")
    key = ("lm.layer.post", 0)
    assert torch.equal(outside[key], inside[key])
    assert torch.equal(outside[key], plain[key] * 2)


def test_an_exception_leaves_nothing_attached(model, kind) -> None:
    class Breaks(Hook):
        layer = 1

        def __call__(self, module, args, kwargs, output):
            raise RuntimeError("broken")

    inputs = inputs_of(kind)
    before = model.forward(inputs).logits
    with pytest.raises(HookError, match="broken") as caught, model.run_with_hooks([Doubles("lm.mlp.out", 0), Breaks()]):
        model.forward(inputs)
    assert isinstance(caught.value.original_error, RuntimeError)
    with pytest.raises(KeyboardInterrupt), model.run_with_hooks([Doubles("lm.mlp.out", 0)]):
        raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError), model.run_with_cache(["lm.layer.post"]):
        model.forward(inputs).logits[1 // 0]
    assert model.cache is not None
    assert ("lm.layer.post", 0) in model.cache
    assert is_clean(model)
    assert torch.equal(model.forward(inputs).logits, before)


def test_hooks_can_be_used_again_and_share_a_layer(model, kind) -> None:
    inputs, hook = inputs_of(kind), Doubles("lm.mlp.out", 0)
    first, second = logits(model, inputs, [hook]), logits(model, inputs, [hook])
    assert torch.equal(first, second)
    four = cached_under(model, inputs, [Doubles("lm.mlp.out", 0), Doubles("lm.mlp.out", 0)])
    assert torch.equal(four, cached(model, inputs, "lm.mlp.out")[("lm.mlp.out", 0)] * 4)


def cached_under(model: HookedVLM, inputs: Any, hooks: list[Any]) -> Tensor:
    with model.run_with_hooks(hooks):
        return cached(model, inputs, "lm.mlp.out")[("lm.mlp.out", 0)]


def test_objects_of_any_class_are_hooks(model, kind) -> None:
    inputs = inputs_of(kind)
    assert torch.equal(logits(model, inputs, [Plain(0)]), logits(model, inputs, [("lm.blocks.0.hook_mlp_out", zero())]))
    stream = ("lm.blocks.0.hook_resid_post", lambda module, args, kwargs, output: output * 0)
    assert torch.equal(logits(model, inputs, [Unplaced()]), logits(model, inputs, [stream]))
    assert not torch.equal(logits(model, inputs, [stream]), model.forward(inputs).logits)


def test_another_thread_does_not_see_them(model, kind) -> None:
    inputs, found = inputs_of(kind), []
    before = model.forward(inputs).logits
    with model.run_with_hooks([Plain(0)]):
        thread = threading.Thread(target=lambda: found.append(model.forward(inputs).logits))
        thread.start()
        thread.join()
        assert not torch.equal(model.forward(inputs).logits, before)
    assert torch.equal(found[0], before)


def test_a_context_without_a_run_is_told(model) -> None:
    with pytest.warns(NeverFiredWarning, match="forward pass"), model.run_with_hooks([Plain(0)]):
        pass


# Patches


def test_everything_of_another_run_gives_that_run(model, kind) -> None:
    clean, other = inputs_of(kind), inputs_of(kind, seed=5)
    stream = cached(model, other, "lm.layer.post")
    last = model.lm_num_layers - 1
    patched = logits(model, clean, [PatchResidualHook(last, None, stream[("lm.layer.post", last)])])
    assert torch.allclose(patched, model.forward(other).logits, atol=1e-5)
    assert not torch.allclose(patched, model.forward(clean).logits, atol=1e-2)


def test_a_patch_with_ones_own_changes_nothing(model, kind) -> None:
    inputs = inputs_of(kind)
    cache = cached(model, inputs, "lm.layer.post", "lm.mlp.out", "lm.attn.z")
    hooks = [PatchResidualHook(0, 3, cache[("lm.layer.post", 0)][0, 3])]
    hooks += [PatchMLPHook(1, cache[("lm.mlp.out", 1)][0, 4], token_idx=4), PatchMLPHook(0, cache[("lm.mlp.out", 0)])]
    hooks += [PatchHeadHook(1, 2, cache[("lm.attn.z", 1)][0, :, 2])]
    assert torch.equal(logits(model, inputs, hooks), model.forward(inputs).logits)


@pytest.mark.parametrize("layer", [0, 1])
def test_all_heads_are_the_attention_output(model, kind, layer) -> None:
    clean, other = inputs_of(kind), inputs_of(kind, seed=5)
    cache = cached(model, other, "lm.attn.z", "lm.attn.out")
    z, out = cache[("lm.attn.z", layer)], cache[("lm.attn.out", layer)]
    assert z.shape[2:] == (model.adapter.lm_num_heads, model.adapter.lm_head_dim)
    whole = PatchResidualHook(layer, None, out, hook_point="lm.attn.out")
    heads = [PatchHeadHook(layer, head, z[0, :, head]) for head in range(z.shape[2])]
    expected = logits(model, clean, [whole])
    assert torch.allclose(logits(model, clean, heads), expected, atol=1e-5)
    assert not torch.allclose(expected, model.forward(clean).logits, atol=1e-2)
    assert not torch.allclose(logits(model, clean, heads[:-1]), expected, atol=1e-3)
    at_token = [PatchHeadHook(layer, head, z[0, 5, head], token_idx=5) for head in range(z.shape[2])]
    one = PatchResidualHook(layer, 5, out[0, 5], hook_point="lm.attn.out")
    assert torch.allclose(logits(model, clean, at_token), logits(model, clean, [one]), atol=1e-5)


def test_a_head_is_a_slice_of_what_the_projection_is_given(model, kind) -> None:
    inputs, width = inputs_of(kind), model.adapter.lm_head_dim
    projection = model.adapter.get_lm_o_proj(1)

    def by_torch(module, args):
        x = args[0].clone()
        x[:, 4, width : 2 * width] = 7.0
        return (x,)

    handle = projection.register_forward_pre_hook(by_torch)
    expected = model.forward(inputs).logits
    handle.remove()
    hook = PatchHeadHook(layer=1, head_idx=1, replacement=torch.full((width,), 7.0), token_idx=4)
    assert torch.equal(logits(model, inputs, [hook]), expected)
    assert torch.equal(model.hooked.run_with_hooks(**inputs, fwd_hooks=[hook]), expected)


@pytest.mark.parametrize("patch", [PatchResidualHook, PatchMLPHook])
def test_a_token_is_replaced_and_no_other(model, kind, patch) -> None:
    inputs, vector = inputs_of(kind, rows=2), torch.randn(model.adapter.lm_hidden_dim)
    name = patch.hook_point
    before = cached(model, inputs, name)[(name, 1)]
    with model.run_with_hooks([patch(layer=1, token_idx=-2, replacement=vector)]):
        after = cached(model, inputs, name)[(name, 1)]
    expected = before.clone()
    expected[:, -2] = vector
    assert torch.equal(after, expected)
    with model.run_with_hooks(
        [patch(layer=1, token_idx=[6, 1], replacement=torch.stack([vector, -vector]), batch_idx=1)]
    ):
        after = cached(model, inputs, name)[(name, 1)]
    expected = before.clone()
    expected[1, 6], expected[1, 1] = vector, -vector
    assert torch.equal(after, expected)
    with model.run_with_hooks([patch(layer=1, token_idx=slice(2, 4), replacement=torch.stack([vector, -vector]))]):
        after = cached(model, inputs, name)[(name, 1)]
    expected = before.clone()
    expected[:, 2], expected[:, 3] = vector, -vector
    assert torch.equal(after, expected)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_patches_of_the_image(model, kind) -> None:
    inputs = inputs_of(kind)
    start, end = model.get_image_token_range(inputs)
    other = cached(model, inputs_of(kind, seed=5), "lm.layer.post")[("lm.layer.post", 0)][0, start : end + 1]
    with model.run_with_hooks([PatchResidualHook(0, image_tokens, other)]):
        after = cached(model, inputs, "lm.layer.post")[("lm.layer.post", 0)]
    before = cached(model, inputs, "lm.layer.post")[("lm.layer.post", 0)]
    assert torch.equal(after[0, start : end + 1], other)
    assert torch.equal(after[0, :start], before[0, :start])
    assert torch.equal(after[0, end + 1 :], before[0, end + 1 :])


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_patches_in_the_vision_tower(model, kind) -> None:
    clean, other = inputs_of(kind), inputs_of(kind, seed=5) | {"input_ids": inputs_of(kind)["input_ids"]}
    names = ("vision.layer.post", "vision.attn.out", "vision.attn.z", "vision.mlp.out")
    cache = cached(model, other, *names)
    layers = sorted(cache.get_all_layers("vision.layer.post"))
    stream = cache[("vision.layer.post", layers[-1])]
    swapped = logits(model, clean, [PatchResidualHook(layers[-1], None, stream, hook_point="vision.layer.post")])
    assert torch.allclose(swapped, model.forward(other).logits, atol=1e-5)
    assert not torch.allclose(swapped, model.forward(clean).logits, atol=1e-2)

    class PatchSight(PatchHeadHook):
        hook_point = "vision.attn.out"

    z, out = cache[("vision.attn.z", 0)], cache[("vision.attn.out", 0)]
    heads = [PatchSight(0, head, z[:, :, head]) for head in range(z.shape[2])]
    whole = PatchResidualHook(0, None, out, hook_point="vision.attn.out")
    assert torch.allclose(logits(model, clean, heads), logits(model, clean, [whole]), atol=1e-5)
    before = cached(model, clean, "vision.mlp.out")[("vision.mlp.out", 0)]
    with model.run_with_hooks([PatchMLPHook(0, torch.zeros(40), 3, hook_point="vision.mlp.out")]):
        after = cached(model, clean, "vision.mlp.out")[("vision.mlp.out", 0)]
    expected = before.clone()
    expected[:, 3] = 0
    assert torch.equal(after, expected)


def test_a_patch_before_a_layer(model, kind) -> None:
    inputs, vector = inputs_of(kind), torch.randn(model.adapter.lm_hidden_dim)
    with model.run_with_hooks([PatchResidualHook(1, 2, vector, hook_point="lm.layer.pre")]):
        cache = cached(model, inputs, "lm.layer.pre", "lm.layer.post")
    assert torch.equal(cache[("lm.layer.pre", 1)][0, 2], vector)
    assert not torch.equal(cache[("lm.layer.post", 0)][0, 2], vector)


def test_a_patch_that_does_not_fit_says_what_would(model, kind) -> None:
    inputs, width = inputs_of(kind), model.adapter.lm_hidden_dim
    n = inputs["input_ids"].shape[1]
    wrong = [
        PatchResidualHook(0, 1, torch.zeros(width + 1)),
        PatchResidualHook(0, 1, torch.zeros(1, n, width)),
        PatchResidualHook(0, None, torch.zeros(n - 1, width)),
        PatchResidualHook(0, [1, 2], torch.zeros(3, width)),
        PatchResidualHook(0, slice(0, 2), torch.zeros(3, width)),
        PatchResidualHook(0, 1, torch.zeros(width), batch_idx=4),
        PatchHeadHook(0, 99, torch.zeros(model.adapter.lm_head_dim)),
        PatchHeadHook(0, 0, torch.zeros(width + 1)),
    ]
    for hook in wrong:
        with pytest.raises(HookError, match=r"shape|batch_idx"):
            logits(model, inputs, [hook])
    with pytest.raises(InvalidHookError, match="heads"):
        model.run_with_hooks([PatchHeadHook(0, 0, torch.zeros(2), hook_point="lm.mlp.out")])
    with pytest.raises(InvalidHookError, match="tensor"):
        PatchMLPHook(0, [0.0], 1)
    with pytest.raises(HooklineError, match="positions"):
        PatchResidualHook(0, "last", torch.zeros(width))
    assert is_clean(model)


def test_a_token_that_is_not_there_is_told(model, kind) -> None:
    hook = PatchResidualHook(0, 999, torch.zeros(model.adapter.lm_hidden_dim))
    with pytest.warns(NeverFiredWarning, match="999"):
        logits(model, inputs_of(kind), [hook])
    with pytest.raises(HookError, match="position 999"):
        model.hooked.run_with_hooks(**inputs_of(kind), fwd_hooks=[hook])


def test_a_patch_can_be_called_by_hand_and_pickled() -> None:
    x = torch.randn(2, 5, 3)
    hook = pickle.loads(pickle.dumps(PatchResidualHook(0, -1, torch.ones(3))))
    new, cache = hook(nn.Identity(), (), {}, (x, "cache"))
    assert cache == "cache"
    assert torch.equal(new[:, -1], torch.ones(2, 3))
    assert torch.equal(new[:, :-1], x[:, :-1])
    hook.token_idx = 0
    assert torch.equal(hook(nn.Identity(), (), {}, x)[:, 0], torch.ones(2, 3))
    heads = torch.randn(2, 5, 4, 3)
    assert torch.equal(PatchHeadHook(0, 1, torch.ones(3))(nn.Identity(), (), {}, heads)[:, :, 1], torch.ones(2, 5, 3))


def test_gradients_flow_through_and_around_a_patch(model, kind) -> None:
    vector = torch.zeros(model.adapter.lm_hidden_dim, requires_grad=True)
    with model.run_with_hooks([PatchMLPHook(0, vector, 2)]):
        model.forward(inputs_of(kind), require_grads=True).logits.square().sum().backward()
    assert vector.grad is not None
    assert vector.grad.abs().sum() > 0
    assert model.adapter.get_lm_o_proj(0).weight.grad is not None


# Generation


def test_hooks_fire_at_every_step(model, kind) -> None:
    inputs, hooks = inputs_of(kind), [Doubles(name, 0) for name in ROWS]
    with model.run_with_hooks(hooks):
        out = model.generate(inputs, max_new_tokens=4, min_new_tokens=4)
    n = inputs["input_ids"].shape[1]
    assert out.sequences.shape == (1, n + 4)
    for hook in hooks:
        assert len(hook.calls) == 4
    assert [call[3].shape[1] for call in hooks[2].calls] == [n, 1, 1, 1]
    assert is_clean(model)


def test_generation_with_a_hook_is_that_of_torch(model, kind) -> None:
    inputs = inputs_of(kind)
    options = {"max_new_tokens": 6, "min_new_tokens": 6}
    vector = torch.randn(model.adapter.lm_hidden_dim) * 4

    def by_torch(module, args, output):
        output[:, -1] = vector
        return output

    handle = layer_of(model, 1).register_forward_hook(by_torch)
    with torch.no_grad():
        expected = model.model.generate(**inputs, do_sample=False, **options)
    handle.remove()
    with model.run_with_hooks([PatchResidualHook(1, -1, vector)]):
        found = model.generate(inputs, return_dict_in_generate=False, **options)
    assert torch.equal(found, expected)


def test_a_token_counts_in_the_whole_text(model, kind) -> None:
    inputs, width = inputs_of(kind), model.adapter.lm_hidden_dim
    n, seen = inputs["input_ids"].shape[1], []
    look = ("lm.blocks.0.hook_resid_post", lambda module, args, kwargs, output: seen.append(output))
    first, later = PatchResidualHook(0, 0, torch.full((width,), 3.0)), PatchResidualHook(0, n + 1, torch.zeros(width))
    whole = PatchResidualHook(1, None, torch.zeros(n, width))
    after: list[Tensor] = []
    see = ("lm.blocks.1.hook_resid_post", lambda module, args, kwargs, output: after.append(output))
    with model.run_with_hooks([first, later, whole, look, see]):
        model.generate(inputs, max_new_tokens=4, min_new_tokens=4)
    assert [bool((x == 0).all()) for x in after] == [True, False, False, False]
    assert torch.equal(seen[0][0, 0], torch.full((width,), 3.0))
    assert [bool((x == 0).all()) for x in seen] == [False, False, True, False]
    assert not any(bool((x == 3).all()) for x in seen[1:])


def test_generation_refuses_what_it_cannot_do(model, kind) -> None:
    with pytest.raises(HooklineError, match="gradients"):
        model.generate(inputs_of(kind), require_grads=True)
    with pytest.raises(ValueError, match="prepare_messages"):
        model.generate("a prompt")


# The cache


def test_the_keys_are_names_with_layers(model, kind) -> None:
    inputs = inputs_of(kind)
    cache = cached(model, inputs, "lm.layer.post", "lm_resid_pre", "lm.blocks.*.hook_resid_post", "lm.attn.0.z")
    n_layers = model.lm_num_layers
    wanted = {(name, layer) for name in ("lm.layer.post", "lm_resid_pre") for layer in range(n_layers)}
    assert set(cache.keys()) == wanted | {f"lm.blocks.{layer}.hook_resid_post" for layer in range(n_layers)} | {
        "lm.attn.0.z"
    }
    assert model.cache is not None
    assert set(model.cache) == set(cache.keys())
    stacked = cache.stack_layers("lm.layer.post")
    assert stacked.shape == (n_layers, *inputs["input_ids"].shape, model.adapter.lm_hidden_dim)
    assert torch.equal(stacked, cache.stack("lm.blocks.*.hook_resid_post"))
    assert torch.equal(cache[("lm_resid_pre", 1)], cache[("lm.layer.post", 0)])
    assert list(cache.get_all_layers("lm_resid_pre")) == list(range(n_layers))
    with pytest.raises(UnknownPointError, match=r"lm\.layer\.post"):
        cache[("lm.layer.post", 99)]
    with pytest.raises(KeyError, match="any layer"):
        cache.stack_layers("lm.mlp.out")


def test_the_cache_is_what_the_model_reports(model, kind) -> None:
    inputs = inputs_of(kind)
    before = model.model.config._attn_implementation
    cache = cached(model, inputs, "lm.layer.pre", "lm.attn.pattern")
    own = model.forward(inputs, output_hidden_states=True, output_attentions=True)
    assert model.model.config._attn_implementation == before != "eager"
    for layer in range(model.lm_num_layers):
        assert torch.allclose(cache[("lm.layer.pre", layer)], own.hidden_states[layer], atol=1e-5)
        assert torch.allclose(cache[("lm.attn.pattern", layer)], own.attentions[layer], atol=1e-5)


def test_names_of_every_version(model, kind) -> None:
    names = ["lm_resid_mid", "lm_attn_out", "lm_mlp_out", "lm_attn_pattern", "lm.attn.pre"]
    newer = ["lm.blocks.0.attn.hook_out", "lm.blocks.0.attn.hook_head_out", "lm.blocks.0.mlp.hook_out"]
    newer += ["lm.blocks.0.attn.hook_scores", "lm.blocks.0.attn.hook_in", "lm.blocks.0.attn.hook_z"]
    cache = cached(model, inputs_of(kind), *names, *newer)
    assert torch.equal(cache[("lm_attn_out", 0)], cache["lm.blocks.0.attn.hook_out"])
    one = cached(model, inputs_of(kind), ("lm_resid_mid", 1), ("lm.attn.out", -1))
    assert torch.equal(one[("lm_resid_mid", 1)], cache[("lm_resid_mid", 1)])
    assert torch.equal(one[("lm.attn.out", -1)], cache[("lm_attn_out", model.lm_num_layers - 1)])
    assert torch.equal(cache[("lm_mlp_out", 0)], cache["lm.blocks.0.mlp.hook_out"])
    assert torch.equal(cache[("lm.attn.pre", 0)], cache["lm.blocks.0.attn.hook_in"])
    assert torch.allclose(cache["lm.blocks.0.attn.hook_head_out"].sum(2), cache[("lm_attn_out", 0)], atol=1e-5)
    assert torch.allclose(cache["lm.blocks.0.attn.hook_scores"].softmax(-1), cache[("lm_attn_pattern", 0)], atol=1e-5)


def test_what_is_cached_stays_as_it_was_and_the_last_pass_counts(model, kind) -> None:
    inputs, other = inputs_of(kind), inputs_of(kind, seed=5)
    key = ("lm.layer.post", 0)
    with model.run_with_cache(["lm.layer.post"]) as cache:
        model.forward(inputs)
        first = cache[key]
        copy = first.clone()
        model.forward(other)
    assert torch.equal(first, copy)
    assert torch.equal(cache[key], cached(model, other, "lm.layer.post")[key])
    assert not cache[key].requires_grad
    with model.run_with_cache(["lm.layer.post"]) as cache:
        model.generate(inputs, max_new_tokens=3, min_new_tokens=3)
    assert cache[key].shape[1] == 1


def _zero_in_place(module: nn.Module, args: tuple[Any, ...]) -> None:
    args[0].zero_()


def test_what_is_written_to_later_is_cached_as_it_was(model, kind) -> None:
    inputs, key = inputs_of(kind), ("lm.layer.post", 0)
    expected = cached(model, inputs, "lm.layer.post")[key]
    handle = layer_of(model, 1).register_forward_pre_hook(_zero_in_place)
    try:
        found = cached(model, inputs, "lm.layer.post")[key]
    finally:
        handle.remove()
    assert torch.equal(found, expected)


def test_a_cache_is_asked_for_by_a_list(model) -> None:
    for wrong in ("lm.layer.post", []):
        with pytest.raises(HooklineError, match="cache"):
            model.run_with_cache(wrong)


def test_a_cache_of_ones_own() -> None:
    cache = ActivationCache()
    cache[("lm.mlp.out", 1)], cache[("lm.mlp.out", 0)] = torch.ones(2, requires_grad=True), torch.zeros(2)
    assert torch.equal(cache.stack_layers("lm.mlp.out"), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    cache.detach()
    assert not any(x.requires_grad for x in cache.values())
    assert (len(cache), list(cache)) == (2, [("lm.mlp.out", 1), ("lm.mlp.out", 0)])
    cache.clear()
    assert cache.keys() == []


def test_capturing_hooks(model, kind) -> None:
    inputs, cache = inputs_of(kind), ActivationCache()
    logits(model, inputs, [CaptureInputHook(cache, "in", 1), CaptureOutputHook(cache, "out", 1)])
    expected = cached(model, inputs, "lm.layer.pre", "lm.layer.post")
    assert torch.equal(cache[("in", 1)], expected[("lm.layer.pre", 1)])
    assert torch.equal(cache[("out", 1)], expected[("lm.layer.post", 1)])


# The model


def test_forward_leaves_the_model_as_it_was(model, kind) -> None:
    inputs = inputs_of(kind)
    model.model.train()
    model.model.requires_grad_(False)
    out = model.forward(inputs)
    assert not out.logits.requires_grad
    assert all(module.training for module in model.model.modules())
    assert not any(each.requires_grad for each in model.model.parameters())
    assert torch.equal(model(**inputs).logits, out.logits)
    assert torch.equal(model(inputs, return_dict=False)[0], out.logits)
    with torch.no_grad():
        assert torch.equal(model.model.eval()(**inputs).logits, out.logits)


def test_the_parts_of_the_model(model) -> None:
    adapter, parts = model.adapter, model.get_model_components()
    layer = layer_of(model, 1)
    assert adapter.get_lm_layer(1) is layer
    assert adapter.get_lm_attn(1) is layer.self_attn
    assert adapter.get_lm_o_proj(1) is layer.self_attn.o_proj
    assert adapter.get_lm_mlp(1) is layer.mlp
    assert parts["lm_head"] is model.model.lm_head
    assert parts["norm"].weight.shape == (adapter.lm_hidden_dim,)
    assert adapter.get_lm_o_proj(0).in_features == adapter.lm_num_heads * adapter.lm_head_dim
    assert layer.self_attn.k_proj.out_features == adapter.lm_num_kv_heads * adapter.lm_head_dim
    assert layer.mlp.gate_proj.out_features == adapter.lm_mlp_dim
    with pytest.raises(HooklineError, match="layers are 0"):
        adapter.get_lm_mlp(99)


def image(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (20, 28, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_messages(model) -> None:
    inputs, text = model.prepare_messages("what is here", image(), return_text=True)
    is_image_first = text.index(model.processor.image_token) < text.index("what is here")
    assert is_image_first == (model.model.config.model_type == "llava")
    start, end = model.get_image_token_range(inputs)
    assert bool((inputs["input_ids"][0, start : end + 1] == model.adapter.get_image_token_id()).all())
    assert model.get_image_token_range(inputs.to(model.device)) == (start, end)
    assert model.forward(inputs).logits.shape[1] == inputs["input_ids"].shape[1]
    _, text = model.prepare_messages("what", image(), append_text=" red", assistant_prefill="it is", return_text=True)
    assert text.endswith("it is red")
    _, text = model.prepare_inputs("red", image(), prompt_template="describe {text}", return_text=True)
    assert "describe red" in text
    model.prompt = str.upper
    assert "RED" in model.prepare_messages("red", image(), return_text=True)[1]
    with pytest.raises(HooklineError, match="text"):
        model.prepare_inputs("red", image(), prompt_template="{nothing}")
    with pytest.raises(ValueError, match="no image"):
        model.get_image_token_range({"input_ids": torch.tensor([[50, 51]])})


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_batches(model) -> None:
    tasks, images = ["what is here", "describe the red circle here"], [image(), image(1)]
    inputs = model.prepare_messages_batch(tasks, images)
    assert not bool(inputs["attention_mask"].all())
    together = model.forward_batch(inputs).logits
    for row, (task, each) in enumerate(zip(tasks, images, strict=True)):
        alone = model.forward(model.prepare_messages(task, each)).logits
        assert torch.allclose(together[row, -alone.shape[1] :], alone[0], atol=1e-4)
    new = model.generate_batch(tasks=tasks, images=images, max_new_tokens=2, min_new_tokens=2).sequences
    assert new.shape == (2, inputs["input_ids"].shape[1] + 2)
    for wrong in ({}, {"tasks": tasks}, {"inputs_list": [inputs, inputs]}, {"inputs_list": inputs, "tasks": tasks}):
        with pytest.raises(ValueError, match=r"inputs"):
            model.forward_batch(**wrong)
    with pytest.raises(ValueError, match="tasks, 2,"):
        model.prepare_messages_batch(tasks, images[:1])
    with pytest.raises(ValueError, match="2 rows"):
        model.get_image_token_range(inputs)


def test_from_pretrained_and_text_alone() -> None:
    model = HookedVLM.from_pretrained("tinyworld", device="cpu")
    inputs = model.prepare_messages("When Mary and John went to the store", None)
    assert model.model_name == "tinyworld"
    cache = cached(model, inputs, "lm.layer.post")
    assert len(cache) == model.lm_num_layers
    new = model.generate(inputs, max_new_tokens=2).sequences
    assert torch.equal(new[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
    with pytest.raises(HooklineError, match=r"takes none|chat template"):
        model.prepare_messages("what", image())
    with pytest.raises(HooklineError, match="supported"):
        HookedVLM.from_model(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["gemma3", "mllama", "internvl", "qwen3_vl"])
def test_other_families(kind) -> None:
    model, inputs = made(kind), inputs_of(kind)
    found = logits(model, inputs, [hook := Doubles("lm.attn.out", 0)])
    assert hook.calls[0][0] is model.adapter.get_lm_o_proj(0)
    assert not torch.equal(found, model.forward(inputs).logits)
    cache = cached(model, inputs_of(kind, seed=5), "lm.attn.out", "lm.attn.z", "lm.mlp.out")
    z = cache[("lm.attn.z", 0)]
    heads = [PatchHeadHook(0, head, z[0, :, head]) for head in range(z.shape[2])]
    whole = PatchResidualHook(0, None, cache[("lm.attn.out", 0)], hook_point="lm.attn.out")
    assert torch.allclose(logits(model, inputs, heads), logits(model, inputs, [whole]), atol=1e-5)
