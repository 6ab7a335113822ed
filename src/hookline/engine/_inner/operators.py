"""Kernels of a few operators, which are called instead of torch's own while a module is looked into.

Torch finds the kernel of an operator by the dispatch keys of its arguments and of the thread. The kernels here are
registered for a key that torch itself never sets, and a thread sets it only while a module is looked into: until then
they cost nothing, and all other operators are dispatched as always. A torch function mode would do the same in Python
for every function that the module calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.nn import functional as F

from hookline.engine._torch.attention_functions import softmax_kernel
from hookline.engine._torch.dispatch_keys import (
    KEY,
    KEY_NAME,
    higher_order_operators,
    is_below_autograd,
    is_key_set,
    set_key,
)
from hookline.engine._torch.graph_tasks import current_graph_task
from hookline.engine.pass_state import pass_state

if TYPE_CHECKING:
    from hookline.engine._inner.interception import OperatorInterceptor

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": F.scaled_dot_product_attention,
    "softmax.int": torch.softmax,
    "_softmax": softmax_kernel,
    "matmul": torch.matmul,
    "bmm": torch.bmm,
    "baddbmm": torch.baddbmm,
    "split.Tensor": Tensor.split,
    "split_with_sizes": Tensor.split,
    "sub.Tensor": torch.sub,
}
"""The operators with kernels, and the torch functions that call them."""

_WHOLE: dict[str, Callable[..., Any]] = {
    "einsum": torch.ops.aten.einsum.default,
    "linear": torch.ops.aten.linear.default,
}
"""Operators that are made of those above, whose calls in them are not the module's own."""


class _Here(threading.local):
    """The interceptor that operators of this thread call; each knows the one that was called before it, `outer`."""

    current: OperatorInterceptor | None = None
    libraries: ClassVar[list[Library]] = []
    """The kernels, once they are registered."""
    opened: ClassVar[set[str]] = set()
    """The higher-order operators that have a kernel too."""


_here: Any = vars(torch).setdefault("_hookline_here", _Here())
"""Kept by torch: it takes one kernel of an operator, and hookline may be imported twice, or again."""


def push(interceptor: OperatorInterceptor) -> None:
    """Call an interceptor from now on; what it calls reaches the one that was called until now."""
    _register()
    interceptor.outer, interceptor.place = _here.current, _place()
    _call(interceptor)


def remove(interceptor: OperatorInterceptor) -> None:
    """Undo `push`."""
    _call(interceptor.outer)


def _call(interceptor: OperatorInterceptor | None) -> None:
    _here.current = interceptor
    set_key(KEY, interceptor is not None)


def _place() -> tuple[int, bool]:
    """Where operators are called: in which backward pass, and whether by a kernel of another operator.

    Such a kernel runs without autograd. In inference mode everything does.
    """
    return current_graph_task(), is_below_autograd() and not torch.is_inference_mode_enabled()


def is_off() -> bool:
    """Whether no operator of this thread is intercepted."""
    return not is_key_set(KEY)


def without_kernels(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function, in which no operator is intercepted."""
    before = _here.current
    if before is None:
        return function(*args, **kwargs)
    _call(None)
    try:
        return function(*args, **kwargs)
    finally:
        _call(before)


@contextmanager
def kernels_off() -> Iterator[None]:
    """A block in which no operator is intercepted."""
    before = _here.current
    _call(None)
    try:
        yield
    finally:
        _call(before)


def _kernel(func: Callable[..., Any], *, is_list: bool) -> Callable[..., Any]:
    """The kernel of an operator: it calls the interceptor instead of the function."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        interceptor = _here.current
        if interceptor is None:  # a thread that torch started, or an interrupt left the key set
            set_key(KEY, False)
            return func(*args, **kwargs)
        before = pass_state.is_in_kernel
        _call(interceptor.outer)
        try:
            pass_state.is_in_kernel = True
            is_own = interceptor.place == _place()  # not of an operator, or a backward pass, that the module calls
            result = interceptor.operator(func, args, kwargs) if is_own else func(*args, **kwargs)
            return list(result) if is_list else result
        finally:
            _call(interceptor)
            pass_state.is_in_kernel = before

    return kernel


def _whole_kernel(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: without_kernels(func, args, kwargs)


_lock = threading.Lock()


def _register() -> None:
    """Register the kernels, once; higher-order operators (flex attention) may be added at any time."""
    if _here.libraries and len(_here.opened) == len(higher_order_operators):
        return
    with _lock:
        for name, operator in [*higher_order_operators.items()]:
            if name not in _here.opened:
                operator.py_impl(KEY)(_whole_kernel(operator))
                _here.opened.add(name)
        if _here.libraries:
            return
        others, of_aten = Library("_", "IMPL", KEY_NAME), Library("aten", "IMPL", KEY_NAME)
        others.fallback(fallthrough_kernel)
        for name, func in FUNCTIONS.items():
            of_aten.impl(name, _kernel(func, is_list=name.startswith("split")))
        for name, func in _WHOLE.items():
            of_aten.impl(name, _whole_kernel(func))
        _here.libraries[:] = [others, of_aten]
