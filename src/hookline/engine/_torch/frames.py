"""The frames of Python on the stack, and the functions of torch among them.

Why: torch does not say which modules are running, or who called one.
Needs: frames of CPython with their code and local variables; `self` and `module` as names in torch's functions.
If it does not hold, no hook can be attached: the first raises an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType

import torch
from torch import nn

from hookline.engine._torch.proofs import insist, private

frame_at = sys._getframe
"""The frame so many calls above; 0 is the one that asks."""
frames_of_threads = sys._current_frames
"""The current frame of each thread, by the number of the thread."""
TORCH_MODULES = nn.modules.module.__file__
"""The file in which torch calls modules and hooks."""
MODULE_CALL: CodeType = private(nn.Module, "_call_impl.__code__")
"""What runs a module, `self`, with its hooks."""
SEQUENTIAL: CodeType = private(nn.Sequential, "forward.__code__")
"""What runs the modules of a `nn.Sequential`, one after the other: `self`, `module`."""


def callers(frame: FrameType | None = None) -> Iterator[FrameType]:
    """The frames of this thread, innermost first, from `frame` on."""
    frame = frame or frame_at(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def probe() -> None:
    """Torch's functions are found on the stack, with what they are called for."""
    seen: list[FrameType] = []
    inner = nn.Identity()
    inner.register_forward_hook(lambda *_: seen.append(frame_at(1)))
    outer = nn.Sequential(inner)
    outer(torch.ones(1))
    insist(len(seen) == 1, "a frame knows its caller")
    found = [
        (frame.f_code, frame.f_locals["self"], frame.f_locals.get("module"))
        for frame in callers(seen[0])
        if frame.f_code in (MODULE_CALL, SEQUENTIAL)
    ]
    calls = [(code, module) for code, module, _ in found]
    insist(
        calls == [(MODULE_CALL, inner), (SEQUENTIAL, outer), (MODULE_CALL, outer)], "running modules are on the stack"
    )
    insist(found[1][2] is inner, "`nn.Sequential` calls its `module`")
    insist(MODULE_CALL.co_filename == TORCH_MODULES, "the file of torch's modules is known")
