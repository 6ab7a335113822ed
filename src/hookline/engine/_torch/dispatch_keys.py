"""A dispatch key that torch itself never sets, for kernels that act in one thread only, while it is set there.

Why: until then they cost nothing, and all other operators are dispatched as always.
Needs: the key `TESTING_ONLY_GenericMode`, before autograd and autocast, which each thread can set; the table of
higher-order operators.
If it does not hold, torch function modes are used instead, which Python calls for every function of a module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import _ops
from torch.library import Library

from hookline.engine._torch.proofs import insist, once, private

KEY_NAME = "TESTING_ONLY_GenericMode"  # the one key for any kind of use, before autograd and autocast


def _key(name: str) -> Any:
    try:
        return torch._C._dispatch_key_parse(name)
    except (AttributeError, RuntimeError):
        return None


KEY = _key(KEY_NAME)
set_key = (lambda *_: None) if KEY is None else private(torch, "_C._dispatch_tls_set_dispatch_key_included")
"""Set a key in this thread, or not."""
is_key_set = (lambda *_: False) if KEY is None else private(torch, "_C._dispatch_tls_is_dispatch_key_included")
is_below_autograd = partial(
    private(torch, "_C._dispatch_tls_is_dispatch_key_excluded"), private(torch, "_C.DispatchKey.AutogradOther")
)
"""Whether a kernel below autograd is running."""
higher_order_operators: dict[str, Any] = getattr(_ops, "_higher_order_ops", {})


def probe() -> None:
    """A kernel for the key is called while the thread has set it, before autograd, and not otherwise."""
    insist(KEY is not None, f"torch has the key {KEY_NAME}")
    definitions, kernels = Library("hookline_probe", "FRAGMENT"), Library("hookline_probe", "IMPL", KEY_NAME)
    definitions.define("double(Tensor x) -> Tensor")
    definitions.impl("double", lambda x: x * 2, "CPU")
    double, x, other = torch.ops.hookline_probe.double, torch.ones(()), torch.ones(())
    kernels.impl("double", lambda _x: other)
    insist(not is_key_set(KEY) and double(x).item() == 2, "the key is not set by itself")
    set_key(KEY, True)
    try:
        insist(is_key_set(KEY) and double(x) is other, "a kernel for the key is called while it is set")
    finally:
        set_key(KEY, False)
    insist(not is_key_set(KEY) and double(x).item() == 2, "the key can be taken back")
    with torch._C._AutoDispatchBelowAutograd():
        is_below = is_below_autograd()
    insist(is_below and not is_below_autograd(), "torch says whether a kernel below autograd is running")
    insist(bool(higher_order_operators), "the higher-order operators are known")


can_dispatch = once(probe)
