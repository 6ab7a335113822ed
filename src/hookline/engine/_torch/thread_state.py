"""What is on in this thread: gradients, inference mode, autocast, modes and transforms of torch.

Why: an interrupt can skip the exit of torch's own contexts, and some of this has no public name.
Needs: the functions and contexts below, which act on this thread only.
If it does not hold, no hook can be attached: the first raises an error.
"""

from __future__ import annotations

import torch
from torch._functorch import pyfunctorch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch

from hookline.engine._torch.proofs import insist, private

set_grad_enabled = private(torch, "_C._set_grad_enabled")
"""Set the gradient mode. Not `torch.no_grad()`, whose exit an interrupt can skip."""
inference_mode = private(torch, "_C._InferenceMode")
"""A block in inference mode (True), or outside of it (False)."""
is_autocast_on = private(torch, "_C._is_any_autocast_enabled")
"""Whether autocast is on, for any device."""
no_autocast = private(torch, "_C._DisableAutocast")
"""A block without autocast."""
no_function_modes = private(torch, "_C.DisableTorchFunction")
"""A block in which neither function modes nor subclasses of tensors replace torch's functions."""
no_dispatch_modes = private(_python_dispatch, "_disable_current_modes")
"""A block without dispatch modes, such as that of tensors without data."""
no_transforms = private(pyfunctorch, "temporarily_clear_interpreter_stack")
"""A block outside `torch.func.grad` and similar functions."""


class _Failing(TorchFunctionMode):
    def __torch_function__(self, *_args: object) -> None:
        raise AssertionError


def probe() -> None:
    """Each of them turns on or off what it says."""
    x, is_on = torch.ones(2, 2, dtype=torch.float32), torch.is_grad_enabled()
    set_grad_enabled(not is_on)
    insist(torch.is_grad_enabled() is not is_on, "the gradient mode can be set")
    set_grad_enabled(is_on)
    with inference_mode(True):
        insist((x + 1).is_inference(), "inference mode can be turned on")
        with inference_mode(False):
            insist(not (x + 1).is_inference(), "inference mode can be turned off")
    with torch.autocast("cpu", torch.bfloat16):
        insist(is_autocast_on() and (x @ x).dtype == torch.bfloat16, "torch says whether autocast is on")
        with no_autocast():
            insist((x @ x).dtype == x.dtype, "autocast can be turned off")
    insist(not is_autocast_on(), "torch says that autocast is off")
    with _Failing(), no_function_modes():
        torch.add(x, 1)
    with no_dispatch_modes(), no_transforms():
        insist(bool((x + 1 == 2).all()), "modes and transforms can be turned off")
