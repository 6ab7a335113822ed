"""Tensors that a module shares with its caller: written in place, or returned as they came in.

Replacing a tensor on its way in or out separates it from the one that the caller holds. That changes the model where it
relies on the two being one: `self.relu(h)` in place, with its return value ignored; `y = self.dropout(h)`, then
`h.add_(1)`.
"""

from __future__ import annotations

from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from hookline.engine._memory.containers import note_copies, take_copies, warn_of_lost_edit, with_originals
from hookline.engine._memory.outside import root_of_pass
from hookline.engine._memory.snapshots import (
    has_same_bits,
    inside_transform,
    is_from_outside,
    is_same_memory,
    is_unchanged,
    own,
    snapshot,
)
from hookline.engine._torch.bytecode import DISCARDED, RETURNED, USED, can_read, fate_of, is_calling
from hookline.engine._torch.frames import MODULE_CALL, SEQUENTIAL, TORCH_MODULES, callers, frame_at
from hookline.engine._torch.transforms import is_wrapped
from hookline.engine._torch.version_counters import can_keep_version, keep_version
from hookline.engine.calls import is_call_of
from hookline.engine.pass_state import pass_state
from hookline.values.structures import children, replaced, tensors_in


def is_passed_through(x: Tensor) -> bool:
    """Whether `x`, at the output of a module, is an argument of that call, or a view of one."""
    arguments = tensors_in((pass_state.arguments, *pass_state.originals))
    return any(is_same_memory(x, argument) for argument in arguments)


_ACTIVATIONS = (
    *(nn.CELU, nn.ELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.ReLU6, nn.RReLU),
    *(nn.SELU, nn.SiLU, nn.Threshold),
)
_OVERWRITING = frozenset(each.forward for each in _ACTIVATIONS)
"""The methods that write to the whole input if their module has `inplace=True`. Dropout in eval mode does not."""


def is_overwriting(module: nn.Module) -> bool:
    """Whether a module with `inplace=True` certainly writes to its whole input."""
    return type(module).forward in _OVERWRITING and "forward" not in vars(module)


class Alias(torch.autograd.Function):
    """A tensor in the memory of `x`, whose gradient goes to `mine`."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class _Rebase(torch.autograd.Function):
    """Gives `x` the value of `new`, unless it has that already; its gradient flows to `new` from now on.

    `x.copy_(new)` does the same, but also sends zeros to what `x` was computed from. Their layout becomes that of the
    sum with other gradients, and kernels for another layout round differently. For a part of a tensor the zeros are
    needed: torch takes no gradient for that of the whole tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, new: Tensor, has_value: bool) -> Tensor:
        ctx.mark_dirty(x)
        ctx.is_part = x._base is not None and x.numel() < x._base.numel()
        return x if has_value else x.copy_(new)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        return torch.zeros_like(grad) if ctx.is_part else None, grad, None


def lead_through(x: Tensor, out: Tensor) -> bool:
    """Route the gradient of the tensor object `x` through `out`. Returns whether torch allows that."""
    if not can_keep_version() or (x.is_leaf and x.requires_grad) or is_from_outside(x):
        return False
    try:
        with keep_version(x):  # the value is the same
            _Rebase.apply(x, out, True)
    except RuntimeError:  # one of several views made at once, as by `chunk`
        return False
    return True


class _Sent(NamedTuple):
    """A tensor that replaced the caller's as an argument of a module."""

    module: nn.Module
    old: Tensor
    new: Tensor
    before: Tensor
    is_copy: bool
    version: int

    def is_written(self) -> bool:
        """Whether the module wrote to it.

        Torch counts the writes that it makes. For those that it cannot count (through a numpy array, through `.data`)
        the bits are compared. That the snapshot has been separated is no proof: kernels that only read may ask for a
        pointer to write to (convolutions with kernel 1, recurrent layers), which separates it too.
        """
        if _version(self.new) != self.version:
            return True
        if is_wrapped(self.new) and is_wrapped(self.before):
            inner, before = inside_transform(self.new), inside_transform(self.before)
            return inner.is_inference() and not has_same_bits(before, inner)  # type: ignore[union-attr, arg-type]
        return not (is_unchanged(self.before, self.new) or has_same_bits(self.before, self.new))


def copy_of(x: Tensor, given: Tensor) -> Tensor:
    """Return a snapshot of `given`, which is `x` unedited. In-place writes to it are meant for `x`."""
    copy = snapshot(given)
    copy._hookline_original = getattr(x, "_hookline_original", None) or ref(x)  # type: ignore[attr-defined]
    copy._hookline_given = ref(given)  # type: ignore[attr-defined]
    return copy


def noted_sent(module: nn.Module, old: Any, new: Any) -> Any:
    """Note that a module is called with the arguments `new` instead of its caller's `old`, and return them."""
    for before, after in _pairs(old, new):
        if not (isinstance(after, Tensor) and isinstance(before, Tensor)):
            continue
        if is_same_memory(before, after):
            if (sent := _sent_to(module, before)) is not None:  # edited, and then led through a view for its gradient
                pass_state.sent[id(after)] = _kept(sent._replace(new=after, version=_version(after)))
        else:
            original = getattr(after, "_hookline_original", None)
            is_copy = (original is not None and original() is before) or is_unchanged(after, before)
            if after.is_inference() and type(after) is Tensor and inside_transform(after) is None:
                after, counted = _counted(after), after
                new = _swapped(new, counted, after)
            kept = snapshot(after.detach(), is_ours=True)
            pass_state.sent[id(after)] = _kept(_Sent(module, before, after, kept, is_copy, _version(after)))
    for before, after in zip((*old[0], *old[1].values()), (*new[0], *new[1].values()), strict=False):
        if before is not after and type(before) is not Tensor:
            note_copies(module, old, new)
            break
    return new


def _counted(x: Tensor) -> Tensor:
    """Return a copy of an inference tensor to which torch counts writes."""
    with torch.inference_mode(False):
        return own(x)


def _version(x: Tensor) -> int:
    """How many writes to `x` torch has counted; 0 where it does not count them."""
    inner = inside_transform(x) if is_wrapped(x) else x
    return 0 if inner is None or inner.is_inference() else inner._version


def give_back(module: nn.Module, value: Any) -> Any:
    """Copy what a module wrote in place to replaced arguments into the caller's own tensors, lists and dicts.

    Returns the module's output, with the caller's objects where the module returned a replacement.
    """
    copies = take_copies(module, pass_state.arguments) if pass_state.copies else []
    swaps: list[tuple[Tensor, Tensor, dict[int, Tensor]]] = []
    callers: list[Any] = [copy.original for copy in copies]
    edited: list[Tensor] = []
    sources = (
        [pass_state.arguments, *[list(copy.in_copy.values()) for copy in copies]] if copies else pass_state.arguments
    )
    for argument in list(tensors_in(sources)):
        x = argument
        while (sent := _sent_to(module, x)) is not None:
            wrote = sent.is_written() and _write(sent.old, sent.new)
            if wrote or sent.is_copy:
                swaps.append((sent.new, _leading_to(sent.new, sent.old), {}))
                callers.append(sent.old)
            else:
                edited.append(sent.new)
            x = sent.old  # an edited input of an in-place module was replaced twice: by the edit, and by a copy of that
    if not callers:
        return value
    originals = {id(copy.copy): copy.original for copy in copies}

    def as_callers(value: Any) -> Any:
        value = with_originals(value, originals)
        for new, old, views in swaps:
            value = _swapped(value, new, old, views)
        return value

    warn_of_lost_edit(copies, value, edited)
    for copy in copies:
        copy.apply(as_callers)
    pass_state.originals = callers
    return as_callers(value)


def _kept(sent: _Sent) -> Any:
    """The note as it is kept until the module returns. Torch ends a recomputation in the middle of a module.

    So there it must not keep tensors, whose graph would keep what recomputed them, hooks and all.
    """
    return sent._replace(old=ref(sent.old), new=ref(sent.new)) if pass_state.is_recomputing else sent  # type: ignore[arg-type]


def _sent_to(module: nn.Module, x: Tensor) -> _Sent | None:
    """Take the note that `x` was sent to this module; what was sent to a module around it is given back at its end."""
    sent: _Sent | None = pass_state.sent.get(id(x))
    if sent is None or sent.module is not module:
        return None
    del pass_state.sent[id(x)]
    if not isinstance(sent.old, ref):
        return sent
    old, new = sent.old(), sent.new()  # type: ignore[operator]
    return sent._replace(old=old, new=new) if old is not None and new is x else None


def _write(target: Tensor, source: Tensor) -> bool:
    if not (target.is_nested or target.shape == source.shape) or (
        torch.is_grad_enabled() and target.is_leaf and target.requires_grad
    ):
        return False  # torch refuses to write to such a leaf, with or without us
    if _stays_without_graph(target):
        source = source.detach()
    if source.requires_grad and torch.is_grad_enabled() and target.dtype == source.dtype:
        try:
            _Rebase.apply(target, source, False)
            return True
        except RuntimeError:  # inside a transform, or with derivatives in forward mode
            pass
    target.copy_(source)
    return True


def _stays_without_graph(x: Tensor) -> bool:
    """Whether `x` outlives the forward pass without a graph, and so must not get one from an edit."""
    return is_from_outside(x) and not x.requires_grad


def _leading_to(new: Tensor, old: Tensor) -> Tensor:
    """Return a tensor in the memory of `old`, which has the value of `new`, with its gradient going to `new`."""
    if new.requires_grad and torch.is_grad_enabled() and not old.requires_grad:
        leading: Tensor = Alias.apply(new, old)
        return leading
    return old


def write_through(old: Any, new: Any) -> bool:
    """Write an edit of a module's output to the arguments that it returned. Returns whether there are any."""
    found = [(x, edited) for x, edited in _pairs(old, new) if x is not edited and is_passed_through(x)]
    written = [_write(x, edited) for x, edited in found]
    return any(written)


def _pairs(old: Any, new: Any) -> list[tuple[Any, Any]]:
    """The leaves at the same places of two structures, where they differ."""
    leaves, waiting = [], [(old, new)]
    while waiting:
        part, other = waiting.pop()
        if part is other:
            continue
        if type(part) is tuple and type(other) is tuple:
            waiting += reversed([*zip(part, other, strict=False)])
        elif isinstance(part, Tensor) or not (parts := dict(children(part))):
            leaves.append((part, other))
        else:
            others = dict(children(other))
            waiting += reversed([(parts[key], others[key]) for key in parts if key in others])
    return leaves


def _swapped(value: Any, new: Tensor, old: Tensor, views: dict[int, Tensor] | None = None) -> Any:
    """The value with `old` in the place of `new`; a view that it has twice remains one tensor."""
    views = {} if views is None else views
    if value is new:
        return old
    if isinstance(value, Tensor):
        if not is_same_memory(value, new):
            return value
        if id(value) not in views:
            views[id(value)] = _viewed_alike(value, new, old)
        return views[id(value)]
    for key, child in children(value):
        other = _swapped(child, new, old, views)
        if other is not child:
            value = replaced(value, (key,), other)
    return value


def _viewed_alike(view: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return a view of `old` that corresponds to `view` of `new`, where torch can express it."""
    kinds = [(x.dtype, x.is_conj(), x.is_neg()) for x in (view, new, old)]
    if len(set(kinds)) > 1 or new.stride() != old.stride():
        return view
    offset = view.storage_offset() - new.storage_offset() + old.storage_offset()
    base = old if view.requires_grad else old.detach()
    return _leading_to(view, base.as_strided(view.shape, view.stride(), offset))


_HERE = str(Path(__file__).parents[1])


def is_discarded(*, in_place: bool = True) -> bool:
    """Whether the code that called the module whose hook is running ignores what the module returns.

    For a function that returns the same value, as for `nn.Sequential`, it depends on that function's caller. Looking
    into `nn.Sequential` is slow, so it is skipped for a module that does not write in place.
    """
    if not can_read():
        return False
    frame: FrameType | None = frame_at(1)
    while frame is not None and frame.f_code.co_filename != TORCH_MODULES:
        frame = frame.f_back
    fate, root, inner = RETURNED, None, frame
    while fate == RETURNED:
        while frame is not None and frame.f_code.co_filename.startswith((TORCH_MODULES, _HERE)):
            if root is not None and is_call_of(frame, root):
                return False  # it is the output of the whole model
            inner, frame = frame, frame.f_back
        if frame is None or frame.f_code.co_filename == checkpoint.__file__:
            return False  # a checkpoint that recomputes ignores the output of its region
        if frame.f_code is not SEQUENTIAL:
            fate = fate_of(frame, inner)  # type: ignore[arg-type]
        elif not in_place:
            return False
        else:
            modules = frame.f_locals["self"]._modules  # iterating over the module itself would cost calls
            fate = RETURNED if frame.f_locals["module"] is next(reversed(modules.values())) else USED
        inner, frame = frame, frame.f_back
        if fate == RETURNED:
            root = root_of_pass()
            if (
                frame is not None
                and frame.f_code.co_filename == TORCH_MODULES
                and not is_calling(frame, "forward_call")
            ):
                return False  # it is what a torch hook returns
    if fate != DISCARDED or pass_state.is_recomputing or root_of_pass() is not None:
        return fate == DISCARDED
    # Outside a pass, only what a module's own code ignores counts: users call modules just to see them run.
    return any(each.f_code is MODULE_CALL for each in callers(frame))
