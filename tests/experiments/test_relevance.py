"""Relevance: it is conserved, equals a linear model written by hand, and is refused where no rule applies."""

import pytest
import torch
from experiment_models import lead, tokens
from tiny_models import causal_lm
from torch import nn
from torch.nn import functional as F

import hookline
from hookline import HooklineError
from hookline.experiments import attribution, metrics, patching
from hookline.experiments.relevance import relevance
from hookline.experiments.relevance.difference_rules import DifferenceRules
from hookline.experiments.relevance.relevance_patching import _TOLERANCE
from hookline.experiments.relevance.relevance_rules import Rules

METRIC = metrics.logit_diff(5, 7)
NAMES = metrics.logit_diff(" Mary", " John")
KINDS = ("gpt2", "llama", "gemma2", "mixtral", "gptj", "granite", "bloom", "opt", "gpt_oss", "qwen3", "phi3", "bert")
CHOOSES = ("mixtral", "gpt_oss")  # experts, by the largest scores: a difference there has no slope
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"


@pytest.mark.parametrize("attention", ["frozen", "split", "gradient"])
@pytest.mark.parametrize("kind", KINDS)
def test_relevance_is_conserved(models, kind, attention) -> None:
    found = relevance(models[kind], tokens(0), tokens(1), METRIC, attention=attention, check=0)
    assert found.info["conservation"] < 1e-5
    assert found.shape == (4, 7)


def test_without_constants_the_metric_is_shared_among_positions(models) -> None:
    """Llama has no biases: from a stream of zeros, patching in all of the stream has the relevance of the metric."""
    model, text = models["llama"], tokens(1)
    found = relevance(model, tokens(0), text, METRIC, check=0)
    assert found.info["constants"] == pytest.approx(0, abs=1e-6)
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(4)]
    _, clean = model.run_with_cache(tokens(0), names_filter=names)
    _, own = model.run_with_cache(text, names_filter=names)
    rules, seen = Rules(), {}

    def note(x, hook):
        seen[hook.name] = x.requires_grad_()

    with rules:
        logits = model.run_with_hooks(text, fwd_hooks=[*rules.hooks(model.module), *((name, note) for name in names)])
    value = lead(logits).sum()
    for layer, (name, gradient) in enumerate(zip(names, torch.autograd.grad(value, list(seen.values())), strict=True)):
        assert (own[name] * gradient).sum().item() == pytest.approx(value.item(), rel=1e-4)
        expected = value + ((clean[name] - own[name]) * gradient).sum(-1)[0]
        torch.testing.assert_close(found.values[layer], expected.detach(), atol=1e-5, rtol=1e-4)


def test_the_rules_of_a_gated_mlp_are_those_written_by_hand() -> None:
    """A norm divides by a constant, an activation multiplies by one, and a gate and a value get half each."""
    torch.manual_seed(0)
    x, up, gate, down = torch.randn(3, 8), torch.randn(8, 20), torch.randn(8, 20), torch.randn(20, 8)

    def mlp(x):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (F.silu(normed @ gate) * (normed @ up)) @ down

    given, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    with Rules():
        value = mlp(given)
    torch.testing.assert_close(value, mlp(x), rtol=0, atol=0)
    normed = own * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    a, b = normed @ gate, normed @ up
    halves = 0.5 * a * a.sigmoid().detach() * b.detach() + 0.5 * F.silu(a).detach() * b
    to = torch.randn(3, 8)
    found, expected = (torch.autograd.grad(y, z, to)[0] for y, z in ((value, given), (halves @ down, own)))
    torch.testing.assert_close(found, expected)


def test_attention_to_first_order_has_its_gradient_and_a_gate_has_half() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(5, 8, requires_grad=True) for _ in range(3))

    def attend():
        return (query @ key.T).softmax(-1) @ value

    expected = torch.autograd.grad(attend().sum(), (query, key, value))
    with Rules("gradient"):
        found, gated = attend(), query * value
    for mine, theirs in zip(torch.autograd.grad(found.sum(), (query, key, value)), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(torch.autograd.grad(gated.sum(), query)[0], value / 2)


@pytest.mark.parametrize(
    "function",
    [
        *(F.relu, F.gelu, F.silu, torch.tanh, F.elu, lambda x: F.relu(x).square(), lambda x: x**3, F.hardswish),
        *(lambda x: x * torch.sigmoid(x), lambda x: F.layer_norm(x, [8]), lambda x: F.rms_norm(x, [8])),
        *(lambda x: F.layer_norm(x, [8], torch.arange(8.0)), lambda x: F.normalize(x, dim=-1), lambda x: x / x.std()),
        *(lambda x: x.softmax(-1) * x, lambda x: (x @ x.T).softmax(-1) @ x, lambda x: torch.einsum("ij,ij->i", x, x)),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True),
        lambda x: x.gather(-1, x.topk(2).indices),
    ],
)
def test_each_rule_conserves_relevance(function) -> None:
    """The gradient times the input is the output, of functions without a constant; the value stays the same."""
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with Rules():
        y = function(x)
    torch.testing.assert_close(y, function(x), rtol=0, atol=0)
    to = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad(y, x, to)
    assert (gradient * x).sum().item() == pytest.approx((y * to).sum().item(), rel=1e-4)


def test_estimates_come_closer_to_patching_than_gradients(tinyworld) -> None:
    given = (tinyworld, CLEAN, CORRUPTED, NAMES)
    true = patching.sweep(*given, points="mlp_out").values.flatten()
    found = {
        name: torch.corrcoef(torch.stack([estimate(*given, points="mlp_out", check=0).values.flatten(), true]))[0, 1]
        for name, estimate in (("gradients", attribution.attribution_patching), ("relevance", relevance))
    }
    assert found["relevance"] > 0.99 > found["gradients"]
    checked = relevance(*given, points="mlp_out", check=8)
    assert checked.info["checked"] == 8
    assert checked.info["correlation"] > 0.95
    assert checked.info["attention"] == "frozen"


def test_queries_and_keys_need_the_split(tinyworld) -> None:
    given = (tinyworld, CLEAN, CORRUPTED, NAMES)
    for points in ("q", "k", "attn_scores"):
        with pytest.raises(HooklineError, match="split"):
            relevance(*given, points=points, over="layer", check=0)
        assert relevance(*given, points=points, over="layer", check=0, attention="split").values.var() > 0
    assert relevance(*given, points="pattern", over="layer", check=0).values.var() > 0


def test_several_prompts_are_averaged(tinyworld) -> None:
    clean = [CLEAN, "So, when Alice and Bob went to the park, Bob gave a book to"]
    corrupted = [CORRUPTED, "So, when Alice and Bob went to the park, Alice gave a book to"]
    metric = metrics.logit_diff([" Mary", " Alice"], [" John", " Bob"])
    how = {"points": "z", "over": ("layer", "head"), "check": 0}
    both = relevance(tinyworld, clean, corrupted, metric, per_example=True, **how)
    one = relevance(tinyworld, clean[0], corrupted[0], NAMES, **how)
    torch.testing.assert_close(both.isel(example=0).values, one.values, atol=1e-4, rtol=1e-4)
    assert both.info["conservation"] < 1e-5


class Swirl(nn.Module):
    """An activation function that mixes its inputs, of no known kind."""

    def forward(self, x):
        return x + 3 * x.roll(1, -1).sinc()


@pytest.mark.parametrize("attention", ["frozen", "split", "gradient"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "mixtral"])
def test_half_precision_loses_no_more_than_rounding(kind, dtype, attention) -> None:
    """The limit of the dtype holds on models of several kinds; that of float32 would refuse them."""
    model = hookline.hook(causal_lm(kind).to(dtype))
    lost = relevance(model, tokens(0), tokens(1), METRIC, attention=attention, check=0).info["conservation"]
    assert lost <= _TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_that_no_rule_covers_is_refused_with_the_place(dtype) -> None:
    module = causal_lm("gpt2").to(dtype)
    module.transformer.h[2].mlp.act = Swirl()
    with pytest.raises(HooklineError, match=r"between blocks\.2\.hook_resid_mid and blocks\.2\.hook_resid_post"):
        relevance(hookline.hook(module), tokens(0), tokens(1), METRIC)


def test_bad_input(tinyworld) -> None:
    given = (tinyworld, CLEAN, CORRUPTED)
    with pytest.raises(HooklineError, match="frozen"):
        relevance(*given, NAMES, attention="loose")
    with pytest.raises(HooklineError, match="steps"):
        relevance(*given, NAMES, steps=3)
    with pytest.raises(HooklineError, match="resid_pre"):
        relevance(*given, NAMES, points="hook_embed", over="pos")
    with pytest.raises(HooklineError, match="differentiable"):
        relevance(*given, metrics.rank(" Mary"))
    with pytest.raises(HooklineError, match="gradient"):
        relevance(*given, lambda logits: torch.tensor(1.0))
    with pytest.raises(HooklineError, match="same number"):
        relevance(tinyworld, CLEAN, "Mary", NAMES)
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CHOOSES])
def test_differences_are_conserved(models, kind) -> None:
    """Patching in all of the input is the difference of the two runs, which no approximation may lose."""
    given = models[kind], tokens(0, rows=2), tokens(1, rows=2), METRIC
    found = relevance(*given, rules="difference", over="layer", check=0)
    assert found.info["conservation"] < 1e-4
    lost = float((lead(models[kind](given[1])) - lead(models[kind](given[2]))).mean().detach())
    assert float(found.values[0] - found.info["corrupted"]) == pytest.approx(lost, rel=1e-3, abs=1e-4)


def test_differences_estimate_better_than_gradients_and_rules_through_zero(tinyworld) -> None:
    given = {"points": "mlp_out", "progress": False}
    both = tinyworld, CLEAN, CORRUPTED, NAMES
    true = patching.sweep(*both, **given).values
    errors = {
        rules: float((relevance(*both, **given, rules=rules, check=0).values - true).abs().mean())
        for rules in ("zero", "difference")
    }
    plain = float((attribution.attribution_patching(*both, **given, check=0).values - true).abs().mean())
    assert errors["difference"] < errors["zero"] < plain


def test_the_rules_between_two_runs_are_exact_for_their_difference() -> None:
    """Functions of one and of two activations, norms and a softmax: gradient times difference is the difference."""
    torch.manual_seed(0)
    weight, bias = torch.randn(8), torch.randn(8)
    functions = {
        "gelu": F.gelu,
        "silu, gated": lambda x: F.silu(x) * x.flip(-1),
        "layer norm": lambda x: F.layer_norm(x, (8,), weight, bias),
        "rms norm": lambda x: F.rms_norm(x, (8,), weight),
        "rms norm in steps": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        "softmax": lambda x: torch.softmax(x * 3, -1),
        "attention": lambda x: torch.softmax(x @ x.T, -1) @ x,
        "fused": lambda x: F.scaled_dot_product_attention(x[None], 2 * x[None], x[None]),
        "quotient": lambda x: x / (1 + x.square()),
        "soft cap": lambda x: 2 * torch.tanh(x / 2),
    }
    one, two = torch.randn(5, 8), torch.randn(5, 8)
    two[0] = one[0]  # where the runs agree, there is a derivative
    for name, function in functions.items():
        rules = DifferenceRules()
        with torch.no_grad(), rules.recorded():
            there = function(two)
        x = one.clone().requires_grad_()
        with rules:
            here = function(x)
        towards = torch.randn_like(there)
        (gradient,) = torch.autograd.grad(here, x, towards)
        expected = float(((there - here.detach()) * towards).sum())
        assert float(((two - one) * gradient).sum()) == pytest.approx(expected, rel=1e-3, abs=1e-3), name


def test_choices_of_rules(models) -> None:
    given = models["llama"], tokens(0), tokens(1), METRIC
    with pytest.raises(HooklineError, match="rules is"):
        relevance(*given, rules="half")
    with pytest.raises(HooklineError, match="rule"):
        relevance(*given, rules="difference", attention="split")


@pytest.mark.parametrize("kind", CHOOSES)
def test_differences_of_a_choice_are_refused(models, kind) -> None:
    with pytest.raises(HooklineError, match=r"not conserved|other functions"):
        relevance(models[kind], tokens(0, rows=2), tokens(1, rows=2), METRIC, rules="difference", check=0)
