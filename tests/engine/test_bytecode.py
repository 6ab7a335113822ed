"""What becomes of the result of a call, as its caller's bytecode tells."""

import sys
from collections import deque
from contextlib import nullcontext
from functools import partial, reduce
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from hookline.engine._torch.bytecode import DISCARDED, RETURNED, USED, fate_of


def what_becomes_of_it(frame: FrameType | None, inner: FrameType) -> int:
    """The fate of what `inner` returns, in its caller `frame` or a caller of that."""
    fate = RETURNED
    while fate == RETURNED and frame is not None:
        fate = fate_of(frame, inner)
        frame, inner = frame.f_back, frame
    return fate


class Part:
    """Notes what becomes of what it returns."""

    fate: int | None = None

    def __call__(self, *values: Any, **options: Any) -> Any:
        self.fate = what_becomes_of_it(sys._getframe(1), sys._getframe())
        return values[0] if values else options


class Whole:
    """Something that calls a part."""

    def __init__(self) -> None:
        self.part = Part()
        self.parts, self.named, self.inside = [self.part], {"a": self.part}, SimpleNamespace(part=self.part)

    @property
    def made(self) -> Part:
        return self.part

    def method(self, h: Any) -> Any:
        return self.part(h)

    @staticmethod
    def of(part: Part, h: Any) -> Any:
        return part(h)

    def in_with(self, h: Any) -> Any:
        with nullcontext(), nullcontext():
            for _ in range(2):
                with nullcontext():
                    return self.part(h)
        return None

    def wrapped(self, *values: Any, **options: Any) -> Any:
        return self.part(*values, **options)


def attribute(self, h):
    self.part(h)


def attributes(self, h):
    self.inside.part(h)


def variable(self, h):
    part = self.part
    part(h)


def loop(self, h):
    for part in self.parts:
        part(h)


def items(self, h):
    for index in range(1):
        self.parts[index](h)
    self.parts[0](h)
    self.named["a"](h)


def keywords(self, h):
    self.part(h, scale=1)


def stars(self, h):
    options = {"scale": 1}
    self.part(*[h], **options)


def nothing(self, h):
    self.part()


def with_a_choice(self, h):
    self.part(h if h is not None else [1 if h else 2], 1 if h else 2)


def only_if(self, h):
    self.part(h) if h is not None else None


def after_an_error(self, h):
    try:
        raise ValueError
    except ValueError:
        self.part(h)


def in_with(self, h):
    with nullcontext():
        self.part(h)


def unread(self, h):
    unused = self.part(h)  # noqa: F841


def method(self, h):
    self.method(h)


def method_with(self, h):
    self.in_with(h)


def static_method(self, h):
    self.of(self.part, h)
    Whole.of(self.part, h)


def wrapped(self, h):
    self.wrapped(h, scale=1)


def function(self, h):
    def run(h):
        return self.part(h)

    run(h)


def in_a_lambda(self, h):
    (lambda: self.part(h))()


def comprehension(self, h):
    [self.part(x) for x in (h, h)]


def set_comprehension(self, h):
    {self.part(x) for x in (h, h) if x is not None}


def dict_comprehension(self, h):
    {key: self.part(x) for key, x in zip("ab", (h, h), strict=True)}


DROPPED = [
    *(attribute, attributes, variable, loop, items, keywords, stars, nothing, with_a_choice, only_if, after_an_error),
    *(in_with, unread, method, method_with, static_method, wrapped, function, in_a_lambda),
    *(comprehension, set_comprehension, dict_comprehension),
]


def extend(self, h):
    out = []
    out.extend(map(self.part, [h]))


def extend_by_a_lambda(self, h):
    out = []
    out.extend(map(lambda x: self.part(x), [h]))  # noqa: C417


def extend_a_deque(self, h):
    deque().extend(map(self.part, [h]))


def update(self, h):
    {}.update(zip("a", map(self.part, [h]), strict=True))


def reduced(self, h):
    reduce(lambda x, y: self.part(x), [h, h])


def a_generator(self, h):
    list(self.part(x) for x in [h])  # noqa: C400


def unpacked(self, h):
    _, _unused = map(self.part, (h, h))


def a_partial(self, h):
    partial(self.part, h)()


def a_property(self, h):
    self.made(h)


def stored(self, h):
    self.last = self.part(h)


def read(self, h):
    out = self.part(h)
    assert out is h


def read_by_locals(self, h):
    out = self.part(h)
    locals()["out"]


def read_by_eval(self, h):
    out = self.part(h)  # noqa: F841
    eval("out")


def kept_comprehension(self, h):
    out = [self.part(x) for x in (h, h)]
    return out[0]


def nested_comprehension(self, h):
    return [[1, self.part(x)][1] for x in (h, h)]


def comprehension_of_sums(self, h):
    return [sum([1, *[x], self.part(x)]) for x in (1, 2)]


def one_of_two(self, h):
    other = partial(self.part)
    (other if h else self.part)(h)


def the_first(self, h):
    other = partial(self.part)
    (other or self.part)(h)


def an_argument(self, h):
    str(self.part(h))


TAKEN = [
    *(extend, extend_by_a_lambda, extend_a_deque, update, reduced, a_generator, unpacked, a_partial, a_property),
    *(stored, read, read_by_locals, read_by_eval, kept_comprehension, nested_comprehension, comprehension_of_sums),
    *(one_of_two, the_first, an_argument),
]


@pytest.mark.parametrize("body", DROPPED)
def test_a_result_that_the_caller_drops(body) -> None:
    whole = Whole()
    body(whole, 1)
    assert whole.part.fate == DISCARDED


@pytest.mark.parametrize("body", TAKEN)
def test_a_result_is_used_unless_the_call_is_certainly_of_what_returned_it(body) -> None:
    whole = Whole()
    body(whole, 1)
    assert whole.part.fate == USED


def test_variables_of_callers_are_not_kept() -> None:
    """Python 3.11 keeps the dictionary of a frame's variables until the frame ends."""

    class Value:
        pass

    def count(h: Value) -> int:
        whole.part(h)
        return sys.getrefcount(h)

    def plain(h: Value) -> int:
        id(h)
        return sys.getrefcount(h)

    whole = Whole()
    assert count(Value()) == plain(Value())
