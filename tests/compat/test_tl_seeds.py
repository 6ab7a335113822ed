"""What the two pages on TransformerLens's hooks show, through the compatible interface: only the import is another."""

from functools import partial

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hookline
from hookline.compat.transformer_lens import HookedTransformer, HookPoint
from hookline.compat.transformer_lens.model_bridge import TransformerBridge

CLEAN, CORRUPTED = "The capital of France is", "The capital of Germany is"


@pytest.fixture(scope="module", params=["tinyworld", "gpt2-shaped"])
def model(request) -> HookedTransformer:
    if request.param == "tinyworld":
        return HookedTransformer.from_pretrained("tinyworld", device="cpu")
    torch.manual_seed(0)
    config = GPT2Config(n_layer=9, n_head=6, n_embd=48, vocab_size=1024, n_positions=64, bos_token_id=0, eos_token_id=0)
    tokenizer = hookline.load("tinyworld").tokenizer
    return HookedTransformer.from_pretrained("gpt2", hf_model=GPT2LMHeadModel(config).eval(), tokenizer=tokenizer)


@pytest.fixture
def layer(model) -> int:
    """5 as on the pages, or the last there is."""
    return min(5, model.cfg.n_layers - 1)


# The hook system


def test_cache_everything(model, layer) -> None:
    logits, cache = model.run_with_cache("Hello, world")
    assert cache["blocks.0.attn.hook_q"].shape == (*logits.shape[:2], model.cfg.n_heads, model.cfg.d_head)
    assert cache[f"blocks.{layer}.hook_resid_post"].shape == (*logits.shape[:2], model.cfg.d_model)
    assert cache["ln_final.hook_normalized"].shape == (*logits.shape[:2], model.cfg.d_model)
    assert cache.decompose_resid().shape[-1] == model.cfg.d_model
    assert cache.apply_ln_to_stack(cache.decompose_resid()).shape == cache.decompose_resid().shape


def test_bridge(layer) -> None:
    bridge = TransformerBridge.boot_transformers("tinyworld", device="cpu")
    layer = min(layer, 3)
    logits, cache = bridge.run_with_cache("Hello, world")
    own = hookline.load("tinyworld")
    assert torch.equal(logits, own(bridge.to_tokens("Hello, world"))), "weights are as they were loaded"
    for native, classic in (
        (f"blocks.{layer}.attn.q.hook_out", f"blocks.{layer}.attn.hook_q"),
        (f"blocks.{layer}.hook_out", f"blocks.{layer}.hook_resid_post"),
        ("embed.hook_out", "hook_embed"),
    ):
        assert cache[native] is cache[classic]
    bridge.enable_compatibility_mode()
    again, later = bridge.run_with_cache("Hello, world")
    torch.testing.assert_close(again.log_softmax(-1), logits.log_softmax(-1), atol=1e-3, rtol=1e-3)
    assert later[f"blocks.{layer}.attn.hook_q"] is later[f"blocks.{layer}.attn.q.hook_out"]
    assert bridge.cfg.normalization_type == "LNPre"


def test_cache_some(model) -> None:
    _, cache = model.run_with_cache("Hello, world", names_filter=lambda name: name.endswith("hook_resid_post"))
    assert list(cache) == [f"blocks.{each}.hook_resid_post" for each in range(model.cfg.n_layers)]


def test_zero_a_head_in_place(model, layer) -> None:
    def zero_out_head_3(activation, hook):
        activation[:, :, 3, :] = 0
        return activation

    name = f"blocks.{layer}.attn.hook_z"
    logits = model.run_with_hooks("Hello, world", fwd_hooks=[(name, zero_out_head_3)])
    assert not torch.equal(logits, model("Hello, world"))
    with model.hooks(fwd_hooks=[(name, zero_out_head_3)]) as hooked:
        assert torch.equal(hooked("Hello, world"), logits)
        assert hooked.run_with_cache("Hello, world")[1][name][:, :, 3].eq(0).all()


def test_a_hook_may_take_its_point_by_keyword_only(model, layer) -> None:
    names = []

    def note(tensor: torch.Tensor, *, hook: HookPoint) -> None:
        names.append(hook.name)

    points = [f"blocks.{layer}.hook_resid_post", "hook_embed"]
    model.run_with_hooks("Hello, world", fwd_hooks=[(name, note) for name in points])
    assert sorted(names) == sorted(points)


def test_hooks_by_hand(model, layer) -> None:
    seen = []
    point = model.blocks[layer].attn.hook_z
    point.add_hook(lambda z, hook: seen.append("temporary"), dir="fwd")
    point.add_hook(lambda z, hook: seen.append("permanent"), dir="fwd", is_permanent=True)
    model("Hello, world")
    model.remove_all_hook_fns()
    model("Hello, world")
    model.remove_all_hook_fns(including_permanent=True)
    model("Hello, world")
    assert seen == ["temporary", "permanent", "permanent"]


def test_one_activation(model, layer) -> None:
    _, cache = model.run_with_cache("text", names_filter=f"blocks.{layer}.hook_resid_post")
    assert list(cache) == [f"blocks.{layer}.hook_resid_post"]


def test_patch_the_whole_stream(model, layer) -> None:
    clean_logits, clean_cache = model.run_with_cache(CLEAN)
    target = clean_cache[f"blocks.{layer}.hook_resid_post"]

    def patch(resid, hook):
        return target

    logits = model.run_with_hooks(CORRUPTED, fwd_hooks=[(f"blocks.{layer}.hook_resid_post", patch)])
    torch.testing.assert_close(logits, clean_logits)


def test_scale_a_gradient(model, layer) -> None:
    def gradient(*bwd_hooks) -> torch.Tensor:
        embeddings = model.module.get_input_embeddings().weight
        loss = model.run_with_hooks("Hello, world", bwd_hooks=[*bwd_hooks], return_type="loss")
        return torch.autograd.grad(loss, embeddings)[0]

    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    torch.testing.assert_close(gradient((last, lambda grad, hook: grad * 0.1)), 0.1 * gradient(), atol=1e-6, rtol=1e-4)


def test_order(model) -> None:
    seen = []
    point = model.blocks[0].hook_resid_pre
    for name, first in (("one", False), ("two", False), ("zero", True)):
        point.add_hook(lambda x, hook, name=name: seen.append(name), prepend=first)
    model("Hello, world")
    model.reset_hooks()
    assert seen == ["zero", "one", "two"]


# Hooks and interventions


def test_print_a_shape(model) -> None:
    shapes = {}

    def my_hook(activation, hook):
        shapes[hook.name] = tuple(activation.shape)
        return activation

    model.run_with_hooks("Hello world", fwd_hooks=[("blocks.0.attn.hook_pattern", my_hook)])
    n = model.to_tokens("Hello world").shape[1]
    assert shapes == {"blocks.0.attn.hook_pattern": (1, model.cfg.n_heads, n, n)}


def test_list_the_points(model) -> None:
    names = [name for name, hook in model.hook_dict.items() if hook.name == name]
    block = ["hook_resid_pre", "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_pattern", "attn.hook_z",
             "hook_attn_out", "hook_resid_mid", "mlp.hook_pre", "mlp.hook_post", "hook_resid_post"]  # fmt: skip
    listed = ["hook_embed", "hook_pos_embed"]
    listed += [f"blocks.{each}.{name}" for each in range(model.cfg.n_layers) for name in block]
    assert [name for name in names if name in listed] == listed


def test_store(model, layer) -> None:
    stored_activations = {}

    def store_hook(activation, hook):
        stored_activations[hook.name] = activation.clone()
        return activation

    names = [f"blocks.{layer}.hook_resid_post", f"blocks.{layer}.attn.hook_pattern"]
    model.run_with_hooks("The cat sat", fwd_hooks=[(name, store_hook) for name in names])
    _, cache = model.run_with_cache("The cat sat")
    for name in names:
        torch.testing.assert_close(stored_activations[name], cache[name])


def zero_head_hook(activation, hook, head_idx):
    activation[:, :, head_idx, :] = 0
    return activation


def patch_hook(activation, hook, patch_cache, pos=None):
    value = patch_cache[hook.name]
    if pos is not None:
        activation[:, pos] = value[:, pos]
    else:
        activation[:] = value
    return activation


def test_zero_a_head(model) -> None:
    hooks = [("blocks.3.attn.hook_z", partial(zero_head_hook, head_idx=5))]
    assert not torch.equal(model.run_with_hooks("The cat sat", fwd_hooks=hooks), model("The cat sat"))


@pytest.mark.parametrize("pos", [None, -1])
def test_patch_positions(model, pos) -> None:
    clean_logits, clean_cache = model.run_with_cache(CLEAN)
    last = model.cfg.n_layers - 1
    hook = partial(patch_hook, patch_cache=clean_cache, pos=pos)
    logits = model.run_with_hooks(CORRUPTED, fwd_hooks=[(f"blocks.{last}.hook_resid_post", hook)])
    torch.testing.assert_close(logits[:, -1], clean_logits[:, -1])
    if pos is not None:
        assert torch.equal(logits[:, :-1], model(CORRUPTED)[:, :-1])


def test_causal_tracing(model) -> None:
    clean_logits, clean_cache = model.run_with_cache(CLEAN)
    target = clean_logits[0, -1].argmax()
    corrupted = model(CORRUPTED)[0, -1, target]
    results = []
    for each in range(model.cfg.n_layers):
        hooks = [(f"blocks.{each}.hook_resid_post", partial(patch_hook, patch_cache=clean_cache))]
        patched = model.run_with_hooks(CORRUPTED, fwd_hooks=hooks)[0, -1, target]
        results.append((patched - corrupted) / (clean_logits[0, -1, target] - corrupted))
    torch.testing.assert_close(torch.stack(results), torch.ones(len(results)), atol=1e-3, rtol=1e-3)


def test_filter(model) -> None:
    names = []

    def hook_filter(name):
        return "attn" in name and "pattern" in name

    model.run_with_hooks("Hello", fwd_hooks=[(hook_filter, lambda x, hook: names.append(hook.name))])
    assert names == [f"blocks.{each}.attn.hook_pattern" for each in range(model.cfg.n_layers)]


def test_importance(model, layer) -> None:
    clean_loss = model(CLEAN, return_type="loss")
    ablated_loss = model.run_with_hooks(
        CLEAN,
        fwd_hooks=[(f"blocks.{layer}.attn.hook_z", partial(zero_head_hook, head_idx=2))],
        return_type="loss",
    )
    assert clean_loss.ndim == ablated_loss.ndim == 0
    assert ablated_loss != clean_loss


def test_direct_logit_attribution(model) -> None:
    logits, cache = model.run_with_cache(CLEAN)
    parts = cache["embed"] + cache["pos_embed"]
    for each in range(model.cfg.n_layers):
        heads = [cache["z", each][:, :, head, :] @ model.W_O[each, head] for head in range(model.cfg.n_heads)]
        parts = parts + sum(heads) + model.b_O[each] + cache["mlp_out", each]
    scale = cache["ln_final.hook_scale"]
    torch.testing.assert_close(parts / scale @ model.W_U + model.b_U, logits, atol=1e-3, rtol=1e-3)


def test_pairs_of_prompts(model) -> None:
    honest, sycophantic = (
        "I think it is Rome. The capital of France is",
        "I think it is Madrid. The capital of France is",
    )
    _, honest_cache = model.run_with_cache(honest)
    _, syco_cache = model.run_with_cache(sycophantic)
    differences = torch.stack(
        [
            (honest_cache["z", each][:, :, head] - syco_cache["z", each][:, :, head]).norm()
            for each in range(model.cfg.n_layers)
            for head in range(model.cfg.n_heads)
        ]
    )
    assert (differences > 0).all()
