"""Taps inside attention: the query and key that meet, the scores, and the pattern.

A model computes these in the middle of its attention module's forward, where no module event is. But it computes them
with a few functions of torch: a matrix product of queries and keys, a softmax, or `scaled_dot_product_attention`,
which does both. While an attention module runs of which a run wants to see the inside, those calls are watched (in
this thread, in this module, in no other), and what goes in and comes out flows past taps. Where the scores or the
pattern are wanted of a fused call, the same sum is done in steps; otherwise the fused call is made as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hookline.taps import Kind, Tap, lock, now, tap_on

_FUSED = F.scaled_dot_product_attention
_SOFTMAX = frozenset({torch.softmax, F.softmax, Tensor.softmax, torch._softmax})
_PRODUCTS: dict[Callable[..., Any], tuple[str, ...]] = {
    torch.matmul: ("input", "other"),
    Tensor.matmul: ("self", "other"),
    Tensor.__matmul__: ("self", "other"),
    torch.bmm: ("input", "mat2"),
    Tensor.bmm: ("self", "mat2"),
    torch.baddbmm: ("input", "batch1", "batch2"),
    Tensor.baddbmm: ("self", "batch1", "batch2"),
}
"""Products of matrices, with the names of their arguments; the last two are multiplied."""

_WATCHED = frozenset({_FUSED, *_SOFTMAX, *_PRODUCTS})


class InnerTap(Tap):
    """A tap inside an attention module; there while the module's gate is."""

    def acquire(self, module: nn.Module, user: object) -> None:
        """Look into `module` for `user`."""
        self.users.add(id(user))
        gate_of(module).acquire(module, (self, user))

    def release(self, module: nn.Module, user: object) -> None:
        """Undo `acquire`."""
        self.users.discard(id(user))
        gate_of(module).release((self, user))


class Gate:
    """Torch hooks around an attention module, between which the calls of torch are watched.

    Not those of a child that only chooses which keys to look at: it has queries and keys of its own.
    """

    def __init__(self) -> None:
        self.users: set[tuple[int, int]] = set()
        self.handles: list[Any] = []

    def acquire(self, module: nn.Module, user: tuple[Tap, object]) -> None:
        """Be around `module` for one more user."""
        self.users.add((id(user[0]), id(user[1])))
        if not self.handles:
            self.handles.append(module.register_forward_pre_hook(self._enter))
            self.handles.append(module.register_forward_hook(self._leave, prepend=True, always_call=True))
            for name in _CHOOSERS & module._modules.keys():
                chooser = module.get_submodule(name)
                self.handles.append(chooser.register_forward_pre_hook(lambda *_: _look_away(1)))
                self.handles.append(chooser.register_forward_hook(lambda *_: _look_away(-1), always_call=True))

    def release(self, user: tuple[Tap, object]) -> None:
        """Undo `acquire`."""
        self.users.discard((id(user[0]), id(user[1])))
        if not self.users:
            while self.handles:
                self.handles[-1].remove()
                self.handles.pop()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        watch = Watching(module)
        watch.__enter__()
        now.watches.append(watch)

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        mine = [depth for depth, watch in enumerate(now.watches) if watch.module is module]
        if mine:
            stop_watching(mine[-1])


_CHOOSERS = frozenset({"indexer", "compressor"})


def _look_away(more: int) -> None:
    if now.watches:
        now.watches[-1].away += more


def stop_watching(depth: int) -> None:
    """Leave every attention module entered since there were `depth` of them; some may have ended in an interrupt."""
    while len(now.watches) > depth:
        now.watches.pop().__exit__(None, None, None)


_gates: WeakKeyDictionary[nn.Module, Gate] = WeakKeyDictionary()


def gate_of(module: nn.Module) -> Gate:
    """The one gate of a module."""
    with lock:
        return _gates.setdefault(module, Gate())


class Fused(NamedTuple):
    """The arguments of torch's `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def scores(self) -> Tensor:
        """What the softmax sees: scaled and masked."""
        scale = self.scale if self.scale is not None else 1 / math.sqrt(self.query.shape[-1])
        scores = self.query @ self._repeated(self.key).transpose(-2, -1) * scale
        mask = self.attn_mask
        if self.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is None:
            return scores
        return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask

    def pattern(self, scores: Tensor) -> Tensor:
        """Of each query position, over the keys. A position that may look at nothing has zeros, as in torch's own."""
        pattern = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        if self.attn_mask is None or self.attn_mask.dtype != torch.bool:
            return pattern
        return pattern.masked_fill(scores.eq(-torch.inf).all(-1, keepdim=True), 0.0)

    def mix(self, pattern: Tensor) -> Tensor:
        """The values as the pattern mixes them."""
        return F.dropout(pattern, self.dropout_p) @ self._repeated(self.value)

    def _repeated(self, x: Tensor) -> Tensor:
        groups = self.query.shape[1] // x.shape[1] if self.enable_gqa else 1
        return x.repeat_interleave(groups, 1) if groups > 1 else x


class Watching(TorchFunctionMode):
    """Sees every call of a torch function in one attention module, and passes on all but a few."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.has_met = False  # queries and keys
        self.away = 0
        self.taps = {kind: tap_on(module, kind, make=InnerTap) for kind in Kind if kind.is_inner}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch instead of `func`."""
        kwargs = kwargs or {}
        if func not in _WATCHED or self.away:  # nearly always, and often: even reading a shape comes by here
            return func(*args, **kwargs)
        if func is _FUSED:
            return self._fused(Fused(*args, **kwargs))
        if func in _SOFTMAX and args and args[0].ndim >= 3:
            self.has_met = True
            scores = self.taps[Kind.SCORES].flow(args[0])
            return self.taps[Kind.PATTERN].flow(func(scores, *args[1:], **kwargs))
        if not self.has_met and func in _PRODUCTS:
            names = _PRODUCTS[func]
            args, kwargs = self._product(dict(zip(names, args, strict=False)) | kwargs, names)
        return func(*args, **kwargs)

    def _fused(self, call: Fused) -> Tensor:
        call = call._replace(query=self.taps[Kind.QUERY].flow(call.query), key=self.taps[Kind.KEY].flow(call.key))
        if not (self.taps[Kind.SCORES].is_wanted() or self.taps[Kind.PATTERN].is_wanted()):
            return _FUSED(**call._asdict())
        before = call.scores()
        scores = self.taps[Kind.SCORES].flow(before)
        weights = call.pattern(scores)
        pattern = self.taps[Kind.PATTERN].flow(weights)
        if scores is before and pattern is weights:
            return _FUSED(**call._asdict())  # only looked at: what flows on is the model's own, to the last bit
        return call.mix(pattern)

    def _product(self, given: dict[str, Any], names: tuple[str, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a product; if it is the first of two activations with heads, it is of queries and keys."""
        left, right = names[-2:]
        if all(isinstance(given.get(name), Tensor) and given[name].ndim >= 3 for name in (left, right)):
            self.has_met = True
            given[left] = self.taps[Kind.QUERY].flow(given[left])
            given[right] = self.taps[Kind.KEY].flow(given[right].transpose(-2, -1)).transpose(-2, -1)
        return tuple(given.pop(name) for name in names), given
