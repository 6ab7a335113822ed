"""Weights in the classic layout, whatever the layout inside the model: `W_Q` is [layer, head, d_model, d_head].

Of one layer, `model.blocks[5].attn.W_Q`, they are views of the model's own: writing into them changes the model. What
can be no view (zeros for a bias that is not there) refuses that. Stacked over layers they are plain copies.

A projection's weights are cut into heads by the lens of the point that its output is: what finds the queries in
a fused projection's output finds their weights too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hookline.engine.lenses import Chain, First, Lens
from hookline.errors import HooklineError
from hookline.text.forward_pass import tokenizers
from hookline.text.tokenizer import single_token
from hookline.transformer.architectures import is_parallel, residual_factor
from hookline.transformer.sites import head_counts
from hookline.weights.composition import all_scores
from hookline.weights.copies import copied, plain, shares_memory
from hookline.weights.factored import FactoredMatrix

if TYPE_CHECKING:
    from hookline.transformer.index import ModelPoints

_OF_HEADS = {"Q": "attn.hook_q", "K": "attn.hook_k", "V": "attn.hook_v", "O": "attn.hook_z"}
_OF_MLP = {"in": "mlp.hook_pre", "gate": "mlp.hook_pre", "out": "mlp.hook_post"}


def weight(points: ModelPoints, layer: int, name: str) -> Tensor:
    """`W_Q`, `b_in` and so on of one layer of the stack that the output comes from: a view of the model's own.

    Where it can be no view it is a `Copy`, which refuses to be written into.
    """
    found, own = weight_and_parameter(points, layer, name)
    where = f"{points.layer(layer)} of this model"
    if own is None:
        return copied(found, f"{where} has no {name}, and zeros stand for it")
    if shares_memory(found, own):
        return found
    return copied(found, f"{where} has {name} in a layout of which it is no view; write into model.module's parameters")


def weight_and_parameter(points: ModelPoints, layer: int, name: str) -> tuple[Tensor, Tensor | None]:
    """A weight as a plain tensor, and the parameter that it is all or part of; None where zeros stand for it."""
    kind, _, part = name.partition("_")
    if kind not in ("W", "b") or part not in {**_OF_HEADS, **_OF_MLP}:
        raise HooklineError(
            f"no weight is called {name!r}: there are W_Q, W_K, W_V, W_O, W_in, W_gate, W_out and b_Q, …"
        )
    module, lens = _of_heads(points, layer, part) if part in _OF_HEADS else (_of_mlp(points, layer, part), None)
    matrix, bias = linear(module)
    own: Any = module.weight if kind == "W" else bias
    found = matrix if kind == "W" else torch.zeros_like(matrix[0]) if bias is None else bias
    if part == "O" and kind == "W":
        return matrix.unflatten(0, (_heads_of(points, layer), -1)), own
    if lens is not None:
        found = lens.get(found).movedim(-2, 0) if kind == "W" else lens.get(found)
    return found, own


def _of_heads(points: ModelPoints, layer: int, part: str) -> tuple[nn.Module, Lens | None]:
    """A projection, and what cuts its output into heads."""
    site = points.find(f"{points.layer(layer)}.{_OF_HEADS[part]}").site
    return site.module, None if part == "O" else without_first(site.lens)


def _heads_of(points: ModelPoints, layer: int) -> int:
    block, config = points.anatomy.blocks[layer], points.anatomy.main.config
    assert block.attn is not None  # there is a z
    return head_counts(block.attn, config)[0]


def _of_mlp(points: ModelPoints, layer: int, part: str) -> nn.Module:
    prefix = points.layer(layer)
    is_gated = f"{prefix}.mlp.hook_pre_linear" in points.hook_dict
    if part == "gate" and not is_gated:
        raise HooklineError(f"the MLP of {prefix} has no gate: W_in and W_out are all")
    name = "mlp.hook_pre_linear" if part == "in" and is_gated else _OF_MLP[part]
    return points.find(f"{prefix}.{name}").site.module


def check_loaded(module: nn.Module) -> None:
    """Raise if accelerate offloads the weight of a module."""
    own: Any = getattr(module, "weight", None)
    if isinstance(own, Tensor) and own.is_meta and hasattr(module, "_hf_hook"):
        raise HooklineError(
            "the weights of this model are offloaded by accelerate, and are loaded only while a module runs: load the "
            "model without offloading (device_map=None, no cpu_offload) to read its matrices"
        )


def linear(module: nn.Module) -> tuple[Float[Tensor, "into out"], Float[Tensor, " out"] | None]:
    """The matrix and the bias of a linear map, so that the output is `x @ matrix + bias`."""
    own: Any = getattr(module, "weight", None)
    is_plain = isinstance(module, nn.Linear) or is_reversed(module)
    check_loaded(module)
    if not is_plain or type(own) is not nn.Parameter or own.is_meta:
        raise HooklineError(
            f"{type(module).__name__} is no plain linear map (an adapter, or quantised?): it has no one matrix to give"
        )
    bias: Any = getattr(module, "bias", None)
    return (own if is_reversed(module) else own.T), bias


def is_reversed(module: nn.Module) -> bool:
    """Whether a linear map keeps its weight as [into, out], as GPT-2's do."""
    return type(module).__name__ == "Conv1D"


def without_first(lens: Lens) -> Lens:
    """The lens without its first step, which finds the tensor in what a module gives."""
    if isinstance(lens, Chain) and isinstance(lens.lenses[0], First):
        return Chain(lens.lenses[1:])
    raise HooklineError("this projection's output is not cut into heads in a way that its weights could be")


class Weights:
    """The weights of a language model, stacked over its layers. A mixin: it needs the model's points."""

    _points: ModelPoints

    def _stacked(self, name: str) -> Tensor:
        layers = range(len(self._points.anatomy.blocks))
        return torch.stack([plain(weight(self._points, layer, name)) for layer in layers])

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The embeddings of all tokens, as the module has them; some models (Gemma) multiply them on the way out of it.

        What enters the stream is at `hook_embed`.
        """
        embed = self._points.anatomy.main.embed
        if not isinstance(embed, nn.Embedding):
            raise HooklineError(f"{type(embed).__name__} is no plain embedding: it has no one matrix to give")
        check_loaded(embed)
        return embed.weight

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """The embeddings of all positions, where they are added to the stream."""
        embed = self._points.anatomy.main.pos_embed
        if embed is None or not isinstance(getattr(embed, "weight", None), Tensor):
            raise HooklineError("this model adds no learned position embedding to the stream: it has no W_pos")
        return embed.weight[getattr(embed, "offset", 0) :]  # type: ignore[index]

    @property
    def W_E_pos(self) -> Float[Tensor, "d_vocab_and_n_ctx d_model"]:
        """The embeddings of all tokens, and then those of all positions."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding."""
        return linear(self._head())[0]

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """Its bias; zeros if it has none."""
        matrix, bias = linear(self._head())
        return copied(torch.zeros_like(matrix[0]), "the unembedding has no bias") if bias is None else bias

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
        """What each head's queries look for in its keys, as a bilinear form on the normed stream.

        [layer, head, d_model, d_model]: keys and values that heads share are there once for each of them, here and in
        `OV`; once for each group they are in `W_K` and `W_V`. What turns queries and keys with positions is not in it.
        """
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
    def b_gate(self) -> Float[Tensor, "layer d_mlp"]:
        """Of the way into the gate, of a gated MLP."""
        return self._stacked("b_gate")

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        """Of the way out."""
        return self._stacked("b_out")

    def all_head_labels(self) -> list[str]:
        """L0H0, L0H1, … as `stack_head_results` labels them."""
        layers = [layer for layer, block in enumerate(self._points.anatomy.blocks) if block.attn is not None]
        return [f"L{layer}H{head}" for layer in layers for head in range(_heads_of(self._points, layer))]

    def all_composition_scores(self, mode: Literal["Q", "K", "V"]) -> Float[Tensor, "layer head layer head"]:
        """How much each head of a later layer reads of what each head writes, into its queries, keys or values.

        Of the weights as they are: `process_weights(fold_ln=True)` puts in what the norms in between multiply with.
        """
        readers = {"Q": lambda: self.QK, "K": lambda: self.QK.T, "V": lambda: self.OV}
        if mode not in readers:
            raise HooklineError(f'mode is "Q", "K" or "V", not {mode!r}')
        return all_scores(self.OV, readers[mode]())

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """The sum of all biases that are added to the stream before `layer`, or before its MLP."""
        blocks, config = self._points.anatomy.blocks, self._points.anatomy.main.config
        if layer not in range(len(blocks) + 1) or (mlp_input and layer == len(blocks)):
            raise HooklineError(f"layer {layer}{', its MLP' if mlp_input else ''}: the model has {len(blocks)} layers")
        if any(block.ln1_post is not None or block.ln2_post is not None or block.cross is not None for block in blocks):
            raise HooklineError(
                f"{config.model_type} has norms or more attention between these biases and the stream: what they add "
                f"is the same nowhere; see cache.get_full_resid_decomposition"
            )
        found = [weight(self._points, each, "b_O") for each in range(layer + (mlp_input and not is_parallel(config)))]
        if include_mlp_biases:
            found += [bias for each in range(layer) if (bias := self._bias_of_mlp(each)) is not None]
        return torch.zeros_like(self.W_E[0]) + residual_factor(config) * sum(found)

    def _bias_of_mlp(self, layer: int) -> Tensor | None:
        """What the MLP of a layer adds whatever comes in; None where it has no bias at all, as most experts have."""
        try:
            return weight(self._points, layer, "b_out")
        except HooklineError as error:
            block = self._points.anatomy.blocks[layer]
            mlp = block.mlp if block.mlp is not None else block.mlp_out
            if mlp is not None and any("bias" in name for name, _ in mlp.named_parameters()):
                raise HooklineError(
                    f"accumulated_bias needs what the MLP of layer {layer} adds by its bias, and it has no one b_out: "
                    f"{error}. Pass include_mlp_biases=False"
                ) from error
            return None

    def token_ids(self, tokens: str | int | Sequence[str] | Tensor) -> Int[Tensor, "*some"]:
        """Ids, of text that is one token, of several such texts, or of ids themselves."""
        tokenizer, known = tokenizers.get(self._points.root), self.W_U.shape[-1]
        if isinstance(tokens, str):
            tokens = single_token(tokenizer, tokens)
        given: Any = tokens
        if isinstance(tokens, list | tuple) and all(isinstance(each, str) for each in tokens):
            given = [single_token(tokenizer, each) for each in tokens]
        ids = torch.as_tensor(given, device=self.W_U.device)
        if ids.is_floating_point() or ids.dtype == torch.bool or bool((ids < 0).any() or (ids >= known).any()):
            raise HooklineError(f"tokens are text that is one token, or ids from 0 to {known - 1}, not {tokens!r}")
        return ids

    def tokens_to_residual_directions(
        self, tokens: str | int | Sequence[str] | Tensor
    ) -> Float[Tensor, "*some d_model"]:
        """The unembedding of each token: the direction in the normed stream that its logit is read from.

        Before the final norm's weight is applied, unless it is folded: `cache.logit_attrs` does that.
        """
        return self.W_U.T[self.token_ids(tokens)]
