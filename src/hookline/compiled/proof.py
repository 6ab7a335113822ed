"""Proof: the first call of a variant must give what the engine's hooks give, or the variant is not used.

In two stages, because fused kernels round differently, and a deep model in bfloat16 makes several percent of that:

1. The graph as it was traced, with the kernels of an uncompiled run, against the hooks. They must agree closely: this
   shows that edits, reads, masks and positions are right.
   It must not draw random numbers either: an uncompiled run would not draw them then.
2. What the backend made of the graph, against the graph. This shows gross errors only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.compiled.not_compiled import NotCompiled
from hookline.compiled.random_state import RandomStates
from hookline.compiled.variants import Variant

Values = Mapping[Any, Tensor]
"""Logits, and what was read, by name."""

_TRACED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
_FUSED = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.15}
"""The norm of the difference, relative to that of the values, by the dtype that the model computes in."""


def why_unproved(variant: Variant, expected: Values, call: Callable[[Callable[[], Tensor]], Values]) -> str | None:
    """Why a variant must not be used; None if its values are those expected. `call` first restores the state."""
    computed: Values = expected
    for what, way, limits in (("the graph", variant.plain, _TRACED), ("the compiled graph", variant.call, _FUSED)):
        before, calls, random = computed, variant.backend.calls, RandomStates(next(iter(expected.values())).device)
        try:
            with variant.backend.proving():
                computed = call(way)
        except Exception as error:  # whatever a compiler raises: the run goes on without it, and says so
            random.are_left()
            cause = getattr(error, "inner_exception", error)  # of the backend: torch's message begins with its address
            line = str(cause).strip().partition("\n")[0]
            where = _functions(variant)
            if isinstance(cause, NotCompiled):
                return f"the function at {' or '.join(where)} cannot: {line}"
            more = f" with the function at {', '.join(where)}" if where else ""
            return f"it could not be compiled{more} ({type(cause).__name__}: {line})"
        if variant.backend.calls == calls:
            return "torch did not compile it"
        if random.are_left():
            functions = " or ".join(_functions(variant))
            return f"{f'the function at {functions}' if functions else 'the model'} draws random numbers"
        apart = difference(before, computed, limits)
        if apart is not None:
            return f"{what} does not give what {'the hooks give' if before is expected else 'was traced'}: {apart}"
    return None


def _functions(variant: Variant) -> list[str]:
    """Where functions are traced."""
    return [repr(slot.point.name) for slot in variant.program.slots if slot.kind == "function"]


def difference(expected: Values, computed: Values, limits: Mapping[torch.dtype, float]) -> str | None:
    """Where two sets of tensors differ by more than rounding; None if nowhere."""
    dtypes = [tensor.dtype for tensor in expected.values()]
    limit = max(limits.get(dtype, 0.15) for dtype in dtypes)  # logits are float32, whatever the model computes in
    for name, value in expected.items():
        right, left = value.double(), computed[name].double()
        if left.shape != right.shape:
            return f"{name} has the shape {list(left.shape)}, not {list(right.shape)}"
        both = left.isfinite() & right.isfinite()
        if bool((left.isfinite() != right.isfinite()).any()):
            return f"{name} has other values that are not finite"
        scale, apart = float(right[both].norm()), float((left - right)[both].norm())
        if apart > limit * scale + 1e-9:
            return f"{name} differs by {apart / max(scale, 1e-9):.2g} of its norm, and {limit:g} is allowed"
    return None
