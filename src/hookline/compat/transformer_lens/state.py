"""A model's weights under TransformerLens's names and in its layout, to be read and written: `blocks.0.attn.W_Q`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.anatomy import variants
from hookline.anatomy.norms import norm_of
from hookline.errors import HooklineError
from hookline.weights import linear, weight, without_first

if TYPE_CHECKING:
    from hookline.anatomy.names import ModelPoints
    from hookline.compat.transformer_lens.hooked_transformer import HookedTransformer

_NOT_LEARNED = ("attn.mask", "attn.IGNORE", "attn.rotary_sin", "attn.rotary_cos", "attn.alibi")
"""What TransformerLens keeps beside its weights, that says nothing new."""


@dataclass(frozen=True)
class Entry:
    """A weight: a view of the model's own parameter, and what that is multiplied with and added to."""

    own: Tensor
    factor: float = 1.0
    offset: float = 0.0
    put: Callable[[Tensor], None] | None = None
    """How to write it, where it is no view: of a fused projection that has the heads' parts side by side."""

    @property
    def value(self) -> Tensor:
        """As TransformerLens has it."""
        is_same = self.factor == 1.0 and self.offset == 0.0
        return self.own if is_same else self.own * self.factor + self.offset

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter that this is a view of; None where the model has none, and zeros stand for it."""
        base = self.own if self.own._base is None else self.own._base
        return base if isinstance(base, nn.Parameter) else None


def weights_of(model: HookedTransformer, *, is_partial: bool = False) -> dict[str, Entry]:
    """All weights by name; `is_partial`, without those of MLPs that are no plain maps (mixtures of experts)."""
    return dict(_weights(model, is_partial))


def _weights(model: HookedTransformer, is_partial: bool) -> Iterator[tuple[str, Entry]]:
    anatomy = model._anatomy
    yield "embed.W_E", Entry(_embedding(anatomy.main.embed), embedding_factor(model))
    positions = position_embedding(model)
    if positions is not None:
        yield "pos_embed.W_pos", Entry(positions.weight[getattr(positions, "offset", 0) :])  # type: ignore[index]
    for layer in range(len(anatomy.blocks)):
        for name, entry in _of_layer(model, layer, is_partial):
            yield f"{model._points.layer(layer)}.{name}", entry
    yield from _of_norm(model, "ln_final", anatomy.main.ln_final)
    if anatomy.unembed is not None:
        yield "unembed.W_U", Entry(model.W_U)
        yield "unembed.b_U", Entry(model.b_U)


def _of_layer(model: HookedTransformer, layer: int, is_partial: bool) -> Iterator[tuple[str, Entry]]:
    points, block = model._points, model._anatomy.blocks[layer]
    for name in ("ln1", "ln1_post", "ln2", "ln2_post"):
        yield from _of_norm(model, name, getattr(block, name))
    is_grouped = model.cfg.n_key_value_heads is not None
    for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
        prefix = "_" if is_grouped and name[-1] in "KV" else ""
        yield f"attn.{prefix}{name}", _of_heads(points, layer, name)
    has_neurons = f"{points.layer(layer)}.mlp.hook_post" in points.hook_dict
    if (block.mlp is None and block.mlp_out is None) or (is_partial and not has_neurons):
        return
    for name in ("W_in", "b_in", "W_out", "b_out", *(("W_gate",) if model.cfg.gated_mlp else ())):
        yield f"mlp.{name}", Entry(weight(points, layer, name))
    if isinstance(inner := getattr(block.mlp, "ln", None), nn.Module):
        yield from _of_norm(model, "mlp.ln", inner)


def _of_heads(points: ModelPoints, layer: int, name: str) -> Entry:
    entry = Entry(weight(points, layer, name))
    if entry.parameter is not None or name[-1] == "O":
        return entry
    point = points.find(f"{points.layer(layer)}.attn.hook_{name[-1].lower()}")
    matrix, bias = linear(point.site.module)
    lens, whole = without_first(point.site.lens), matrix if name[0] == "W" else bias
    if whole is None:
        return entry

    def put(value: Tensor) -> None:
        whole.copy_(lens.put(whole.detach(), value.movedim(0, -2) if name[0] == "W" else value))

    return replace(entry, put=put)


def _of_norm(model: HookedTransformer, name: str, module: nn.Module | None) -> Iterator[tuple[str, Entry]]:
    """Nothing for a norm whose weights were folded into what reads it."""
    is_folded = (model.cfg.normalization_type or "").endswith("Pre") and not name.endswith("_post")
    own = getattr(module, "weight", None)
    if module is None or is_folded or not isinstance(own, Tensor):
        return
    norm = norm_of(module, own.shape[-1])
    yield f"{name}.w", Entry(own, offset=norm.offset if norm is not None else 0)
    if isinstance(bias := getattr(module, "bias", None), Tensor):
        yield f"{name}.b", Entry(bias)


def _embedding(module: nn.Module) -> Tensor:
    if not isinstance(module, nn.Embedding):
        raise HooklineError(f"{type(module).__name__} is no plain embedding: it has no one matrix to give")
    return module.weight


def embedding_factor(model: HookedTransformer) -> float:
    """What the embeddings of tokens are multiplied with, in their module or after it, before they enter the stream."""
    inside: Any = getattr(model._anatomy.main.embed, "embed_scale", 1.0)
    return float(inside) * variants.embedding_factor(model._anatomy.main.config)


def position_embedding(model: HookedTransformer) -> nn.Module | None:
    """What has the learned positions: added to the stream or, in a shortformer, read by queries and keys alone."""
    own = model._anatomy.main.pos_embed
    own = own if own is not None else getattr(model.module, "qk_pos_embed", None)
    return own if isinstance(getattr(own, "weight", None), Tensor) else None


@torch.no_grad()
def write(model: HookedTransformer, name: str, value: Tensor, known: dict[str, Entry] | None = None) -> None:
    """Give a weight other values."""
    known = weights_of(model) if known is None else known
    if name not in known:
        raise HooklineError(f"no weight is named {name!r}: there are {', '.join(map(repr, list(known)[:12]))}, …")
    entry = known[name]
    if value.shape != entry.own.shape:
        raise HooklineError(f"{name} has the shape {list(entry.own.shape)}, not {list(value.shape)}")
    if entry.put is not None:
        entry.put(value)
    elif entry.parameter is not None:
        entry.own.copy_((value - entry.offset) / entry.factor)
    elif bool(value.any()):
        raise HooklineError(f"{name} is not zero, but this model has no such weight")


def load(model: HookedTransformer, state: Mapping[str, Tensor], *, strict: bool) -> tuple[list[str], list[str]]:
    """Write all weights that are given; which are missing, and which are no weights of this model."""
    known = weights_of(model)
    given = {name: value for name, value in state.items() if not name.endswith(_NOT_LEARNED)}
    missing, unexpected = [name for name in known if name not in given], [name for name in given if name not in known]
    if strict and (missing or unexpected):
        raise HooklineError(f"these weights do not fit: missing {missing}, not of this model {unexpected}")
    _check_tied(known, given)
    if model.cfg.gated_mlp:
        given = _without_bias_after_gate(known, given)
    for name, value in given.items():
        if name in known:
            write(model, name, value, known)
    return missing, unexpected


def _without_bias_after_gate(known: dict[str, Entry], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """TransformerLens adds a gated MLP's `b_in` to the product of its branches: it goes through W_out into `b_out`."""
    new = dict(given)
    for name in [name for name in given if name.endswith("mlp.b_in") and name in known and bool(given[name].any())]:
        out, bias = name.replace("b_in", "W_out"), name.replace("b_in", "b_out")
        if known[name].parameter is None and out in given and bias in given:
            new[bias] = given[bias] + given[name] @ given[out]
            new[name] = torch.zeros_like(given[name])
    return new


def _check_tied(known: dict[str, Entry], given: Mapping[str, Tensor]) -> None:
    embed, unembed = known["embed.W_E"], known.get("unembed.W_U")
    if unembed is None or unembed.parameter is not embed.parameter or not {"embed.W_E", "unembed.W_U"} <= set(given):
        return
    if not torch.allclose(given["embed.W_E"].T / embed.factor, given["unembed.W_U"]):
        raise HooklineError("this model's unembedding is its embedding, but W_E and W_U here are not the same")


def named_parameters(model: HookedTransformer) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's own parameters; each that is one weight goes by that weight's name."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, entry in weights_of(model).items():
        if entry.parameter is not None:
            names.setdefault(entry.parameter, []).append(name)
    for own_name, parameter in model.module.named_parameters():
        found = names.get(parameter, [])
        is_tied = found == ["embed.W_E", "unembed.W_U"]
        yield found[0] if len(found) == 1 or is_tied else own_name, parameter
