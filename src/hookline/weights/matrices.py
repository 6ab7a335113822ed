"""Weights in the classic layout, whatever the layout inside the model: `W_Q` is [layer, head, d_model, d_head].

The weights of one layer, `model.blocks[5].attn.W_Q`, are views of the model's parameters: writing to them changes the
model. Where no view is possible (zeros for a bias that the model does not have) they are read-only. Weights stacked
over layers are plain copies.

The lens of a point splits the weights of its projection into heads: the lens that finds the queries in the output of a
fused projection also finds their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hookline.engine import FIRST, Lens, chained, parts_of
from hookline.errors import HooklineError
from hookline.text.forward_pass import tokenizers
from hookline.text.tokenizer import single_token
from hookline.transformer.shard_lenses import Gathered, whole_parameter
from hookline.transformer.sites import head_counts
from hookline.weights.factored import FactoredMatrix, all_scores
from hookline.weights.read_only import plain, read_only, shares_memory

if TYPE_CHECKING:
    from hookline.transformer.index import ModelPoints

_POINTS = {
    **{"Q": "attn.hook_q", "K": "attn.hook_k", "V": "attn.hook_v", "O": "attn.hook_z"},
    **{"in": "mlp.hook_pre", "gate": "mlp.hook_pre", "out": "mlp.hook_post"},
}
"""The point at the module that has the weight."""


def weight(points: ModelPoints, layer: int, name: str) -> Tensor:
    """`W_Q`, `b_in` and so on of one layer of the main stack: a view of the model's parameter.

    Where no view is possible, it is a `ReadOnlyTensor`.
    """
    tensor, parameter = weight_and_parameter(points, layer, name)
    where = f"{points.layer(layer)} of this model"
    if parameter is None:
        return read_only(tensor, f"{where} has no {name}, so it is all zeros")
    if shares_memory(tensor, parameter):
        return tensor
    return read_only(tensor, f"{where} has {name} in another layout; write to the parameters of model.module")


def weight_and_parameter(points: ModelPoints, layer: int, name: str) -> tuple[Tensor, Tensor | None]:
    """A weight of one layer as a plain tensor, and the parameter that contains it; zeros and None if there is none."""
    if name not in STACKED:
        raise HooklineError(f"no weight is named {name!r}: there are {', '.join(STACKED)}")
    kind, _, part = name.partition("_")
    site = points.find(f"{points.layer(layer)}.{_point_of(points, layer, part)}").site
    matrix, bias = linear(site.module)
    parameter: Any = site.module.weight if kind == "W" else bias
    tensor = matrix if kind == "W" else torch.zeros_like(matrix[0]) if bias is None else bias
    if part in ("Q", "K", "V"):
        by_head = without_first(site.lens).get(tensor)
        tensor = by_head.movedim(-2, 0) if kind == "W" else by_head
    elif name == "W_O":
        tensor = matrix.unflatten(0, (_heads_of(points, layer), -1))
    return tensor, parameter


def _point_of(points: ModelPoints, layer: int, part: str) -> str:
    """The point at the module of a weight. In a gated MLP, `W_in` is the branch without the nonlinearity."""
    if part not in ("in", "gate") or f"{points.layer(layer)}.mlp.hook_pre_linear" in points.hook_dict:
        return "mlp.hook_pre_linear" if part == "in" else _POINTS[part]
    if part == "gate":
        raise HooklineError(f"the MLP of {points.layer(layer)} has no gate, only W_in and W_out")
    return _POINTS[part]


def _heads_of(points: ModelPoints, layer: int) -> int:
    attn: Any = points.anatomy.blocks[layer].attn
    return head_counts(attn, points.anatomy.main.config)[0]


def check_loaded(module: nn.Module) -> None:
    """Raise if accelerate offloads the weight of a module."""
    parameter: Any = getattr(module, "weight", None)
    if isinstance(parameter, Tensor) and parameter.is_meta and hasattr(module, "_hf_hook"):
        raise HooklineError(
            "the weights of this model are offloaded by accelerate, and are loaded only while a module runs: load the "
            "model without offloading (device_map=None, no cpu_offload) to read its weights"
        )


def linear(module: nn.Module) -> tuple[Float[Tensor, "into out"], Float[Tensor, " out"] | None]:
    """The matrix and the bias of a linear module, such that its output is `x @ matrix + bias`."""
    parameter: Any = getattr(module, "weight", None)
    is_plain = isinstance(module, nn.Linear) or is_reversed(module)
    check_loaded(module)
    is_sharded = hasattr(parameter, "full_tensor")
    if not is_plain or not (is_sharded or type(parameter) is nn.Parameter) or parameter.is_meta:
        raise HooklineError(f"{type(module).__name__} is not a plain linear module: is it adapted or quantized?")
    bias: Any = getattr(module, "bias", None)
    parameter, bias = whole_parameter(parameter), whole_parameter(bias)
    return (parameter if is_reversed(module) else parameter.T), bias


def is_reversed(module: nn.Module) -> bool:
    """Whether the weight of a linear module is stored as [into, out], as in GPT-2."""
    return type(module).__name__ == "Conv1D"


def without_first(lens: Lens) -> Lens:
    """The lens without its first step, which finds the tensor in the output of a module."""
    first, *rest = parts_of(lens)
    if first == FIRST and rest:
        return chained(*[part for part in rest if not isinstance(part, Gathered)])
    raise HooklineError("the output of this projection is not split into heads in a way that applies to its weights")


STACKED = {
    "W_Q": "[layer, head, d_model, d_head]: query projection",
    "W_K": "[layer, kv_head, d_model, d_head]: key projection, one per group where heads share keys",
    "W_V": "[layer, kv_head, d_model, d_head]: value projection, one per group where heads share values",
    "W_O": "[layer, head, d_head, d_model]: output projection",
    "b_Q": "[layer, head, d_head]: query bias",
    "b_K": "[layer, kv_head, d_head]: key bias",
    "b_V": "[layer, kv_head, d_head]: value bias",
    "b_O": "[layer, d_model]: bias of the output projection, one for all heads",
    "W_in": "[layer, d_model, d_mlp]: input projection of the MLP; if gated, of the branch without the nonlinearity",
    "W_gate": "[layer, d_model, d_mlp]: gate projection of a gated MLP",
    "W_out": "[layer, d_mlp, d_model]: output projection of the MLP",
    "b_in": "[layer, d_mlp]: bias of W_in",
    "b_gate": "[layer, d_mlp]: bias of W_gate",
    "b_out": "[layer, d_model]: bias of W_out",
}
"""The weights that every layer has, as `Weights` stacks them over layers. A missing bias is all zeros."""


class Weights:
    """The weights of a language model, stacked over its layers: `model.weights.W_Q`, or `model.W_Q` for short.

    `STACKED` lists the weights of layers, with their axes.
    """

    _matrix = FactoredMatrix

    def __init__(self, points: ModelPoints) -> None:
        self._points = points

    def __getattr__(self, name: str) -> Any:
        if name not in STACKED:
            raise AttributeError(f"there are no weights named {name!r}; there are {', '.join(self.names())}")
        return self._stacked(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *STACKED})

    @classmethod
    def names(cls) -> list[str]:
        """The attributes that a model passes on to its weights."""
        attributes = (
            name for base in cls.__mro__ for name in vars(base) if not name.startswith("_") and name != "names"
        )
        return list(dict.fromkeys([*STACKED, *attributes]))

    def _stacked(self, name: str) -> Tensor:
        layers = range(len(self._points.anatomy.blocks))
        return torch.stack([plain(weight(self._points, layer, name)) for layer in layers])

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The embedding matrix. Some models (Gemma) multiply embeddings before they enter the stream: `hook_embed`."""
        embed = self._points.anatomy.main.embed
        if not isinstance(embed, nn.Embedding):
            raise HooklineError(f"{type(embed).__name__} is not a plain embedding, so it has no weight matrix")
        check_loaded(embed)
        return whole_parameter(embed.weight)

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """The learned position embeddings that are added to the stream."""
        embed = self._points.anatomy.main.pos_embed
        if embed is None or not isinstance(getattr(embed, "weight", None), Tensor):
            raise HooklineError("this model has no W_pos: it adds no learned position embedding to the stream")
        whole, first = whole_parameter(embed.weight), getattr(embed, "offset", 0)
        return whole[first:] if first else whole

    @property
    def W_E_pos(self) -> Float[Tensor, "d_vocab_and_n_ctx d_model"]:
        """The token embeddings followed by the position embeddings."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding matrix."""
        return linear(self._head())[0]

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """The bias of the unembedding; zeros if it has none."""
        matrix, bias = linear(self._head())
        return read_only(torch.zeros_like(matrix[0]), "the unembedding has no bias") if bias is None else bias

    def _head(self) -> nn.Module:
        if self._points.anatomy.unembed is None:
            raise HooklineError("this model has no unembedding: it was loaded without its language-model head")
        return self._points.anatomy.unembed

    @property
    def QK(self) -> FactoredMatrix:
        """The query-key circuit of each head, a bilinear form on the normalized stream.

        Its shape is [layer, head, d_model, d_model]. Keys and values that heads share are repeated for each head, here
        and in `OV`. Rotary embeddings are left out.
        """
        return self._matrix(self.W_Q, self._for_each_head(self.W_K).mT)

    @property
    def OV(self) -> FactoredMatrix:
        """The output-value circuit of each head: [layer, head, d_model, d_model]."""
        return self._matrix(self._for_each_head(self.W_V), self.W_O)

    def _for_each_head(self, grouped: Tensor) -> Tensor:
        """Key or value weights, repeated for each head of a group."""
        heads = _heads_of(self._points, 0)
        return grouped.repeat_interleave(heads // grouped.shape[1], 1)

    def all_head_labels(self) -> list[str]:
        """The labels L0H0, L0H1, …, in the order of `stack_head_results`."""
        layers = [layer for layer, block in enumerate(self._points.anatomy.blocks) if block.attn is not None]
        return [f"L{layer}H{head}" for layer in layers for head in range(_heads_of(self._points, layer))]

    def all_composition_scores(self, mode: Literal["Q", "K", "V"]) -> Float[Tensor, "layer head layer head"]:
        """The composition score of each head with the queries, keys or values of each head of a later layer.

        Weights of norms in between are ignored unless they are folded: `process_weights(fold_ln=True)`.
        """
        if mode not in ("Q", "K", "V"):
            raise HooklineError(f'mode must be "Q", "K" or "V", not {mode!r}')
        written = self.OV
        return all_scores(written, written if mode == "V" else self.QK if mode == "Q" else self.QK.T)

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """The sum of all biases that are added to the stream before `layer`, or before its MLP (`mlp_input`)."""
        blocks, row = self._points.anatomy.blocks, self._points.anatomy.main.architecture
        if layer not in range(len(blocks) + 1) or (mlp_input and layer == len(blocks)):
            raise HooklineError(f"layer {layer} is out of range: the model has {len(blocks)} layers")
        if any(block.ln1_post is not None or block.ln2_post is not None or block.cross is not None for block in blocks):
            raise HooklineError(
                f"{self._points.anatomy.kind} has norms or cross-attention between its biases and the stream, so what "
                f"they add is not constant; see cache.get_full_resid_decomposition"
            )
        biases = [
            weight(self._points, earlier_layer, "b_O")
            for earlier_layer in range(layer + (mlp_input and not row.parallel))
        ]
        if include_mlp_biases:
            biases += [bias for earlier_layer in range(layer) if (bias := self._bias_of_mlp(earlier_layer)) is not None]
        return torch.zeros_like(self.W_E[0]) + row.residual_factor * sum(biases)

    def _bias_of_mlp(self, layer: int) -> Tensor | None:
        """The output bias of an MLP; None if it has no bias at all, like most experts."""
        try:
            return weight(self._points, layer, "b_out")
        except HooklineError as error:
            block = self._points.anatomy.blocks[layer]
            mlp = block.mlp if block.mlp is not None else block.mlp_out
            if mlp is not None and any("bias" in name for name, _ in mlp.named_parameters()):
                raise HooklineError(f"no b_out in layer {layer} ({error}): pass include_mlp_biases=False") from error
            return None

    def token_ids(self, tokens: str | int | Sequence[str] | Sequence[int] | Tensor) -> Int[Tensor, "*some"]:
        """Token ids, from one token as text, from several, or from ids."""
        tokenizer, d_vocab = tokenizers.get(self._points.root), self.W_U.shape[-1]
        raw_ids: Any = single_token(tokenizer, tokens) if isinstance(tokens, str) else tokens
        if isinstance(raw_ids, list | tuple) and all(isinstance(token, str) for token in raw_ids):
            raw_ids = [single_token(tokenizer, token) for token in raw_ids]
        ids = torch.as_tensor(raw_ids, device=self.W_U.device)
        if ids.is_floating_point() or ids.dtype == torch.bool or bool((ids < 0).any() or (ids >= d_vocab).any()):
            raise HooklineError(
                f"tokens must be texts of one token each, or ids from 0 to {d_vocab - 1}, not {tokens!r}"
            )
        return ids

    def tokens_to_residual_directions(
        self, tokens: str | int | Sequence[str] | Sequence[int] | Tensor
    ) -> Float[Tensor, "*some d_model"]:
        """The unembedding of each token: the direction in the normalized stream that its logit is read from.

        The weight of the final norm is not included unless it is folded; `cache.logit_attrs` applies it.
        """
        return self.W_U.T[self.token_ids(tokens)]
