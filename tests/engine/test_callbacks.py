"""Which functions may be hooks, and what each is called with."""

from functools import partial

import pytest
import torch
from torch import nn

from hookline.errors import InvalidHookError
from hookline.functions.callers import caller


class Method:
    def hook(self, x, hook):
        return (x, hook)

    def __call__(self, x, hook):
        return (x, hook)


def with_point(x, hook):
    return (x, hook)


def by_keyword_only(x, *, hook):
    return (x, hook)


def bound_by_partial(x, hook, head):
    return (x, hook, head)


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (with_point, ("x", "point")),
        (by_keyword_only, ("x", "point")),
        (lambda x: (x,), ("x",)),
        (lambda x, h: (x, h), ("x", "point")),
        (lambda x, i=7: (x, i), ("x", 7)),  # a default is the user's own value, not a place for the point
        (lambda x, i=7, *, hook: (x, i, hook), ("x", 7, "point")),
        (lambda *args: args, ("x", "point")),
        (lambda x, **kwargs: (x, kwargs["hook"]), ("x", "point")),
        (partial(bound_by_partial, head=3), ("x", "point", 3)),
        (partial(lambda head, x: (head, x), 3), (3, "x")),
        (Method().hook, ("x", "point")),
        (Method(), ("x", "point")),
    ],
)
def test_called_as(hook, expected) -> None:
    assert caller(hook)("x", "point") == expected


def test_builtins_and_modules_take_the_activation_alone() -> None:
    x = torch.tensor([-1.0, 1.0])
    for hook in (torch.relu, torch.zeros_like, nn.ReLU(), torch.Tensor.relu):
        assert caller(hook)(x, "point").min() == 0


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (3, " 3 "),
        (None, "None"),
        (lambda: 0, "activation"),
        (bound_by_partial, r"'head'.*partial\(hook, head=…\)"),
        (lambda x, hook, *, head: 0, "'head'"),
    ],
)
def test_what_cannot_be_a_hook(hook, message) -> None:
    with pytest.raises(InvalidHookError, match=message):
        caller(hook)
