"""Weights in the classic layout, whatever the layout inside the model: `W_Q` is [layer, head, d_model, d_head].

A projection's weights are cut into heads by the lens of the point that its output is: what finds the queries in
a fused projection's output finds their weights too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hookline.anatomy.classic import head_counts
from hookline.errors import HooklineError
from hookline.factored import FactoredMatrix
from hookline.lenses import Chain, First, Lens

if TYPE_CHECKING:
    from hookline.anatomy.names import ModelPoints

_OF_HEADS = {"Q": "attn.hook_q", "K": "attn.hook_k", "V": "attn.hook_v", "O": "attn.hook_z"}
_OF_MLP = {"in": "mlp.hook_pre", "gate": "mlp.hook_pre", "out": "mlp.hook_post"}


def weight(points: ModelPoints, layer: int, name: str) -> Tensor:
    """`W_Q`, `b_in` and so on of one layer of the stack that the output comes from: a view of the model's own."""
    kind, _, part = name.partition("_")
    if part in _OF_HEADS:
        return _of_heads(points, layer, kind, part)
    if part in _OF_MLP:
        return _of_mlp(points, layer, kind, part)
    raise HooklineError(f"no weight is called {name!r}: there are W_Q, W_K, W_V, W_O, W_in, W_gate, W_out and b_Q, …")


def _of_heads(points: ModelPoints, layer: int, kind: str, part: str) -> Tensor:
    point = points.find(f"{points.layer(layer)}.{_OF_HEADS[part]}")
    matrix, bias = linear(point.site.module)
    if part == "O":
        heads = _heads_of(points, layer)
        return matrix.unflatten(0, (heads, -1)) if kind == "W" else _or_zeros(bias, matrix[0])
    lens = _without_first(point.site.lens)
    if kind == "W":
        return lens.get(matrix).movedim(-2, 0)
    return lens.get(_or_zeros(bias, matrix[0]))


def _heads_of(points: ModelPoints, layer: int) -> int:
    block, config = points.anatomy.blocks[layer], points.anatomy.main.config
    assert block.attn is not None  # there is a z
    return head_counts(block.attn, config)[0]


def _of_mlp(points: ModelPoints, layer: int, kind: str, part: str) -> Tensor:
    prefix = points.layer(layer)
    is_gated = f"{prefix}.mlp.hook_pre_linear" in points.hook_dict
    if part == "gate" and not is_gated:
        raise HooklineError(f"the MLP of {prefix} has no gate: W_in and W_out are all")
    name = "mlp.hook_pre_linear" if part == "in" and is_gated else _OF_MLP[part]
    matrix, bias = linear(points.find(f"{prefix}.{name}").site.module)
    return matrix if kind == "W" else _or_zeros(bias, matrix[0])


def linear(module: nn.Module) -> tuple[Float[Tensor, "into out"], Float[Tensor, " out"] | None]:
    """The matrix and the bias of a linear map, so that the output is `x @ matrix + bias`."""
    own: Any = getattr(module, "weight", None)
    is_reversed = type(module).__name__ == "Conv1D"  # GPT-2's keeps its weight the other way round
    if not (isinstance(module, nn.Linear) or is_reversed) or type(own) is not nn.Parameter or own.is_meta:
        raise HooklineError(
            f"{type(module).__name__} is no plain linear map (an adapter, or quantised?): it has no one matrix to give"
        )
    bias: Any = getattr(module, "bias", None)
    return (own if is_reversed else own.T), bias


def _without_first(lens: Lens) -> Lens:
    """The lens without its first step, which finds the tensor in what a module gives."""
    if isinstance(lens, Chain) and isinstance(lens.lenses[0], First):
        return Chain(lens.lenses[1:])
    raise HooklineError("this projection's output is not cut into heads in a way that its weights could be")


def _or_zeros(bias: Tensor | None, like: Tensor) -> Tensor:
    return bias if bias is not None else torch.zeros_like(like)


class Weights:
    """The weights of a language model, stacked over its layers. A mixin: it needs the model's points."""

    _points: ModelPoints

    def _stacked(self, name: str) -> Tensor:
        return torch.stack([weight(self._points, layer, name) for layer in range(len(self._points.anatomy.blocks))])

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The embeddings of all tokens, as the module has them: some models multiply them afterwards."""
        embed = self._points.anatomy.main.embed
        if not isinstance(embed, nn.Embedding):
            raise HooklineError(f"{type(embed).__name__} is no plain embedding: it has no one matrix to give")
        return embed.weight

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """The embeddings of all positions, where they are added to the stream."""
        embed = self._points.anatomy.main.pos_embed
        if embed is None or not isinstance(getattr(embed, "weight", None), Tensor):
            raise HooklineError("this model adds no learned position embedding to the stream: it has no W_pos")
        return embed.weight[getattr(embed, "offset", 0) :]  # type: ignore[index]

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding."""
        return linear(self._head())[0]

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """Its bias; zeros if it has none."""
        matrix, bias = linear(self._head())
        return _or_zeros(bias, matrix[0])

    def _head(self) -> nn.Module:
        if self._points.anatomy.unembed is None:
            raise HooklineError("this model has no unembedding: it was loaded without its language-model head")
        return self._points.anatomy.unembed

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """From the normed stream to each head's queries."""
        return self._stacked("W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        """To its keys; of each group, where heads share them."""
        return self._stacked("W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        """To its values."""
        return self._stacked("W_V")

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """From each head's mix of values to what it adds."""
        return self._stacked("W_O")

    @property
    def QK(self) -> FactoredMatrix:
        """What each head's queries look for in its keys, as a bilinear form on the normed stream."""
        return FactoredMatrix(self.W_Q, self._for_each_head(self.W_K).mT)

    @property
    def OV(self) -> FactoredMatrix:
        """What each head writes for what it reads."""
        return FactoredMatrix(self._for_each_head(self.W_V), self.W_O)

    def _for_each_head(self, grouped: Tensor) -> Tensor:
        """Keys or values of a group, once for each of its heads."""
        heads = _heads_of(self._points, 0)
        return grouped.repeat_interleave(heads // grouped.shape[1], 1)

    @property
    def b_Q(self) -> Float[Tensor, "layer head d_head"]:
        """Zeros where there is no bias, as for all of these."""
        return self._stacked("b_Q")

    @property
    def b_K(self) -> Float[Tensor, "layer kv_head d_head"]:
        """Of the keys."""
        return self._stacked("b_K")

    @property
    def b_V(self) -> Float[Tensor, "layer kv_head d_head"]:
        """Of the values."""
        return self._stacked("b_V")

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        """Of the output projection, for all heads together."""
        return self._stacked("b_O")

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """From the normed stream into the MLP; in a gated one, into the branch without the non-linearity."""
        return self._stacked("W_in")

    @property
    def W_gate(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """Into the gate, of a gated MLP."""
        return self._stacked("W_gate")

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        """From the MLP to what it adds."""
        return self._stacked("W_out")

    @property
    def b_in(self) -> Float[Tensor, "layer d_mlp"]:
        """Of the way into the MLP."""
        return self._stacked("b_in")

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        """Of the way out."""
        return self._stacked("b_out")
