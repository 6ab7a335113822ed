"""Taps inside attention: the query and key that meet, the scores, and the pattern.

A model computes these with a matrix product of queries and keys, a softmax, or `scaled_dot_product_attention`, which
does both. Where the scores or the pattern are wanted of a fused call, the same sum is done in steps; otherwise the
fused call is made as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookline.engine.inner import InnerTap, Watching
from hookline.engine.taps import Kind
from hookline.transformer.contexts import GradMode

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

_SPLITS = frozenset({torch.split, Tensor.split})
_DIFFERENCES = frozenset({torch.sub, Tensor.sub, Tensor.__sub__})
_WATCHED = frozenset({_FUSED, *_SOFTMAX, *_PRODUCTS, *_SPLITS, *_DIFFERENCES})


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
        if self.is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            return scores.masked_fill(later, -torch.inf)
        mask = self.attn_mask
        if mask is None:
            return scores
        return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask

    def pattern(self, scores: Tensor) -> Tensor:
        """Of each query position, over the keys. A position that may look at nothing has zeros, as in torch's own."""
        pattern = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        if self.attn_mask is None or self.attn_mask.dtype != torch.bool:
            return pattern
        return pattern.masked_fill(scores.eq(-torch.inf).all(-1, keepdim=True), 0.0)

    def mix(self, pattern: Tensor) -> Tensor:
        """The values as the pattern mixes them."""
        return F.dropout(pattern, self.dropout_p) @ self._repeated(self.value)

    def _repeated(self, x: Tensor) -> Tensor:
        groups = self.query.shape[1] // x.shape[1] if self.enable_gqa else 1
        return x.repeat_interleave(groups, 1) if groups > 1 else x


class WatchingAttention(Watching):
    """Watches one attention module.

    Not those children that only choose which keys to look at: they have queries and keys of their own.
    """

    ignored = frozenset({"indexer", "compressor"})

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, (Kind.QUERY, Kind.KEY, Kind.SCORES, Kind.PATTERN), AttentionTap)
        self.has_met = False  # queries and keys
        self.lengths: list[int] | None = None  # of the images or windows in one row, each attending to itself alone
        self.shifted: tuple[Tensor, Tensor] | None = None  # scores, and what is left of them less each row's maximum

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch instead of `func`."""
        if func not in _WATCHED or self.away:  # nearly always, and often: even reading a shape comes by here
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func is _FUSED:
            return self._fused(Fused(*args, **kwargs))
        if func in _SPLITS:
            return self._split(func, args, kwargs)
        if func in _DIFFERENCES:
            return self._difference(func, args, kwargs)
        if func in _SOFTMAX and args and args[0].ndim >= 3:
            self.has_met = True
            scores = self._scores(args[0])
            return self.taps[Kind.PATTERN].flow(func(scores, *args[1:], **kwargs))
        if not self.has_met and func in _PRODUCTS:
            names = _PRODUCTS[func]
            args, kwargs = self._product(dict(zip(names, args, strict=False)) | kwargs, names)
        return func(*args, **kwargs)

    def _fused(self, call: Fused) -> Tensor:
        call = call._replace(query=self.taps[Kind.QUERY].flow(call.query), key=self.taps[Kind.KEY].flow(call.key))
        waiting = [*self.taps[Kind.SCORES].waiting(), *self.taps[Kind.PATTERN].waiting()]
        if not waiting:
            return self._model_own(call)
        only_reads = all(action.only_reads for action in waiting)  # beside the model's own graph, then
        with GradMode(torch.is_grad_enabled() and not only_reads):
            before = self._apart(call.scores())
            scores = self.taps[Kind.SCORES].flow(before)
            weights = call.pattern(scores)
            pattern = self.taps[Kind.PATTERN].flow(weights)
        if scores is before and pattern is weights:
            return self._model_own(call)  # only looked at: what flows on is the model's own, to the last bit
        return call.mix(pattern)

    def _split(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Images, or windows of them, in one row are attended to one by one: here all at once, so that there is one
        pattern for all of them, with nothing between one and another.
        """
        given = dict(zip(("tensor", "sizes", "dim"), args, strict=False))
        given |= {{"split_size_or_sections": "sizes", "split_size": "sizes"}.get(k, k): v for k, v in kwargs.items()}
        tensor, sizes = given["tensor"], given["sizes"]
        if tensor.ndim != 4 or not isinstance(sizes, list | tuple) or given.get("dim", 0) not in (2, -2):
            return func(*args, **kwargs)
        self.lengths = list(sizes)
        return (tensor,)

    def _difference(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Some models subtract each row's maximum before the softmax, against overflow; the scores are those before."""
        result = func(*args, **kwargs)
        if self.has_met and len(args) == 2 and not kwargs and all(isinstance(each, Tensor) for each in args):
            scores, highest = args
            if scores.ndim >= 3 and highest.shape == (*scores.shape[:-1], 1):
                self.shifted = scores, result
        return result

    def _scores(self, given: Tensor) -> Tensor:
        """What goes into the softmax, after hooks have seen the scores."""
        shifted, self.shifted = self.shifted, None
        if shifted is None or shifted[1] is not given:
            return self.taps[Kind.SCORES].flow(self._apart(given))
        before, _ = shifted
        scores = self.taps[Kind.SCORES].flow(before)
        return given if scores is before else scores - scores.max(-1, keepdim=True).values

    def _apart(self, scores: Tensor) -> Tensor:
        """Scores in which images that are in one row do not see each other."""
        if self.lengths is None:
            return scores
        owner = torch.repeat_interleave(torch.tensor(self.lengths, device=scores.device))
        return scores.masked_fill(owner[:, None] != owner[None], -torch.inf)

    def _model_own(self, call: Fused) -> Tensor:
        """What the model itself would have computed."""
        if self.lengths is None:
            return _FUSED(**call._asdict())
        parts = zip(*(x.split(self.lengths, 2) for x in (call.query, call.key, call.value)), strict=True)
        each = [_FUSED(**call._replace(query=q, key=k, value=v)._asdict()) for q, k, v in parts]
        return torch.cat(each, 2)

    def _product(self, given: dict[str, Any], names: tuple[str, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a product; if it is the first of two activations with heads, it is of queries and keys."""
        left, right = names[-2:]
        if all(isinstance(given.get(name), Tensor) and given[name].ndim >= 3 for name in (left, right)):
            self.has_met = True
            given[left] = self.taps[Kind.QUERY].flow(given[left])
            given[right] = self.taps[Kind.KEY].flow(given[right].transpose(-2, -1)).transpose(-2, -1)
        return tuple(given.pop(name) for name in names), given


class AttentionTap(InnerTap):
    """A tap inside an attention module."""

    watch = WatchingAttention
