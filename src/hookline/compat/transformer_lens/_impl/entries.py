"""A model's weights under TransformerLens's names and in its layout, `blocks.0.attn.W_Q`: listed, read, and loaded.

All parameters are in the list: those without a TransformerLens name have their own name in the model, such as
`model.layers.0.mlp.gate_proj.bias`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.weight_views import following, replace
from hookline.errors import HooklineError
from hookline.transformer.norms import norm_of
from hookline.weights.matrices import linear, weight_and_parameter, without_first
from hookline.weights.read_only import plain, shares_memory

if TYPE_CHECKING:
    from hookline.compat.transformer_lens._impl.hooked_transformer import HookedTransformer
    from hookline.transformer.index import ModelPoints


@dataclass(frozen=True)
class Entry:
    """A weight: a view of a parameter of the model, with a factor and an offset.

    Args:
        own: The view, in the layout of TransformerLens.
        parameter: The parameter that it is a view of; None if the model has none, and `own` is zeros.
        put: Writes the weight if it is not a view, as in a fused projection grouped by head.
    """

    own: Tensor
    parameter: Tensor | None
    factor: float = 1.0
    offset: float = 0.0
    put: Callable[[Tensor], None] | None = None

    @property
    def value(self) -> Tensor:
        """The value in TransformerLens's layout."""
        is_same = self.factor == 1.0 and self.offset == 0.0
        return self.own if is_same else self.own * self.factor + self.offset

    @property
    def is_view(self) -> bool:
        """Whether writing into `value` changes the model."""
        return self.parameter is not None and self.put is None and self.value is self.own

    @property
    def is_the_parameter(self) -> bool:
        """Whether it has the same layout as the parameter; a bias may be split into heads."""
        weight, parameter = self.own, self.parameter
        if parameter is None or not self.is_view:
            return False
        return weight is parameter or (
            parameter.ndim == 1 and weight.is_contiguous() and weight.numel() == parameter.numel()
        )

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Overwrite the weight, which is called `name` in errors."""
        if value.shape != self.own.shape:
            raise HooklineError(f"{name} has shape {list(self.own.shape)}, not {list(value.shape)}")
        if self.put is not None:
            self.put(value)
        elif self.parameter is not None:
            self.own.copy_((value - self.offset) / self.factor)
        elif bool(value.any()):
            raise HooklineError(f"{name} is not zero, but this model has no such weight")

    def snapshot(self, path: str) -> Tensor:
        """The value for a state dict: it shares the memory of the weight until that gets another one."""
        value = self.value.detach()
        return following(value, self.parameter, path) if self.is_view and self.parameter is not None else value

    def assign(self, model: nn.Module, path: str, value: Tensor) -> None:
        """Put another weight in place of this one, which keeps its values for whoever has it."""
        weight, parameter = self.own, self.parameter
        if not self.is_view or parameter is None or value.shape != weight.shape:
            self.write(path, value)
        elif weight is not parameter:
            replace(parameter, weight, value, path, is_same_weight=False)
        else:
            new = value
            if type(value) is not nn.Parameter or (value.dtype, value.device) != (weight.dtype, weight.device):
                new = nn.Parameter(torch.empty_like(weight), requires_grad=weight.requires_grad)
                new.data.copy_(value.detach())
            for module in model.modules():
                for name in [name for name, candidate in module._parameters.items() if candidate is weight]:
                    module._parameters[name] = new  # type: ignore[assignment]


def weights_of(model: HookedTransformer) -> dict[str, Entry]:
    """All weights by name, except weights of norms that are folded."""
    is_folded = (model.cfg.normalization_type or "").endswith("Pre")
    return {name: entry for name, entry in all_entries(model).items() if not (is_folded and _is_neutral(name, entry))}


def all_entries(model: HookedTransformer) -> dict[str, Entry]:
    """All weights by name."""
    entries = dict(_before_layers(model))
    for layer in range(len(model.anatomy.blocks)):
        entries |= {f"{model.index.layer(layer)}.{name}": entry for name, entry in _of_layer(model, layer)}
    entries |= _after_layers(model)
    return entries | {name: Entry(tensor, tensor) for name, tensor in _left_over(model, entries)}


def find_entry(model: HookedTransformer, name: str) -> Entry | None:
    """The weight of that name; None if there is none."""
    stack, _, rest = name.partition(".")
    if stack != "blocks":
        return dict([*_before_layers(model), *_after_layers(model)]).get(name)
    layer, _, last = rest.partition(".")
    return dict(_of_layer(model, int(layer))).get(last)


def _is_neutral(name: str, entry: Entry) -> bool:
    """Whether this is the gain 1 or the bias 0 of a folded norm."""
    is_norm = name.rpartition(".")[0].endswith(("ln1", "ln2", "ln_final", "mlp.ln"))
    return is_norm and bool((entry.value == (1 if name.endswith(".w") else 0)).all())


def _before_layers(model: HookedTransformer) -> Iterator[tuple[str, Entry]]:
    anatomy = model.anatomy
    if not isinstance(anatomy.main.embed, nn.Embedding):
        raise HooklineError(f"{type(anatomy.main.embed).__name__} is not a plain embedding and has no single matrix")
    embedding, inside = anatomy.main.embed.weight, getattr(anatomy.main.embed, "embed_scale", 1.0)
    yield "embed.W_E", Entry(embedding, embedding, float(inside) * anatomy.main.architecture.embedding_factor)
    yield from _of_norm("embed.ln", getattr(anatomy.main.embed, "ln", None) or anatomy.main.embed_norm)
    positions: Any = positions_of(model)
    if isinstance(matrix := getattr(positions, "weight", None), Tensor):
        first = getattr(positions, "offset", 0)
        yield "pos_embed.W_pos", Entry(matrix[first:] if first else matrix, matrix)


def positions_of(model: HookedTransformer) -> nn.Module | None:
    """The module of learned positions; a shortformer's, which adds them to queries and keys, too."""
    pos_embed = model.anatomy.main.pos_embed
    return getattr(model.module, "qk_pos_embed", None) if pos_embed is None else pos_embed


def _after_layers(model: HookedTransformer) -> Iterator[tuple[str, Entry]]:
    anatomy = model.anatomy
    yield from _of_norm("ln_final", anatomy.main.ln_final)
    if anatomy.unembed is not None:
        matrix, bias = linear(anatomy.unembed)
        yield "unembed.W_U", Entry(matrix, anatomy.unembed.weight)  # type: ignore[arg-type]
        yield "unembed.b_U", Entry(plain(model.b_U), bias)


def _of_layer(model: HookedTransformer, layer: int) -> Iterator[tuple[str, Entry]]:
    points, block = model.index, model.anatomy.blocks[layer]
    for name in ("ln1", "ln1_post", "ln2", "ln2_post"):
        yield from _of_norm(name, getattr(block, name))
    is_grouped = model.cfg.n_key_value_heads is not None
    for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
        prefix = "_" if is_grouped and name[-1] in "KV" else ""
        yield from _of_map(points, layer, name, f"attn.{prefix}{name}")
    for name in ("q_norm", "k_norm"):
        yield from _of_norm(f"attn.{name}", getattr(block.attn, name, None))
    if block.mlp is None and block.mlp_out is None:
        return
    for name in ("W_in", "b_in", "W_out", "b_out", *(("W_gate",) if model.cfg.gated_mlp else ())):
        yield from _of_map(points, layer, name, f"mlp.{name}")
    yield from _of_norm("mlp.ln", getattr(block.mlp, "ln", None))


def _of_map(points: ModelPoints, layer: int, name: str, path: str) -> Iterator[tuple[str, Entry]]:
    """The weight of that name, if it exists: a mixture of experts or a fused gate has none."""
    try:
        weight, parameter = weight_and_parameter(points, layer, name)
    except HooklineError:
        return
    if parameter is None or shares_memory(weight, parameter):
        yield path, Entry(weight, parameter)
        return
    site = points.find(f"{points.layer(layer)}.attn.hook_{name[-1].lower()}").site
    lens = without_first(site.lens)
    matrix, bias = linear(site.module)

    def put(value: Tensor) -> None:
        whole = matrix if name[0] == "W" or bias is None else bias
        whole.copy_(lens.put(whole.detach(), value.movedim(0, -2) if name[0] == "W" else value))

    yield path, Entry(weight, parameter, put=put)


def _of_norm(name: str, module: Any) -> Iterator[tuple[str, Entry]]:
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Module) or not isinstance(weight, nn.Parameter):
        return
    norm = norm_of(module, weight.shape[-1])
    yield f"{name}.w", Entry(weight, weight, offset=norm.offset if norm is not None else 0)
    if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
        yield f"{name}.b", Entry(bias, bias)


def _left_over(model: HookedTransformer, entries: dict[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    """Parameters that no weight covers: biases of gates, experts, OPT's padding positions."""
    covered: dict[tuple[int, int], int] = {}
    for entry in entries.values():
        if entry.parameter is not None:
            place = _place(entry.parameter)
            covered[place] = covered.get(place, 0) + entry.own.numel()
    for name, tensor in stored(model.module):
        if covered.get(_place(tensor), 0) < tensor.numel():
            covered[_place(tensor)] = tensor.numel()
            yield name, tensor


def _place(tensor: Tensor) -> tuple[int, int]:
    """The memory of a tensor, which is the same for tied tensors."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def stored(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and persistent buffers of the model, by its own names."""
    return [(name, tensor) for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)]


NOT_LEARNED = ("attn.mask", "attn.IGNORE", "attn.rotary_sin", "attn.rotary_cos", "attn.alibi")
"""Redundant entries of TransformerLens's state dicts."""


def redundant_buffers(names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """What TransformerLens requires in a state dict for each attention: an empty mask, and the score of masked keys."""
    paths = [name.removesuffix("W_O") for name in names if name.endswith(".attn.W_O")]
    masks = {f"{path}mask": torch.empty(0, 0, dtype=torch.bool, device=device) for path in paths}
    return masks | {f"{path}IGNORE": torch.tensor(-torch.inf, device=device) for path in paths}


def load(model: HookedTransformer, state: Mapping[str, Tensor], *, strict: bool) -> tuple[list[str], list[str]]:
    """Load all given weights, and return the missing and the unexpected names.

    A weight may also have its parameter's own name in the model.
    """
    model_entries = {name: Entry(tensor, tensor) for name, tensor in stored(model.module)}
    entries = model_entries | all_entries(model)
    weights = {name: value for name, value in state.items() if not _is_unused(model, name)}
    covered = {id(model_entries[name].parameter) for name in weights if name in model_entries}
    if "pos_embed.W_pos" in weights and "pos_embed.W_pos" in entries:  # the rest of the parameter is for padding
        covered.add(id(entries["pos_embed.W_pos"].parameter))
    missing = [n for n, entry in weights_of(model).items() if n not in weights and id(entry.parameter) not in covered]
    unexpected = [name for name in weights if name not in entries]
    if strict and (missing or unexpected):
        raise HooklineError(f"weights do not match: missing {missing}, unexpected {unexpected}")
    _check_tied(entries, weights)
    if model.cfg.gated_mlp:
        weights = _without_bias_after_gate(entries, weights)
    of_model = [name for name in weights if name in model_entries]  # first, since others may be parts of them
    for name in (*of_model, *(name for name in weights if name in entries and name not in model_entries)):
        entries[name].write(name, weights[name])
    return missing, unexpected


def _is_unused(model: HookedTransformer, name: str) -> bool:
    """Whether TransformerLens does not use this entry of a state dict: a buffer, or the positions of an ALiBi model."""
    is_unread = model.cfg.positional_embedding_type == "alibi" and name == "pos_embed.W_pos"
    return name.endswith(NOT_LEARNED) or is_unread


def _without_bias_after_gate(entries: dict[str, Entry], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move `b_in` of gated MLPs into `b_out`: TransformerLens adds it to the product of both branches, before W_out."""
    new = dict(weights)
    for name in [
        name for name in weights if name.endswith("mlp.b_in") and name in entries and bool(weights[name].any())
    ]:
        out, bias = name.replace("b_in", "W_out"), name.replace("b_in", "b_out")
        if entries[name].parameter is None and out in weights and bias in weights:
            new[bias] = weights[bias] + weights[name] @ weights[out]
            new[name] = torch.zeros_like(weights[name])
    return new


def _check_tied(entries: dict[str, Entry], weights: Mapping[str, Tensor]) -> None:
    embed, unembed = entries["embed.W_E"], entries.get("unembed.W_U")
    if unembed is None or unembed.parameter is not embed.parameter or not {"embed.W_E", "unembed.W_U"} <= set(weights):
        return
    if not torch.allclose(weights["embed.W_E"].T / embed.factor, weights["unembed.W_U"]):
        raise HooklineError("the embedding and unembedding of this model are tied, but W_E and W_U differ")


def named_parameters(model: HookedTransformer, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's own parameters, with the TransformerLens name of those that have the same layout there."""
    names: dict[int, list[str]] = {}
    for name, entry in all_entries(model).items():
        if entry.is_the_parameter:
            names.setdefault(id(entry.parameter), []).append(name)
    for own_name, parameter in model.module.named_parameters(remove_duplicate=remove_duplicate):
        yield names.get(id(parameter), [own_name])[0], parameter
