"""Interception of operators: in one thread and one module only, and nothing is left of it."""

import sys
import threading

import devices
import pytest
import tiny_models
import torch
from backends import needs_compiler
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import hookline
from hookline.engine._inner import operators
from hookline.engine._inner.interception import OperatorInterceptor, start, stop
from hookline.engine._torch.dispatch_keys import KEY, set_key

OPERATORS = {
    "fused": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.5),
    "softmax": lambda x: x.softmax(-1, dtype=torch.float64),
    "product": lambda x: x @ x.transpose(-2, -1),
    "bmm": lambda x: torch.bmm(x[0], x[0].mT),
    "baddbmm": lambda x: torch.baddbmm(x[0][:, :, :1], x[0], x[0].mT, beta=0.5),
    "split": lambda x: x.split([1, 2], 2)[1],
    "halves": lambda x: x.split(2, -1)[0],
    "difference": lambda x: x - x.max(-1, keepdim=True).values,
}


class Noting(OperatorInterceptor):
    """Notes what is called, and calls it."""

    def __init__(self, inside=lambda: None):
        super().__init__(nn.Identity(), {})
        self.seen, self.inside = [], inside

    def operator(self, func, args, kwargs):
        self.seen.append(func)
        self.inside()
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_an_operator_is_intercepted_once_and_computes_what_it_always_does(name: str, needs_grad: bool) -> None:
    x, work, noting = torch.randn(1, 2, 3, 4, requires_grad=needs_grad), OPERATORS[name], Noting()
    expected = work(x)
    start(noting)
    try:
        found = work(x)
    finally:
        stop(0)
    assert len(noting.seen) == 1
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert found.requires_grad == needs_grad
    assert operators.is_off()
    work(x)
    assert len(noting.seen) == 1


def test_other_operators_and_those_inside_an_operator_are_not_intercepted() -> None:
    x, noting = torch.randn(1, 2, 3, 4), Noting()
    start(noting)
    torch.einsum("bhpe,bhke->bhpk", x, x)
    (x * 2 + x.transpose(1, 2).transpose(1, 2)).cumsum(1)
    stop(0)
    assert not noting.seen


def test_what_an_interceptor_calls_reaches_that_of_the_module_around_it() -> None:
    x, outer, inner = torch.randn(1, 2, 3, 4), Noting(), Noting()
    start(outer)
    start(inner)
    x.softmax(-1)
    stop(1)
    x.softmax(-1)
    stop(0)
    assert (len(outer.seen), len(inner.seen)) == (2, 1)


def test_a_model_that_runs_in_a_hook_leaves_the_rest_of_the_hook_alone() -> None:
    model, other = (hookline.hook(tiny_models.nudged("gpt2")) for _ in range(2))
    tokens, seen = model.example_tokens(), []

    def runs_another(pattern):
        other.run_with_cache(tokens, names_filter="blocks.0.attn.hook_pattern")
        seen.append(operators.is_off())
        return pattern.softmax(-1)

    def compute(x):
        return x.softmax(-1)

    point = "blocks.0.attn.hook_pattern"
    found = model.run_with_hooks(tokens, fwd_hooks=[(point, runs_another)])
    assert torch.equal(found, model.run_with_hooks(tokens, fwd_hooks=[(point, compute)]))
    assert seen == [True]
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_q", lambda q: runs_another(q) * 0 + q)])
    assert seen == [True, True]


def test_other_threads_are_not_intercepted() -> None:
    x, noting, seen = torch.randn(1, 2, 3, 4), Noting(), []
    start(noting)
    thread = threading.Thread(target=lambda: seen.append((x.softmax(-1), operators.is_off())))
    thread.start()
    thread.join()
    stop(0)
    assert not noting.seen
    assert seen[0][1]


def test_an_error_comes_out_as_it_is_and_leaves_nothing() -> None:
    class FailedError(Exception):
        pass

    def fail():
        raise FailedError

    start(Noting(fail))
    with pytest.raises(FailedError):
        torch.randn(1, 2, 3, 4).softmax(-1)
    assert not operators.is_off()
    stop(0)
    assert operators.is_off()


def test_a_key_that_an_interrupt_left_set_does_nothing() -> None:
    x = torch.randn(1, 2, 3, 4)
    expected = x.softmax(-1)
    operators._register()
    set_key(KEY, True)
    assert torch.equal(x.softmax(-1), expected)
    assert operators.is_off()


def test_backward_in_an_intercepted_module() -> None:
    x, noting = torch.randn(1, 2, 3, 4, requires_grad=True), Noting()
    (expected,) = torch.autograd.grad((x @ x.mT).softmax(-1).square().sum(), x)
    start(noting)
    (found,) = torch.autograd.grad((x @ x.mT).softmax(-1).square().sum(), x)
    stop(0)
    assert torch.equal(found, expected)
    assert noting.seen == [torch.matmul, torch.softmax]


def test_a_module_that_runs_in_a_backward_pass_is_intercepted() -> None:
    noting, seen = Noting(), []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            start(noting)
            seen.append(gradient.softmax(-1))
            stop(0)
            return gradient

    Twice.apply(torch.randn(1, 2, 3, 4, requires_grad=True)).sum().backward()
    assert noting.seen == [torch.softmax]
    assert seen


@torch.library.custom_op("hookline_test::weights", mutates_args=())
def weights(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.mT).softmax(-1)


def test_what_an_operator_of_somebody_else_computes_is_not_intercepted() -> None:
    x, noting = torch.randn(1, 2, 3, 4), Noting()
    start(noting)
    weights(x)
    stop(0)
    assert not noting.seen


def test_a_module_that_enters_inference_mode_is_intercepted() -> None:
    x, noting = torch.randn(1, 2, 3, 4), Noting()
    start(noting)
    with torch.inference_mode():
        x.softmax(-1)
    stop(0)
    assert noting.seen == [torch.softmax]


POINTS = "blocks.0.attn.hook_rot_q", "blocks.0.attn.hook_pattern"


@pytest.fixture(params=["eager", "sdpa"])
def llama(request) -> hookline.HookedModel:
    module = tiny_models.causal_lm("llama")
    module.set_attn_implementation(request.param)
    return hookline.hook(module)


@pytest.mark.on_cpu(reason="elsewhere the tests themselves set a default device")
def test_hooks_under_a_default_device_have_it(llama) -> None:
    seen = []
    with torch.device("meta"):
        llama.run_with_hooks(
            llama.example_tokens(), fwd_hooks=[(name, lambda _x: seen.append(torch.zeros(1).device)) for name in POINTS]
        )
    assert [each.type for each in seen] == ["meta", "meta"]


class HalfPatterns(TorchFunctionMode):
    """Halves what every softmax returns."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result / 2 if func in (torch.softmax, F.softmax, torch.Tensor.softmax) else result


def test_hooks_see_what_the_mode_of_somebody_else_makes_of_a_function(llama) -> None:
    llama.module.set_attn_implementation("eager")
    with HalfPatterns():
        _, filtered = llama.run_with_cache(llama.example_tokens(), names_filter=POINTS[1])
        _, full = llama.run_with_cache(llama.example_tokens())
    for cache in (filtered, full):
        rows = cache[POINTS[1]].sum(-1)
        torch.testing.assert_close(rows, torch.full_like(rows, 0.5))


class Marked(torch.Tensor):
    """A subclass that its functions return."""


def test_hooks_get_the_subclass_of_tensors_that_the_model_computes_with(llama) -> None:
    tokens, seen = llama.example_tokens(), []
    embedded = llama.module.get_input_embeddings()(tokens).detach().as_subclass(Marked)
    with llama.hooks(fwd_hooks=[(name, lambda x: seen.append((type(x), type(x * 2)))) for name in POINTS]):
        llama.module(inputs_embeds=embedded)
    assert seen == [(Marked, Marked)] * 2


def test_a_cache_that_is_read_inside_attention_is_not_part_of_it(llama) -> None:
    tokens = llama.example_tokens()
    _, expected = llama.run_with_cache(tokens, names_filter=POINTS)
    _, earlier = llama.run_with_cache(tokens)
    projection = llama.module.model.layers[0].self_attn.q_proj
    handle = projection.register_forward_hook(lambda *_: (earlier["pattern", 1], None)[1])
    _, found = llama.run_with_cache(tokens, names_filter=POINTS)
    handle.remove()
    for name in POINTS:
        assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["reads", "keeps", "gradient"])
@pytest.mark.parametrize("point", POINTS)
def test_reading_moves_no_bit_of_the_fused_output_if_there_are_gradients(point, kind, is_checkpointed) -> None:
    """What a hook keeps is in the graph, with the gradient that it has where attention is computed in steps."""

    def run(module: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        kept: list[torch.Tensor] = []
        read = {"reads": lambda _: None, "keeps": lambda x: x.retain_grad() or kept.append(x), "gradient": kept.append}
        hooks = {"bwd_hooks" if kind == "gradient" else "fwd_hooks": [(point, read[kind])]}
        with hookline.hook(module).hooks(**hooks):
            logits = module(tokens).logits
            logits.square().sum().backward()
        weight = module.model.layers[0].self_attn.q_proj.weight
        gradient, weight.grad = weight.grad, None
        return logits, [x.grad if kind == "keeps" else x for x in kept], gradient

    module, tokens = tiny_models.causal_lm("llama"), torch.tensor([[5, 9, 31, 7]])
    if is_checkpointed:
        module.gradient_checkpointing_enable({"use_reentrant": False})
        module.train()
    expected = module(tokens, use_cache=False).logits
    logits, gradients, of_weight = run(module)
    assert torch.equal(logits, expected)
    module.set_attn_implementation("eager")
    _, gradients_in_steps, of_weight_in_steps = run(module)
    assert len(gradients) == len(gradients_in_steps) == (kind != "reads")
    close = {"atol": 1e-4, "rtol": 1e-4} if devices.DEVICE.type != "cpu" else {}  # its fused kernels round otherwise
    torch.testing.assert_close(gradients, gradients_in_steps, **close)
    torch.testing.assert_close(of_weight, of_weight_in_steps, **close)


@needs_compiler
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # transformers' own
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")  # as hooks are attached
@torch.no_grad()
def test_flex_attention_is_an_operator_of_its_own_and_runs_as_always() -> None:
    module = tiny_models.causal_lm("llama")
    model, tokens = hookline.hook(module), torch.tensor([[5, 9, 31, 7]])
    expected = module(tokens).logits
    module.set_attn_implementation("flex_attention")
    logits, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(logits, expected)
    assert "blocks.0.attn.hook_z" in cache
    assert POINTS[1] not in cache


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_second_copy_of_hookline_in_the_process(has_gradients) -> None:
    module, point = tiny_models.causal_lm("llama"), POINTS[1]
    model, seen = hookline.hook(module), []
    tokens = model.example_tokens()
    model.run_with_cache(tokens, names_filter=point)
    first = {name: each for name, each in sys.modules.items() if name.partition(".")[0] == "hookline"}
    for name in first:
        del sys.modules[name]
    try:
        import hookline as second

        assert second is not hookline
        with (
            torch.set_grad_enabled(has_gradients),
            model.hooks(fwd_hooks=[(point, lambda _x: seen.append("first"))]),
            second.hook(module).hooks(fwd_hooks=[(point, lambda _x: seen.append("second"))]),
        ):
            module(tokens)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "hookline"]:
            del sys.modules[name]
        sys.modules.update(first)
    assert sorted(seen) == ["first", "second"]
