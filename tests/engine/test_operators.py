"""Interception of operators: in one thread and one module only, and nothing is left of it."""

import threading

import pytest
import tiny_models
import torch
from torch import nn
from torch.nn import functional as F

import hookline
from hookline.engine import operators
from hookline.engine.interception import OperatorInterceptor, start, stop

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
    torch._C._dispatch_tls_set_dispatch_key_included(operators._KEY, True)
    assert torch.equal(x.softmax(-1), expected)
    assert operators.is_off()


def test_backward_in_an_intercepted_module() -> None:
    x, noting = torch.randn(1, 2, 3, 4, requires_grad=True), Noting()
    (expected,) = torch.autograd.grad((x @ x.mT).softmax(-1).square().sum(), x)
    start(noting)
    (found,) = torch.autograd.grad((x @ x.mT).softmax(-1).square().sum(), x)
    stop(0)
    assert torch.equal(found, expected)
