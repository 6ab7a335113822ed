"""Points that no model computes itself: inside norms, of each head, of the router."""

import pytest
import tiny_models
import torch

import hookline
from hookline import HookError, HooklineError
from hookline.errors import UnavailablePointError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own


def wrapped(kind):
    module = tiny_models.nudged(kind)
    return hookline.hook(module), tiny_models.inputs(module)


def test_the_inside_of_a_layer_norm_by_hand() -> None:
    model, inputs = wrapped("gpt2")
    norm = model.module.transformer.h[1].ln_1
    with torch.no_grad():
        _, cache = model.run_with_cache(**inputs)
        x = cache["resid_pre", 1]
        scale = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        assert torch.allclose(cache["scale", 1, "ln1"], scale, rtol=1e-5)
        assert torch.allclose(cache["normalized", 1, "ln1"], (x - x.mean(-1, keepdim=True)) / scale, atol=1e-5)
        seen = {}
        model.run_with_hooks(
            **inputs,
            fwd_hooks=[
                ("transformer.h.1.ln_1", lambda y: seen.update(y=y)),
                ("blocks.1.ln1.hook_normalized", lambda n: n + 1),  # comes first all the same
                ("blocks.1.ln1.hook_scale", lambda s: s * 2),
            ],
        )
        by_hand = ((x - x.mean(-1, keepdim=True)) / (2 * scale) + 1) * norm.weight + norm.bias
        assert torch.allclose(seen["y"], by_hand, atol=1e-5)


def test_edits_of_a_norms_scale_add_up_and_are_cached() -> None:
    model, inputs = wrapped("llama")
    name = "blocks.2.ln2.hook_scale"
    with torch.no_grad():
        _, plain = model.run_with_cache(**inputs)
        logits, cache = model.run_with_cache(**inputs, fwd_hooks=[(name, lambda s: s * 2), (name, lambda s: s * 3)])
        assert torch.allclose(cache[name], plain[name] * 6)
        assert torch.allclose(cache["normalized", 2, "ln2"] * 6, plain["normalized", 2, "ln2"], atol=1e-5)
        assert torch.allclose(logits, model.run_with_hooks(**inputs, fwd_hooks=[(name, lambda s: s * 6)]), atol=1e-5)


def test_results_of_heads_by_hand() -> None:
    model, inputs = wrapped("gpt2")
    attn = model.module.transformer.h[1].attn
    with torch.no_grad():
        _, cache = model.run_with_cache(**inputs, names_filter=["blocks.1.attn.hook_z", "blocks.1.attn.hook_result"])
        weight = attn.c_proj.weight.unflatten(0, (model.cfg.n_heads, -1))
        assert torch.allclose(cache["result", 1], torch.einsum("bphe,hed->bphd", cache["z", 1], weight), atol=1e-6)

        def zero_head(result):
            result[:, :, 2] = 0

        def zero_z(z):
            z[:, :, 2] = 0

        by_result = model.run_with_hooks(**inputs, fwd_hooks=[("blocks.1.attn.hook_result", zero_head)])
        by_z = model.run_with_hooks(**inputs, fwd_hooks=[("blocks.1.attn.hook_z", zero_z)])
        assert torch.allclose(by_result, by_z, atol=1e-5)


class Odd(torch.nn.Linear):
    """A linear map of a class of its own, as adapters and quantised ones are."""


def test_results_of_a_projection_of_another_class() -> None:
    model, inputs = wrapped("llama")
    with torch.no_grad():
        plain = model.run_with_cache(**inputs, names_filter="blocks.*.attn.hook_result")[1]
        model.module.model.layers[1].self_attn.o_proj.__class__ = Odd
        odd = model.run_with_cache(**inputs, names_filter="blocks.*.attn.hook_result")[1]
    assert torch.allclose(plain["result", 1], odd["result", 1], atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox"])  # fused, grouped, interleaved
def test_a_heads_own_query_input_changes_that_head_alone(kind) -> None:
    model, inputs = wrapped(kind)
    other = torch.randn(model.cfg.d_model)

    def patch(copies):
        copies[:, 3, 2] = other

    with torch.no_grad():
        names = ["blocks.1.hook_q_input", *(f"blocks.1.attn.hook_{part}" for part in "qkv")]
        _, plain = model.run_with_cache(**inputs, names_filter=names)
        _, cache = model.run_with_cache(**inputs, names_filter=names, fwd_hooks=[(names[0], patch)])

        def stream(resid):
            resid[:, 3] = other

        _, moved = model.run_with_cache(**inputs, names_filter=names, fwd_hooks=[("blocks.1.hook_resid_pre", stream)])
    assert torch.equal(cache["blocks.1.hook_q_input"][:, 3, 2], other.expand(2, -1))
    expected = plain["q", 1].clone()
    expected[:, 3, 2] = moved["q", 1][:, 3, 2]
    assert torch.allclose(cache["q", 1], expected, atol=1e-5)
    changed = (cache["q", 1] != plain["q", 1]).nonzero()
    assert set(map(tuple, changed[:, 1:3].tolist())) == {(3, 2)}
    assert torch.equal(cache["k", 1], plain["k", 1])
    assert torch.equal(cache["v", 1], plain["v", 1])


def test_what_comes_later_on_the_way_has_the_last_word() -> None:
    model, inputs = wrapped("gpt2")
    q, q_input, attn_in = "blocks.1.attn.hook_q", "blocks.1.hook_q_input", "blocks.1.hook_attn_in"
    with torch.no_grad():
        hooks = [(q, torch.zeros_like), (q_input, torch.zeros_like)]
        assert not model.run_with_cache(**inputs, names_filter=q, fwd_hooks=hooks)[1][q].any()
        hooks = [(q_input, lambda x: x * 2), (attn_in, torch.ones_like)]
        _, cache = model.run_with_cache(**inputs, names_filter=[q_input, attn_in], fwd_hooks=hooks)
        assert torch.equal(cache[q_input], torch.full_like(cache[q_input], 2))
        hooks = [("blocks.1.hook_resid_mid", torch.zeros_like), ("blocks.1.hook_attn_out", torch.ones_like)]
        _, cache = model.run_with_cache(**inputs, fwd_hooks=hooks)
        assert torch.equal(cache["attn_out", 1], torch.ones_like(cache["attn_out", 1]))
        assert cache["resid_mid", 1].abs().max() < 1e-5


def test_an_edit_in_two_contexts_takes_effect_once_each() -> None:
    model, inputs = wrapped("gpt2")
    name, q = "blocks.1.hook_q_input", "blocks.1.attn.hook_q"
    with torch.no_grad():
        once = model.run_with_cache(**inputs, names_filter=q, fwd_hooks=[(name, lambda x: x + 2)])[1][q]
        with model.hooks(fwd_hooks=[(name, lambda x: x + 1)]):
            twice = model.run_with_cache(**inputs, names_filter=q, fwd_hooks=[(name, lambda x: x + 1)])[1][q]
    assert torch.allclose(once, twice, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_detached_input_of_heads_has_no_gradient(kind) -> None:
    """Its value is the same, so no head seems to be edited; but the gradient must not go through the queries."""
    model, inputs = wrapped(kind)

    def gradients(point, hook):
        found = []
        hooks = [("blocks.1.hook_resid_pre", lambda grad: found.append(grad.clone()))]
        model.zero_grad()
        with model.hooks(fwd_hooks=[(point, hook)], bwd_hooks=hooks):
            model(**inputs).square().sum().backward()
        return found[0]

    detached = gradients("blocks.1.hook_q_input", lambda x: x.detach())
    expected = gradients("blocks.1.attn.hook_q", lambda q: q.detach())
    assert torch.allclose(detached, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert not torch.allclose(detached, gradients("blocks.1.hook_q_input", lambda x: None), rtol=1e-2)


def test_points_of_each_head_are_worked_out_on_request_only() -> None:
    model, inputs = wrapped("gpt2")
    with torch.no_grad():
        _, cache = model.run_with_cache(**inputs)
    wide = ("hook_result", "hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input")
    assert not [name for name in cache if name.endswith(wide)]
    assert [name for name in model.hook_dict if name.endswith("hook_result")]
    with torch.no_grad():
        _, cache = model.run_with_cache(**inputs, names_filter=lambda name: name.endswith("hook_result"))
    assert len(cache) == model.cfg.n_layers


def test_grouped_heads_have_no_copy_of_their_own_for_everything() -> None:
    model, inputs = wrapped("llama")
    with pytest.raises(UnavailablePointError, match="hook_q_input"):
        model.run_with_cache(**inputs, names_filter="blocks.0.hook_attn_in")


def test_a_norms_inside_and_copies_before_it_do_not_go_together() -> None:
    model, inputs = wrapped("gpt2")
    hooks = [("blocks.1.ln1.hook_scale", lambda s: s * 2), ("blocks.1.hook_q_input", lambda x: x + 1)]
    with pytest.raises((HooklineError, HookError), match="hook_scale"):
        model.run_with_hooks(**inputs, fwd_hooks=hooks)


def test_the_mlps_own_stream_where_one_norm_serves_two() -> None:
    model, inputs = wrapped("gptj")
    norm, mlp = model.module.transformer.h[1].ln_1, model.module.transformer.h[1].mlp
    with torch.no_grad():
        _, cache = model.run_with_cache(**inputs, fwd_hooks=[("blocks.1.hook_mlp_in", lambda x: x + 1)])
        _, plain = model.run_with_cache(**inputs)
        assert torch.equal(cache["attn_out", 1], plain["attn_out", 1])
        assert torch.allclose(cache["mlp_out", 1], mlp(norm(plain["resid_pre", 1] + 1)), atol=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_router_decides(kind) -> None:
    model, inputs = wrapped(kind)
    layer = next(i for i in range(model.cfg.n_layers) if f"blocks.{i}.mlp.hook_router" in model.hook_dict)
    router, chosen, weights = (f"blocks.{layer}.mlp.hook_{x}" for x in ("router", "expert_indices", "expert_weights"))

    def prefer(logits):
        logits[..., 1] = 50.0

    with torch.no_grad():
        _, cache = model.run_with_cache(**inputs, fwd_hooks=[(router, prefer)])
        assert (cache[chosen] == 1).any(-1).all()
        assert cache[router].shape[:2] == cache[chosen].shape[:2] == inputs["input_ids"].shape
        assert torch.allclose(cache[weights].max(-1).values, torch.ones(inputs["input_ids"].shape), atol=1e-5)


def test_gradients_of_the_insides() -> None:
    model, inputs = wrapped("gpt2")
    names = ["blocks.1.attn.hook_result", "blocks.1.ln2.hook_scale", "blocks.2.hook_v_input"]
    _, cache = model.run_with_cache(**inputs, names_filter=names, incl_bwd=True, return_type="loss")
    for name in names:
        nudge = 1e-2 * torch.randn_like(cache[name])
        hooks = [(name, lambda x, nudge=nudge: x + nudge)], [(name, lambda x, nudge=nudge: x - nudge)]
        up, down = (model.run_with_hooks(**inputs, return_type="loss", fwd_hooks=each) for each in hooks)
        assert torch.allclose((up - down) / 2, (cache[name + "_grad"] * nudge).sum(), rtol=0.05, atol=2e-5), name


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_cache_is_of_its_point_while_another_context_looks_into_the_module(kind) -> None:
    # The stream after attention is edited in what the attention module gives. What that adds is cached before, also
    # when another context watches the inside of the same module.
    model, inputs = wrapped(kind)
    with torch.no_grad():
        clean = model.cache(**inputs, names_filter="blocks.0.hook_attn_out")["attn_out", 0]
        outer = [("blocks.0.attn.hook_pattern", lambda x: None), ("blocks.0.hook_resid_mid", lambda x: x * 0.5)]
        with model.hooks(fwd_hooks=outer):
            inner = model.cache(**inputs, names_filter="blocks.0.hook_attn_out")["attn_out", 0]
    torch.testing.assert_close(inner, clean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gpt_oss", "mimo_v2_flash", "hy_v4"])
def test_scores_are_whole_where_the_model_subtracts_their_maximum(kind) -> None:
    """Models with a sink subtract the maximum of each row against overflow; the table's scores are those before."""
    model = hookline.hook(tiny_models.causal_lm(kind))
    inputs, name = tiny_models.inputs(model.module), "blocks.1.attn.hook_attn_scores"
    q, k = (f"blocks.1.attn.hook_rot_{which}" for which in "qk")
    with torch.no_grad():
        logits, cache = model.run_with_cache(**inputs, names_filter=[name, q, k])
        scores = cache[name]
        keys = cache[k].repeat_interleave(cache[q].shape[2] // cache[k].shape[2], 2)
        products = torch.einsum("bphe,bkhe->bhpk", cache[q], keys)
        seen = scores > torch.finfo(scores.dtype).min / 2
        ratios = scores[seen] / products[seen]
        assert torch.allclose(ratios, ratios.median().expand_as(ratios), rtol=1e-3), "scaled products, and no shift"
        assert torch.equal(logits, model(**inputs)), "reading them changes nothing"
        same = model.run_with_hooks(**inputs, fwd_hooks=[(name, lambda x: x + 0.0)])
        assert torch.allclose(same, logits, atol=1e-5)
        pattern = name.replace("attn_scores", "pattern")
        added = [(name, lambda x: x + 3.0)]
        _, before = model.run_with_cache(**inputs, names_filter=pattern)
        _, after = model.run_with_cache(**inputs, names_filter=pattern, fwd_hooks=added)
    rest = [1 - each[pattern].sum(-1) for each in (before, after)]
    odds = [each[pattern].sum(-1) / left for each, left in zip((before, after), rest, strict=True)]
    assert torch.allclose(odds[1], odds[0] * torch.e**3, rtol=1e-2), "against the sink, which stays as it is"
