"""Attention in any module: queries, keys, scores and patterns, wherever torch functions compute them.

A module computes attention by `scaled_dot_product_attention`, by `multi_head_attention_forward` (in
nn.MultiheadAttention), or by a softmax of a product of two activations. The functions are intercepted only while
somebody looks, and only those that the module calls itself: children with parameters have points of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.engine._inner.attention_steps import INTERCEPTED, SEVERAL, AttentionSteps, AttentionTap
from hookline.engine._inner.interception import ModeInterceptor, NoInterceptor
from hookline.engine._torch.attention_functions import OPENED, WHOLE
from hookline.engine.formulas import Formula
from hookline.engine.order import Kind
from hookline.engine.taps import Tap

if TYPE_CHECKING:
    from hookline.engine._inner.interception import MakeInterceptor

NAMES = {"q": Kind.QUERY, "k": Kind.KEY, "scores": Kind.SCORES, "pattern": Kind.PATTERN}
"""The last part of the name of a point inside attention: `encoder.0.attn.pattern`."""

_HEADS = ("num_heads", "heads", "n_heads", "num_attention_heads", "n_head", "nhead")
_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm})
_EINSUM = torch.functional.einsum

_NESTED = (
    "the module is called with a nested tensor, for which torch computes attention in one step (nn.TransformerEncoder "
    "makes one of padded inputs; it does not with enable_nested_tensor=False)"
)


@dataclass(frozen=True, slots=True)
class HeadAxis(Formula):
    """A tensor with heads beside the batch, `(b h) p e`, read as `b h p e`; any other as it is."""

    heads: int

    def compute(self, x: Tensor) -> Tensor:
        """The heads on an axis of their own."""
        return x.unflatten(0, (-1, self.heads)) if self._is_flat(x) else x

    def restore(self, x: Tensor, tensor: Tensor) -> Tensor:
        """The tensor as the module computes it."""
        return tensor.flatten(0, 1) if self._is_flat(x) else tensor

    def _is_flat(self, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[0] % self.heads == 0


def heads_of(module: nn.Module) -> int:
    """The number of heads that a module says it has; 1 if it does not say."""
    found = (vars(module).get(name) for name in _HEADS)
    return next((each for each in found if isinstance(each, int) and not isinstance(each, bool) and each > 0), 1)


def _has_edited_any(action: Any) -> bool:
    return getattr(action, "has_edited", False) and action.point.only is None


class PlainAttentionInterceptor(AttentionSteps, ModeInterceptor):
    """Intercepts the attention of any module, as often as it computes it in one call.

    By a mode: nn.MultiheadAttention takes a path of one fused operator unless there is one.
    """

    @classmethod
    def ignored_in(cls, module: nn.Module) -> frozenset[str]:
        """Children with parameters; a softmax or a product that is a module of its own belongs to its parent."""
        found: set[str] = set()
        for name, each in module.named_children():
            if isinstance(each, torch.jit.ScriptModule):
                continue  # it takes no hooks, and calls no torch function through Python
            if type(each).forward is nn.Module.forward and "forward" not in vars(each):  # a list of modules
                found |= {f"{name}.{below}" for below in cls.ignored_in(each)}
            elif type(each) not in cls.plain and next(each.parameters(), None) is not None:
                found.add(name)
        return frozenset(found)

    @classmethod
    def for_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MakeInterceptor:
        """Intercept nothing in a call with nested tensors, whose patterns torch does not compute."""
        is_nested = any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values()))
        return partial(NoInterceptor, why_not=_NESTED) if is_nested else cls

    def __init__(
        self, module: nn.Module, taps: Mapping[Kind, Tap], arguments: tuple[Any, dict[str, Any]] = ((), {})
    ) -> None:
        super().__init__(module, taps, arguments)
        self.rows: int | None = None  # the rows of the product that may be that of queries and keys
        self.has_pattern = False  # whether the next product is that of a pattern and the values

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch instead of `func`."""
        kwargs = kwargs or {}
        if self.muted:
            return func(*args, **kwargs)
        if func is WHOLE:
            with self:
                return OPENED(*args, **kwargs)
        if func in _PRODUCTS or func is _EINSUM:
            if self.has_pattern:
                self.has_pattern = self.seen_qk = False
                return func(*args, **kwargs)
            if not self.seen_qk:
                result = self._einsum(args) if func is _EINSUM else self.intercept(func, args, kwargs)
                self.rows = result.shape[:-1].numel()
                return result
        return self.intercept(func, args, kwargs) if func in INTERCEPTED else func(*args, **kwargs)

    def is_whole(self, shape: torch.Size) -> bool:  # noqa: ARG002 (nothing is known of the module)
        """Whether queries are those of all heads and tokens."""
        return True

    def are_queries(self, shape: torch.Size) -> bool:
        """Whether they are: the product of a column and a row has no scores, but angles of rotary embeddings, …"""
        return shape[-1] > 1

    def are_scores(self, shape: torch.Size) -> bool:
        """Whether they are as many as the product before them has; if not, they are those of a router, a gate, …"""
        self.has_pattern = self.seen_qk and shape[:-1].numel() == self.rows
        return self.has_pattern

    def check(self) -> None:
        """Refuse edits if there was more than one pattern; who only looks sees all of them, one after the other."""
        if self.patterns > 1:
            self.refuse(SEVERAL, is_about=_has_edited_any)

    def refuse_queries(self) -> None:
        """Raise for edits; who only looks sees the factors of both products."""
        why = "its module computes another product (#0) before its attention: add #1 to the name, for that of attention"
        self.refuse(why, self.kinds[:2], _has_edited_any)

    def begin_pattern(self) -> None:
        """Another pattern will be computed in this call of the module."""
        self.patterns += 1
        self.check()

    def _split(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)  # it is not known of what

    def _einsum(self, args: tuple[Any, ...]) -> Any:
        equation, *operands = args
        if len(operands) != 2 or not all(isinstance(each, Tensor) and each.ndim >= 3 for each in operands):
            return _EINSUM(*args)
        self.seen_qk = True
        query, key = operands
        result = _EINSUM(equation, self.taps[Kind.QUERY].flow(query), self.taps[Kind.KEY].flow(key))
        self.rows = result.shape[:-1].numel()
        return result


class PlainAttentionTap(AttentionTap):
    """A tap inside any module that computes attention."""

    interceptor = PlainAttentionInterceptor
