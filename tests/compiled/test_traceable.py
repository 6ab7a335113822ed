"""Which functions may be traced into a graph."""

import re
from functools import partial

import pytest
import torch
from backends import needs_graphs

from hookline.compiled.not_compiled import NotCompiled
from hookline.compiled.traceable import check_stateless, check_writes, constants_of

LIST, NUMBER, TENSOR = [], 3.0, torch.ones(2)
ONE = torch.ones(1)
WEIGHT = torch.ones(2, requires_grad=True)


class Counter:
    n = 0


counter, count = Counter(), 0


def counts(x):
    global count
    count += 1
    return x * count


def writes(x):
    counter.n += 1
    return x


def calls(x):
    return counts(x)


def counted(x):
    counted.calls.append(x)


counted.calls = []


def calls_counted(x):
    return counted(x)


def why_not(function):
    """The reason for which a function is not traced."""
    with pytest.raises(NotCompiled) as error:
        check_stateless(function)
    return error.value.reason


def in_place(x):
    x[..., 0] = TENSOR[0]
    x += NUMBER


def by_layer(x, hook):
    return x * hook.layer() if "mlp" in hook.name else None


@pytest.mark.parametrize(
    "function",
    [
        *(torch.zeros_like, torch.relu, torch.nn.functional.gelu, in_place, by_layer, partial(torch.mul, other=2.0)),
        *(lambda x: x * NUMBER + TENSOR, lambda x, scale=2.0: x * scale, lambda x: in_place(x)),
    ],
)
def test_plain_functions_are_traced(function) -> None:
    check_stateless(function)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (counts, "writes to 'count'"),
        (calls, "writes to 'count'"),
        (writes, "'counter' is a Counter|writes to 'n'"),
        (lambda x: LIST.append(x), "'LIST' is a list"),
        (lambda x: x * x.mean().item(), "host"),
        (lambda x: print(x), "calls print"),
        (lambda x, hook: x * hook.step, "differs from pass to pass"),
        (lambda x, hook: hook.ctx.update(x=x), "differs from pass to pass"),
        (lambda x: x + torch.randn_like(x), "random"),
        (torch.rand_like, "random"),
        (torch.nn.Linear(2, 2), "not a plain function"),
        (partial(in_place, LIST), "may hold state"),
        (lambda x, seen={}: seen.setdefault("x", x), "may hold state"),
        (lambda x: x * WEIGHT, "requires gradients"),
        (lambda x: x * Counter.n, "'Counter' is a class"),
        (counted, "'counted.calls' is a list"),
        (calls_counted, "'counted.calls' is a list"),
        (lambda x: torch.nn.Linear.__constants__.append(x), "'Linear.__constants__' is a list"),
        (lambda x: torch.nn.functional.batch_norm(x, TENSOR, TENSOR, training=True), "running statistics"),
    ],
)
def test_functions_with_state_are_not(function, why) -> None:
    assert re.search(why, why_not(function))


def adds_each(x):
    for each in torch.meshgrid(ONE, ONE, indexing="ij"):
        each.add_(1)


@needs_graphs
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own imports
@pytest.mark.parametrize(
    ("writes", "does"),
    [
        *((True, lambda x: ONE.type_as(x).add_(1)), (False, lambda x: ONE.type_as(x.double()).add_(1))),
        *((True, lambda x: torch.atleast_1d(ONE)[0].add_(1)), (True, adds_each)),
        *((True, lambda x: torch.broadcast_tensors(ONE, x[0])[0].add_(1)), (False, lambda x: x.add_(ONE))),
        *((True, lambda x: torch.einsum("i->i", ONE).add_(1)), (False, lambda x: torch.einsum("i,i->i", ONE, ONE))),
        *((True, lambda x: torch._foreach_add_([ONE], 1)), (False, lambda x: torch._foreach_add([ONE], 1))),
        *((True, lambda x: torch.special.expit(ONE, out=ONE)), (False, lambda x: ONE.clone().add_(1))),
        *((True, lambda x: torch.ops.aten.native_batch_norm(x, None, None, ONE, ONE, True, 0.1, 1e-5)[0]),),
        *((True, lambda x: torch.nn.functional.embedding(x[0, :1].long(), ONE[:, None], max_norm=0.1)),),
    ],
)
def test_what_a_graph_writes_to(writes, does) -> None:
    """Whatever leads to the tensor: some operations return what they were given."""

    def check(graph, inputs):
        check_writes(graph, inputs, lambda x: x.ndim == 2)
        return graph.forward

    torch._dynamo.reset()
    call = torch.compile(lambda x: (does(x), x)[1], backend=check, fullgraph=True)
    with torch.no_grad():
        if writes:
            with pytest.raises(Exception, match=r"writes.*shape \[1\]"):
                call(torch.ones(3, 1))
        else:
            call(torch.ones(3, 1))


def test_constants() -> None:
    def scaled(factor, vector):
        return lambda x: x * factor + vector

    one, two, three = scaled(1.0, TENSOR), scaled(2.0, TENSOR), scaled(1.0, 2 * TENSOR)
    assert constants_of(one) != constants_of(two)
    assert constants_of(one) == constants_of(three)
    assert constants_of(partial(in_place, 3)) != constants_of(partial(in_place, 4))


def itself(x):
    return x * itself.factor


def one(x):
    return other(x)


def other(x):
    return one(x)


def test_functions_that_refer_to_themselves() -> None:
    assert why_not(itself) == "itself refers to itself"
    assert why_not(one) == "one refers to itself"


def test_a_variable_without_a_value() -> None:
    def late(x):
        return x * factor

    assert why_not(late) == "it uses a variable that has no value yet"
    factor = 2.0
    check_stateless(late)


def mean(x):
    return x - x.mean(1, keepdim=True)


def test_an_attribute_is_not_the_function_of_that_name() -> None:
    check_stateless(mean)
    assert constants_of(mean) == ()
