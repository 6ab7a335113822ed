"""Rewrites: operations that a graph computes in another way, because the compiler cannot find that way itself.

A step of one new token waits for memory: the weights and the cache of keys and values are read once, and everything
else should be small beside that. Two operations are not, as models write them:

attention    transformers repeats keys and values for every query head that shares them, which copies the whole cache in
             every layer. Here the queries that share a head are the rows of one product.
products     of a weight with one vector, on a GPU: the kernels of the library need a second one to sum up. The compiler
             sums rows in one, and fuses products of one vector. For long rows, or very many, the library is faster.

The graph is proved against the one that was traced, which stays as it is: see `proof.py`.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_attention: Any = F.scaled_dot_product_attention
_REPEATED = (slice(None), slice(None), None, slice(None), slice(None))
"""The index with which transformers begins to repeat keys and values."""
_OFF = {"dropout_p", "is_causal", "enable_gqa"}
"""Options of torch's attention that are off where it is rewritten."""
_LONGEST_ROW, _MOST_ROWS = 4096, 1 << 15
"""The weights for which sums of rows are faster, as measured on an H200 in bfloat16: see docs/benchmarks.md."""


def rewrite(graph: fx.Graph) -> None:
    """Rewrite the attention and the products of a traced graph, where all of their shapes are as expected."""
    for node in graph.find_nodes(op="call_function", target=_attention):
        few = [_before_repeating(argument) for argument in node.args[1:]]
        if len(few) == 2 and None not in few and _is_for_one_token(node):
            node.target, node.args = attention_of_one_token, (node.args[0], *few)
    for node in graph.find_nodes(op="call_function", target=F.linear):
        if len(node.args) > 1 and _is_for_one_vector(*map(_value, node.args[:2])):
            node.target = sums_of_rows


def attention_of_one_token(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor, scale: float | None = None, **_: Any
) -> Tensor:
    """Attention of `[batch, head, 1, e]` over keys and values of `[batch, group, k, e]`, in float32 at least."""
    rows, groups, length, width = key.shape
    queries = query.reshape(rows * groups, -1, width)
    keys = key.reshape(rows * groups, length, width).transpose(1, 2)
    wide = torch.promote_types(query.dtype, torch.float32)
    if query.is_cuda and query.dtype != wide:
        scores = torch.bmm(queries, keys, out_dtype=wide)
    else:
        scores = torch.bmm(queries.to(wide), keys.to(wide))
    scores = scores.view(rows, groups, -1, length) * (width**-0.5 if scale is None else scale)
    if attn_mask.shape[1] > 1:
        attn_mask = attn_mask.reshape(attn_mask.shape[0], groups, -1, length)
    is_bool = attn_mask.dtype == torch.bool
    scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
    mixed = torch._safe_softmax(scores, -1).to(value.dtype) @ value  # where all is masked it is zero, as in torch
    return mixed.view(*query.shape[:-1], value.shape[-1])


def sums_of_rows(vector: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of one vector, summed in float32 at least."""
    wide = torch.promote_types(vector.dtype, torch.float32)
    sums = (vector.reshape(-1).to(wide) * weight.to(wide)).sum(-1)
    return (sums if bias is None else sums + bias).to(vector.dtype).view(*vector.shape[:-1], -1)


def _before_repeating(node: Any) -> fx.Node | None:
    """The keys or values, `[batch, group, k, e]`, that this node repeats for the heads of each group."""
    expanded: Any = node.args[0] if _calls(node, "reshape") else None
    single: Any = expanded.args[0] if _calls(expanded, "expand") else None
    if single is None or single.target is not getitem or single.args[1] != _REPEATED:
        return None
    few, many = (_value(operand).shape for operand in (single.args[0], node))
    return single.args[0] if _value(expanded).shape == (*few[:2], many[1] // few[1], *few[2:]) else None


def _calls(node: Any, method: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == method


def _is_for_one_token(node: fx.Node) -> bool:
    options = dict(node.kwargs)
    mask = options.pop("attn_mask", None)
    options.pop("scale", None)
    if not isinstance(mask, fx.Node) or any(options.values()) or not options.keys() <= _OFF:
        return False
    shape, length = _value(mask).shape, _value(node.args[1]).shape[2]
    return bool(len(shape) == 4 and shape[-1] == length and _value(node.args[0]).shape[2] == 1)


def _is_for_one_vector(vector: Tensor, weight: Tensor) -> bool:
    is_one = vector.is_cuda and vector.numel() == vector.shape[-1]
    is_matrix = weight.ndim == 2 and not is_traceable_wrapper_subclass(weight)  # such as a quantized one
    return is_one and is_matrix and weight.shape[0] <= _MOST_ROWS and weight.shape[1] <= _LONGEST_ROW


def _value(node: Any) -> Any:
    """A tensor without data, as the compiler saw it while tracing."""
    return node.meta["example_value"]
