"""Functions of torch by which modules compute attention, beside the public ones.

Why: `softmax` has a private form, which modules call too; and `multi_head_attention_forward` passes itself on to
whoever intercepts functions, who then does not see what it calls.
Needs: the code of that function, which asks `has_torch_function` of its own file.
If it does not hold, looking into attention raises an error.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hookline.engine._torch.proofs import insist, private, requirement
from hookline.functions.signatures import code_of

softmax_kernel = private(torch, "_softmax")
SOFTMAX = frozenset({torch.softmax, F.softmax, Tensor.softmax, softmax_kernel})
"""The functions that compute a softmax."""
WHOLE = F.multi_head_attention_forward
OPENED = FunctionType(
    code_of(WHOLE), {**vars(F), "has_torch_function": lambda _tensors: False}, WHOLE.__name__, WHOLE.__defaults__
)
"""`WHOLE`, except that it does not pass itself on to interceptors: the functions that it calls reach them."""


class _Noting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **kwargs or {})


def probe() -> None:
    """Attention that is opened computes the same, and shows its softmax instead of itself."""
    x = torch.arange(6.0, dtype=torch.float32).view(3, 1, 2)
    arguments = (x, x, x, 2, 1, torch.eye(6, 2).to(x), None, None, None, False, 0.0, torch.eye(2).to(x), None)
    expected, _ = WHOLE(*arguments, training=False)
    with _Noting() as noting:
        out, _ = OPENED(*arguments, training=False)
    insist(torch.allclose(out, expected), "attention that is opened computes the same")
    insist(bool(SOFTMAX & set(noting.seen)) and WHOLE not in noting.seen, "attention that is opened shows its softmax")
    row = x[:, 0]
    insist(torch.equal(softmax_kernel(row, -1, False), row.softmax(-1)), "the private softmax is the public one")


need_attention_functions = requirement(probe)
