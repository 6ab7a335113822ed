"""Taps inside attention: queries and keys as they enter the product, scores, and the pattern.

A model computes these with a matrix product of queries and keys and a softmax, or with
`scaled_dot_product_attention`, which does both. If the scores or the pattern of a fused call are hooked, they are
computed in separate steps; otherwise the fused call is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookline.engine._inner.inner import InnerTap
from hookline.engine._inner.interception import FunctionInterceptor, ModeInterceptor, OperatorInterceptor
from hookline.engine._memory.aliases import Alias
from hookline.engine._recording.deferred import Deferred, kept
from hookline.engine._torch.attention_functions import SOFTMAX, need_attention_functions
from hookline.engine._torch.graph_tasks import current_graph_task
from hookline.engine._undo.modes import GradMode, has_caches, uncached
from hookline.engine.order import Kind
from hookline.engine.pass_state import pass_state
from hookline.engine.schedule import active
from hookline.engine.taps import Tap
from hookline.functions.signatures import parameters_of

_FUSED = F.scaled_dot_product_attention
_PRODUCTS: dict[Callable[..., Any], tuple[str, ...]] = {
    torch.matmul: ("input", "other"),
    Tensor.matmul: ("self", "other"),
    Tensor.__matmul__: ("self", "other"),
    torch.bmm: ("input", "mat2"),
    Tensor.bmm: ("self", "mat2"),
    torch.baddbmm: ("input", "batch1", "batch2"),
    Tensor.baddbmm: ("self", "batch1", "batch2"),
}
"""Matrix products, with the names of their arguments; the last two are multiplied."""

_SPLITS = frozenset({torch.split, Tensor.split})
_DIFFERENCES = frozenset({torch.sub, Tensor.sub, Tensor.__sub__})
INTERCEPTED = frozenset({_FUSED, *SOFTMAX, *_PRODUCTS, *_SPLITS, *_DIFFERENCES})
"""The torch functions with which attention is computed."""


class FusedCall(NamedTuple):
    """The arguments of a call of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def scores(self, lengths: list[int] | None) -> Tensor:
        """The input of the softmax: scaled and masked scores."""
        return _scores(self.query, self.key, self.attn_mask, self.is_causal, self.scale, self.enable_gqa, lengths)

    def scores_later(self, lengths: list[int] | None) -> Deferred | None:
        """Defer the scores; None if what they are computed from cannot be shared."""
        query, key = kept(self.query), kept(self.key)
        mask = None if self.attn_mask is None else kept(self.attn_mask)
        if query is None or key is None or (mask is None and self.attn_mask is not None):
            return None
        return Deferred(_scores, query, key, mask, self.is_causal, self.scale, self.enable_gqa, lengths)

    @property
    def hides(self) -> bool:
        """Whether the mask may hide all keys from a query."""
        return self.attn_mask is not None and self.attn_mask.dtype == torch.bool

    def mix(self, pattern: Tensor) -> Tensor:
        """The weighted sum of values."""
        return F.dropout(pattern, self.dropout_p) @ _repeated(self.value, self.query, self.enable_gqa)


def _scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    lengths: list[int] | None,
) -> Tensor:
    scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    scores = query @ _repeated(key, query, enable_gqa).transpose(-2, -1) * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    elif mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return _within_images(scores, lengths)


def _pattern(scores: Tensor, hides: bool) -> Tensor:
    """The softmax over keys; zeros for a fully masked query, as in torch."""
    pattern = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    return pattern.masked_fill(scores.eq(-torch.inf).all(-1, keepdim=True), 0.0) if hides else pattern


def _repeated(x: Tensor, query: Tensor, enable_gqa: bool) -> Tensor:
    groups = query.shape[1] // x.shape[1] if enable_gqa else 1
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _within_images(scores: Tensor, lengths: list[int] | None) -> Tensor:
    """Scores with attention between different images of a packed row masked out."""
    if lengths is None:
        return scores
    owner = torch.repeat_interleave(torch.tensor(lengths, device=scores.device))
    return scores.masked_fill(owner[:, None] != owner[None], -torch.inf)


SEVERAL = "its module computes several of them in one call: add the number of one to the name (#0)"


def _acts_on_any(action: Any) -> bool:
    """Whether a hook acts on every pattern that there is."""
    return not action.only_reads and action.point.only is None


class AttentionShape(NamedTuple):
    """What is known of the attention of a module."""

    heads: int | None
    """None if the number of heads that one process has is not known."""
    positions_last: bool = False
    """Whether the module takes `b d p`, as a convolution does."""


_shapes: WeakKeyDictionary[nn.Module, AttentionShape] = WeakKeyDictionary()


def expect(module: nn.Module, heads: int | None, *, positions_last: bool = False) -> None:
    """Note that a module computes one pattern for all of its heads and tokens in each call.

    What has another shape is not taken for queries, scores or a pattern.
    """
    _shapes[module] = AttentionShape(heads, positions_last)


def is_expected(module: nn.Module) -> bool:
    """Whether it is known what a module computes."""
    return module in _shapes


def _may_have_edited(action: Any) -> bool:
    """Whether an action may have changed a value, and not only put it into the graph."""
    reads = action.only_reads or action.dir == "bwd"
    return bool(getattr(action, "has_edited", not reads))


class AttentionSteps(FunctionInterceptor):
    """What is done at the torch functions of one attention module."""

    kinds = Kind.QUERY, Kind.KEY, Kind.SCORES, Kind.PATTERN
    plain = frozenset({nn.Linear})

    def __init__(
        self, module: nn.Module, taps: Mapping[Kind, Tap], arguments: tuple[Any, dict[str, Any]] = ((), {})
    ) -> None:
        super().__init__(module, taps, arguments)
        self.seen_qk = False  # whether the product of queries and keys was computed
        self.patterns = 0  # how many patterns were computed
        self.other_shape: torch.Size | None = None  # of scores that are not those of all heads and tokens
        self.lengths: list[int] | None = None  # of images or windows packed into one row, each attending only to itself
        self.is_edited = False  # whether a hook changed scores or a pattern
        self.shifted: tuple[Tensor, Tensor] | None = None  # scores, and scores minus the maximum of each row

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call of one of the functions, after the hooks on what goes into it or out of it."""
        if func is _FUSED:
            return self._fused(FusedCall(*args, **kwargs))
        if func in _SPLITS:
            return self._split(func, args, kwargs)
        if func in _DIFFERENCES:
            return self._difference(func, args, kwargs)
        if func in SOFTMAX and args and self._is_over_keys(*args, **kwargs):
            return self._softmax(func, args, kwargs)
        if func in _PRODUCTS:
            return self._product(func, args, kwargs)
        return func(*args, **kwargs)

    def is_whole(self, shape: torch.Size) -> bool:
        """Whether queries or scores of this shape are those of all heads and tokens: `b h p …` or `(b h) p …`."""
        expected, given = _shapes.get(self.module), self._given()
        if expected is None or given is None:
            return False
        batch = given.shape[0] if given.ndim > 2 else 1
        length = given.shape[-1] if expected.positions_last else given.shape[:-1].numel() // batch
        rows, heads = shape[:-1], expected.heads
        if heads is None:
            return len(rows) == 3 and (rows[0], rows[2]) == (batch, length)
        return rows in ((batch, heads, length), (batch * heads, length))

    def are_queries(self, shape: torch.Size) -> bool:
        """Whether the first factor of a product of this shape are the queries."""
        return self.is_whole(shape)

    def are_scores(self, shape: torch.Size) -> bool:
        """Whether the argument of a softmax of this shape are the scores."""
        return self.is_whole(shape)

    def _given(self) -> Tensor | None:
        """The tensor that the module was called with, the first of its arguments."""
        args, kwargs = self.arguments
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        return given if given is not None and given.ndim >= 2 and given.numel() else None

    def _is_over_keys(self, scores: Tensor, dim: int | None = None, *_: Any, **__: Any) -> bool:
        """Whether a softmax with these arguments is that of the attention: not that of a gate, a router, …"""
        if scores.ndim < 3 or dim not in (-1, scores.ndim - 1):
            return False
        if self.are_scores(scores.shape):
            return True
        self.other_shape = scores.shape
        return False

    def check(self) -> None:
        """Refuse the points if there was attention, but never for all heads and tokens at once."""
        if self.other_shape is None or self.patterns:
            return
        self.refuse(
            "what its module computes is not one pattern for all heads and for the tokens that it was called with (the "
            f"shape is {list(self.other_shape)})",
            self.kinds[2:] if self.seen_qk else self.kinds,
        )

    def begin_pattern(self) -> None:
        """Another pattern will be computed in this call of the module: only the first has hooks."""
        self.patterns += 1
        if self.patterns > 1:
            self.refuse(SEVERAL, is_about=_acts_on_any)

    def refuse_queries(self) -> None:
        """Raise for whoever acts on queries and keys: those of another product came before those of the attention."""
        self.refuse(SEVERAL, self.kinds[:2], _acts_on_any)

    def refuse(
        self,
        why: str,
        kinds: Iterable[Kind] | None = None,
        is_about: Callable[[Any], bool] = lambda _action: True,
    ) -> None:
        """Raise for whoever acts on what the module computes."""
        for kind in kinds or self.kinds:
            for action in self.taps[kind].actions():
                if is_about(action):
                    action.refuse(why)

    def _softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The softmax of scores, after the hooks on them."""
        self.seen_qk = True
        self.begin_pattern()
        scores = self._scores(args[0])
        if self.lengths is None or self.is_edited:
            weights = func(scores, *args[1:], **kwargs)
        else:
            weights = self._block_diagonal(lambda own: func(own, *args[1:], **kwargs), args[0])
        pattern = self.taps[Kind.PATTERN].flow(weights)
        self.is_edited |= pattern is not weights
        return pattern

    def _fused(self, call: FusedCall) -> Tensor:
        if not self.is_whole(call.query.shape):
            self.other_shape = call.query.shape
            return self._fused_output(call)
        self.begin_pattern()
        if self.seen_qk:  # a product with positions, whose result is the mask of this call
            self.refuse_queries()
        query, key, scores_at, pattern_at = self.taps.values()  # in the order of `kinds`
        output: Tensor | None = None
        if self._is_captured():
            output = self._fused_output(call)
            if uncached(self._capture, call):
                return output
        waiting = [*scores_at.actions(), *pattern_at.actions()]
        if all(action.only_reads for action in (*query.actions(), *key.actions(), *waiting)):
            # Read after the call: a kernel that does not declare its inputs constant would copy a shared tensor.
            output = self._fused_output(call) if output is None else output
            query.flow(call.query)
            key.flow(call.key)
        else:
            call = call._replace(query=query.flow(call.query), key=key.flow(call.key))
        if waiting and not uncached(self._defer, call, waiting):
            output = uncached(self._stepwise, call, waiting, output)
        return self._fused_output(call) if output is None else output

    def _capture(self, call: FusedCall) -> bool:
        """Let the only run take what is computed from a fused call. Returns whether it can."""
        scores = call.scores_later(self.lengths)
        if scores is None:
            return False
        values = (*scores.arguments[:2], scores, Deferred(_pattern, scores, call.hides))
        for tap, value in zip(self.taps.values(), values, strict=True):
            tap.capture(value)
        return True

    def _is_captured(self) -> bool:
        """Whether all that is done with queries, keys, scores and pattern are captures of one run."""
        runs = active.get()
        for tap in self.taps.values():
            if tap.alone is not runs or tap.permanent:
                return False
        return not pass_state.hooks and current_graph_task() == -1

    def _defer(self, call: FusedCall, waiting: list[Any]) -> bool:
        """Pass on what computes the scores and the pattern later. Returns whether everybody can wait for that."""
        if not all(action.takes_deferred for action in waiting):
            return False
        scores = call.scores_later(self.lengths)
        if scores is not None:
            self.taps[Kind.SCORES].flow(scores)
            self.taps[Kind.PATTERN].flow(Deferred(_pattern, scores, call.hides))
        return scores is not None

    def _stepwise(self, call: FusedCall, waiting: list[Any], output: Tensor | None) -> Tensor | None:
        """Compute scores and pattern in separate steps. Returns the output that they lead to, if they were edited."""
        only_reads = all(action.only_reads for action in waiting)  # then keep the steps out of the model's graph
        with GradMode(torch.is_grad_enabled() and not only_reads):
            before = call.scores(self.lengths)
            scores = self.taps[Kind.SCORES].flow(before)
            weights = _pattern(scores, call.hides)
            pattern = self.taps[Kind.PATTERN].flow(weights)
        if scores is before and pattern is weights and not self.has_other():
            return output  # only read: the output stays bitwise the model's own
        mixed = call.mix(pattern)
        if call.dropout_p or self.has_other() or any(map(_may_have_edited, waiting)):
            return mixed
        # In the graph, because a hook kept what it got, or for its gradient: only gradients flow through it.
        try:
            if output is None:
                with torch.no_grad():
                    output = self._fused_output(call)
            own: Tensor = Alias.apply(mixed, output)
        except RuntimeError:  # inside a transform, or with derivatives in forward mode
            return mixed
        return own

    def _split(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Undo the split of packed images or windows, so that there is one block-diagonal pattern for all of them."""
        given = dict(zip(("tensor", "sizes", "dim"), args, strict=False))
        given |= {{"split_size_or_sections": "sizes", "split_size": "sizes"}.get(k, k): v for k, v in kwargs.items()}
        tensor, sizes = given["tensor"], given["sizes"]
        is_of_rows = isinstance(sizes, list | tuple) and tensor.ndim == 4 and given.get("dim", 0) in (2, -2)
        if not is_of_rows or [*sizes] != self._packed_lengths() or has_caches():
            return func(*args, **kwargs)
        self.lengths = [*sizes]
        return (tensor,)

    def _packed_lengths(self) -> list[int] | None:
        """The lengths of the images or windows in one row, if the module was told where they end."""
        args, kwargs = self.arguments
        ends = (dict(zip(parameters_of(self.module)[0], args, strict=False)) | kwargs).get("cu_seqlens")
        return ends.diff().tolist() if isinstance(ends, Tensor) else None

    def _difference(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Some models subtract the maximum of each row before the softmax; the hooked scores are those before."""
        result = func(*args, **kwargs)
        if self.seen_qk and len(args) == 2 and not kwargs and all(isinstance(each, Tensor) for each in args):
            scores, highest = args
            if scores.ndim >= 3 and highest.shape == (*scores.shape[:-1], 1):
                self.shifted = scores, result
        return result

    def _scores(self, given: Tensor) -> Tensor:
        """The input of the softmax, after hooks on the scores."""
        shifted, self.shifted = self.shifted, None
        if shifted is None or shifted[1] is not given:
            before = _within_images(given, self.lengths)
            scores = self.taps[Kind.SCORES].flow(before)
            self.is_edited = scores is not before
            return scores
        before, _ = shifted
        scores = self.taps[Kind.SCORES].flow(before)
        return given if scores is before else scores - scores.max(-1, keepdim=True).values

    def _fused_output(self, call: FusedCall) -> Tensor:
        """The output of the model's own fused call or calls."""
        if self.lengths is None:
            return _FUSED(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
        parts = zip(*(x.split(self.lengths, 2) for x in (call.query, call.key, call.value)), strict=True)
        each = [_FUSED(**call._replace(query=q, key=k, value=v)._asdict()) for q, k, v in parts]
        return torch.cat(each, 2)

    def _product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A product; the first one of two activations with heads is that of queries and keys.

        What images or windows in one row have to do with each other is not computed, unless a hook changed the scores
        or the pattern: so the result has the bits of the model's own products, one for each of them.
        """
        names = _PRODUCTS[func]
        given = dict(zip(names, args, strict=False)) | kwargs
        left, right = given.get(names[-2]), given.get(names[-1])
        if not (isinstance(left, Tensor) and isinstance(right, Tensor) and left.ndim >= 3 and right.ndim >= 3):
            return func(*args, **kwargs)
        before = [given[name] for name in names[:-2]]
        options = {name: x for name, x in kwargs.items() if name not in names}

        def product(left: Tensor, right: Tensor) -> Tensor:
            return func(*before, left, right, **options)

        if not self.seen_qk and self.are_queries(left.shape):
            self.seen_qk = True
            left, right = uncached(self._factors, left, right)
            return product(left, right) if self.lengths is None else self._block_diagonal(product, left, right)
        if self.lengths is not None and self.patterns and not self.is_edited:
            parts = [product(left[..., at, at], right[..., at, :]) for at in _slices(self.lengths)]
            return torch.cat(parts, -2)
        return func(*args, **kwargs)

    def _factors(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and transposed keys, after the hooks on them."""
        left, right = self.taps[Kind.QUERY].flow(left), self.taps[Kind.KEY].flow(right.transpose(-2, -1))
        return left, right.transpose(-2, -1)

    def _block_diagonal(self, function: Callable[..., Tensor], left: Tensor, right: Tensor | None = None) -> Tensor:
        """What a function returns for each image or window, with zeros between them."""
        assert self.lengths is not None
        length = sum(self.lengths)
        whole: Tensor | None = None
        for at in _slices(self.lengths):
            part = function(left[..., at, at]) if right is None else function(left[..., at, :], right[..., at])
            if whole is None:
                whole = part.new_zeros(*part.shape[:-2], length, length)
            whole[..., at, at] = part
        assert whole is not None
        return whole


def _slices(lengths: list[int]) -> list[slice]:
    """The places of images or windows in a row."""
    ends = [*accumulate(lengths)]
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


_APART = frozenset({"indexer", "compressor", "rotary_emb"})
"""Children of attention with products of their own: they select keys, or compute the angles of rotations."""


class AttentionModeInterceptor(AttentionSteps, ModeInterceptor):
    """Intercepts the torch functions of one attention module of a transformer."""

    ignored = _APART

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch instead of `func`."""
        if func not in INTERCEPTED or self.muted:  # the common case: even reading a shape calls this
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.intercept(func, args, kwargs or {})


class AttentionInterceptor(AttentionSteps, OperatorInterceptor):
    """Intercepts the operators of one attention module of a transformer."""

    ignored, by_mode = _APART, AttentionModeInterceptor

    def operator(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called instead of `func`."""
        return func(*args, **kwargs) if self.muted else self.intercept(func, args, kwargs)


class AttentionTap(InnerTap):
    """A tap inside an attention module."""

    def __init__(self, kind: Kind, *, late: bool = False) -> None:
        need_attention_functions()
        super().__init__(kind, late=late)

    interceptor: ClassVar[type[FunctionInterceptor]] = AttentionInterceptor
