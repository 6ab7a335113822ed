"""`pytest --device cuda`: what the tests make is on that device.

Code in tests/ makes its tensors there, unless its file says `TENSORS_ON_CPU = True` because it is about results, which
are on the CPU; and models that it builds, loads or wraps are moved there. Code of hookline,
torch and transformers makes what it always makes, as in a user's program. Random numbers are drawn on the CPU and then
moved, so that tests see the same numbers on every device; and a comparison in a test may be of tensors on two devices.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._builtins import _get_builtin_table
from torch.utils._device import _device_constructors

import hookline
from hookline.sae import SparseAutoencoder

DEVICE = torch.device("cpu")
"""Where the tests of this process run."""


def rounding() -> float:
    """How much runs of other batch sizes may differ: 0 on the CPU; elsewhere they may get another kernel."""
    return 0.0 if DEVICE.type == "cpu" else 2e-5


_TESTS, _TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)

_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "eye", "arange", "linspace", "scalar_tensor"),
    *("empty_strided", "tril_indices", "triu_indices"),
)
_RANDOM = ("rand", "randn", "randint", "randperm")
_RANDOM_LIKE = ("rand_like", "randn_like", "randint_like")
_RANDOM_IN_PLACE = ("uniform_", "normal_", "random_", "bernoulli_", "exponential_")
_COMPARISONS = ((torch, "equal"), (torch, "allclose"), (torch.testing, "assert_close"))
_COMPARISONS += ((Tensor, "equal"), (Tensor, "allclose"))


def use(name: str) -> None:
    """Make this the device of the tests; "cpu" changes nothing."""
    global DEVICE
    DEVICE = torch.empty(0, device=name).device  # with its index: cuda:0
    if DEVICE.type == "cpu":
        return
    _device_constructors()  # torch lists its own factories, for `with torch.device(…)`, before they are replaced here
    for name in _FACTORIES:
        _replace(torch, name, _made_there)
    for name in _RANDOM:
        _replace(torch, name, _drawn_here)
    for name in _RANDOM_LIKE:
        _replace(torch, name, _drawn_like)
    for name in _RANDOM_IN_PLACE:
        _replace(Tensor, name, _filled_here)
    for owner, name in _COMPARISONS:
        _replace(owner, name, _compared_here)
    SparseAutoencoder.__init__ = _moved_after(SparseAutoencoder.__init__)  # type: ignore[method-assign]
    SparseAutoencoder.load = staticmethod(_sae_loaded(SparseAutoencoder.load))  # type: ignore[assignment]
    hookline.hook = _of_moved(hookline.hook)  # type: ignore[assignment]
    hookline.load = functools.partial(_loaded, hookline.load)  # type: ignore[assignment]


def _replace(owner: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of torch, except in what TorchScript compiles."""
    before = getattr(owner, name)
    after = by(before)
    setattr(owner, name, after)
    builtins = _get_builtin_table()
    if id(before) in builtins:
        builtins[id(after)] = builtins[id(before)]


def placed(module: Any) -> Any:
    """A model on the device of the tests, unless someone put it elsewhere."""
    tensors = [*module.parameters(), *module.buffers()]
    is_dispatched = getattr(module, "hf_device_map", None) or any(
        hasattr(each, "_hf_hook") for each in module.modules()
    )
    if DEVICE.type != "cpu" and not is_dispatched and all(each.device.type == "cpu" for each in tensors):
        module.to(DEVICE)
    return module


def _is_from_a_test(*, makes: bool = True) -> bool:
    """Whether a function of torch was called in tests/, directly or by torch: the module is made in a test."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    is_test = frame.f_code.co_filename.startswith(_TESTS)
    return is_test and not (makes and frame.f_globals.get("TENSORS_ON_CPU"))


def _made_there(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_placed = kwargs.get("device") is not None or any(isinstance(each, Tensor) for each in args)
        if torch.compiler.is_compiling() or is_placed or not _is_from_a_test():
            return make(*args, **kwargs)
        return make(*args, **{**kwargs, "device": DEVICE})

    return call


def _drawn_here(draw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(draw)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or kwargs.get("device") is not None or not _is_from_a_test():
            return draw(*args, **kwargs)
        needs_gradient = kwargs.pop("requires_grad", False)
        return draw(*args, **kwargs).to(DEVICE).requires_grad_(needs_gradient)

    return call


def _drawn_like(draw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(draw)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or x.device != DEVICE or "device" in kwargs or not _is_from_a_test():
            return draw(x, *args, **kwargs)
        return draw(x.detach().cpu(), *args, **kwargs).to(DEVICE)

    return call


def _filled_here(fill: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fill)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or x.device != DEVICE or not _is_from_a_test():
            return fill(x, *args, **kwargs)
        return x.copy_(fill(torch.empty(x.shape, dtype=x.dtype, device="cpu"), *args, **kwargs))

    return call


def _compared_here(compare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compare)
    def call(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        is_of_two = isinstance(a, Tensor) and isinstance(b, Tensor) and a.device != b.device
        if is_of_two and not torch.compiler.is_compiling() and _is_from_a_test(makes=False):
            a, b = a.cpu(), b.cpu()
        return compare(a, b, *args, **kwargs)

    return call


def _of_moved(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return hook(placed(module) if isinstance(module, nn.Module) else module, *args, **kwargs)

    return call


def _moved_after(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        make(module, *args, **kwargs)
        if _is_from_a_test():
            module.to(DEVICE)

    return call


def _sae_loaded(load: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(load)
    def call(*args: Any, **kwargs: Any) -> nn.Module:
        return load(*args, **kwargs).to(DEVICE) if _is_from_a_test() else load(*args, **kwargs)

    return call


def _loaded(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model = load(*args, **kwargs)
    placed(model.module)
    return model
