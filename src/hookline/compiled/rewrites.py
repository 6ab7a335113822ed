"""Rewrites: operations that a graph computes in another way, because the compiler cannot find that way itself.

A step of one new token waits for memory: the weights and the cache of keys and values are read once, and everything
else should be small beside that. Two operations are not, as models write them:

attention    transformers repeats keys and values for every query head that shares them, which copies the whole cache in
             every layer. Here the queries that share a head are the rows of one product.
products     of a weight with one vector, on a GPU: the kernels of the library need a second one to sum up. The compiler
             sums rows in one, and fuses products of the same vector. It does not for long rows, or very many of them.

The graph is proved against the one that was traced, which stays as it is: see `proof.py`.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

_attention: Any = F.scaled_dot_product_attention
_REPEATED = (slice(None), slice(None), None, slice(None), slice(None))
"""The index with which transformers begins to repeat keys and values."""
_LONGEST_ROW, _MOST_ROWS = 4096, 1 << 15
"""The weights for which sums of rows are faster, as measured on an H200 in bfloat16: see docs/benchmarks.md."""


def rewrite(graph: fx.Graph) -> None:
    """Rewrite the attention and the products of a traced graph, where all of their shapes are as expected."""
    for node in graph.find_nodes(op="call_function", target=_attention):
        key, value = (_before_repeating(each) for each in node.args[1:3])
        if key is not None and value is not None and _is_for_one_token(node):
            node.target, node.args = attention_of_one_token, (node.args[0], key, value)
    for node in graph.find_nodes(op="call_function", target=F.linear):
        if _is_for_one_vector(node):
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
    mixed = scores.softmax(-1).to(value.dtype) @ value
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
    few, many = (_shape(each) for each in (single.args[0], node))
    return single.args[0] if _shape(expanded) == (*few[:2], many[1] // few[1], *few[2:]) else None


def _calls(node: Any, method: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == method


def _is_for_one_token(node: fx.Node) -> bool:
    given = dict(node.kwargs)
    mask, is_plain = given.pop("attn_mask", None), len(node.args) == 3
    given.pop("scale", None)
    is_plain &= not any(given.values()) and given.keys() <= {"dropout_p", "is_causal", "enable_gqa"}
    return is_plain and _shape(node.args[0])[2] == 1 and isinstance(mask, fx.Node) and len(_shape(mask)) == 4


def _is_for_one_vector(node: fx.Node) -> bool:
    vector, weight = (each.meta["example_value"] for each in node.args[:2])  # type: ignore[union-attr]
    is_one = vector.is_cuda and vector.numel() == vector.shape[-1]
    return is_one and weight.shape[0] <= _MOST_ROWS and weight.shape[1] <= _LONGEST_ROW


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["example_value"].shape)
