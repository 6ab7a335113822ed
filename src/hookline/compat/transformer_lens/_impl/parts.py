"""The components of TransformerLens: `model.blocks[0].attn.W_Q`, `model.unembed(model.ln_final(x))`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.entries import find_entry, positions_of
from hookline.compat.transformer_lens._impl.weight_views import weight_view
from hookline.engine import Delegate
from hookline.errors import HooklineError
from hookline.transformer.norms import norm_of
from hookline.weights.attribute_access import follow
from hookline.weights.matrices import weight
from hookline.weights.read_only import ReadOnlyTensor, plain, read_only

if TYPE_CHECKING:
    from hookline.compat.transformer_lens._impl.hooked_transformer import HookedTransformer


class Part(Delegate):
    """A component of the model: its points and weights are attributes, and it can be called on its own.

    It is an nn.Module that shares all state with the module of the model that it wraps. Modules can be attached
    to it: see `attaching.py`.
    """

    _model: HookedTransformer

    def __init__(self, model: HookedTransformer, path: str = "", module: nn.Module | None = None) -> None:
        if not path:
            kind = type(self).__name__
            raise HooklineError(f"{kind} is a part of a model: make HookedTransformer(cfg), and use its blocks[0]")
        super().__init__(nn.Module() if module is None else module)
        vars(self).update(_model=model, _path=path, _module=module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attached = self._model._attached
        if (module := attached.get(f"{self._path}.{name}")) is not None:
            return module
        if name.startswith("hook_"):
            return follow(self._model.index, f"{self._path}.{name}")
        if name[:2] in ("W_", "b_", "_W", "_b") or name in ("w", "b"):
            return self._weight(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"{self._path} has no {name!r}") from None

    def _weight(self, name: str) -> Tensor:
        """A view of the model's parameter; if that is impossible, a read-only copy that says how to change it."""
        entry = find_entry(self._model, f"{self._path}.{name}")
        if entry is None:
            raise AttributeError(f"{self._path} has no {name!r}")
        if entry.parameter is None:
            return read_only(entry.value, f"this model has no {self._path}.{name.lstrip('_')}, so this is all zeros")
        if entry.is_view:
            return weight_view(entry.own, entry.parameter, f"{self._path}.{name}")
        return read_only(entry.value, f"the model has it in another form; assign it instead: {self._short}.{name} = …")

    def __setattr__(self, name: str, value: Any) -> None:
        """Overwrite a weight, attach a module, or replace `forward`."""
        if isinstance(value, nn.Module) or name == "forward":
            self._model._attached.put(f"{self._path}.{name}", value)
            return
        entry = find_entry(self._model, f"{self._path}.{name}")
        grouped = find_entry(self._model, f"{self._path}._{name}")
        if grouped is not None:
            shape = list(grouped.own.shape)
            raise HooklineError(f"heads share {name}, and each group of them has one: assign _{name}, {shape}")
        if entry is None:
            raise HooklineError(f"{self._path}.{name} is not a weight of this model and cannot be assigned")
        entry.assign(self._model.module, f"{self._path}.{name}", value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __delattr__(self, name: str) -> None:
        self._model._attached.remove(f"{self._path}.{name}")

    @property
    def name(self) -> str:
        """Its path, as TransformerLens sets it on every module: `blocks.0.ln1`."""
        return self._path

    @property
    def _short(self) -> str:
        """Its path in code: model.blocks[0].attn."""
        return "model." + re.sub(r"\.(\d+)", r"[\1]", self._path)

    @property
    def _layer(self) -> int:
        return int(self._path.split(".")[1])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the component, with hooks."""
        forward = self._model._attached.forwards.get(self._path, self.forward)
        return forward(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the module for `x`, with hooks; of its own code, if another module is in its place."""
        if self._module is None:
            raise HooklineError(f"no single module of this model corresponds to {self._path}: it cannot be called")
        return self._model._attached.own_forward(self._module)(x)

    def __repr__(self) -> str:
        return f"{self._path} ({type(self._module).__name__})"


class Embed(Part):
    """The token embedding."""

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The embeddings of these tokens, as they enter the stream."""
        stack = self._model.anatomy.main
        embeddings = super().forward(tokens)
        embeddings = embeddings if stack.embed_norm is None else stack.embed_norm(embeddings)
        return embeddings * stack.architecture.embedding_factor


class PosEmbed(Part):
    """The learned position embedding."""

    def forward(
        self, tokens: Int[Tensor, "batch pos"], past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The position embeddings of these tokens; padding does not count, and has zeros."""
        places = torch.arange(past_kv_pos_offset, past_kv_pos_offset + tokens.shape[1]).expand(tokens.shape)
        if attention_mask is None:
            return self.W_pos[places.to(self.W_pos.device)]
        places = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, past_kv_pos_offset:].to(self.W_pos.device)
        return self.W_pos[places] * attention_mask[:, past_kv_pos_offset:, None].to(self.W_pos)


class Unembed(Part):
    """The unembedding."""


class LayerNorm(Part):
    """A norm. Without a weight its `w` is ones, and without a bias its `b` is zeros."""

    def _weight(self, name: str) -> Tensor:
        if name not in ("w", "b") or find_entry(self._model, f"{self._path}.{name}") is not None:
            return super()._weight(name)
        width, value = self._model.anatomy.width, float(name == "w")
        if norm_of(self._module, width) is None:
            raise HooklineError(f"{self._path} is not a norm of a known form, and has no w and b")
        constant = torch.full((width,), value, device=self._model.device)
        return read_only(constant, f"this model has no {self._path}.{name}, so this is a constant {value:g}")


class LayerNormPre(LayerNorm):
    """A norm whose weights are folded into those that follow."""


class RMSNorm(LayerNorm):
    """A norm that does not subtract the mean."""


class RMSNormPre(RMSNorm):
    """A norm that does not subtract the mean, with its weights folded."""


class AbstractAttention(Part):
    """The attention of a layer."""

    def _weight(self, name: str) -> Tensor:
        if find_entry(self._model, f"{self._path}._{name}") is None:
            return super()._weight(name)
        group_weight = super()._weight(f"_{name}")
        why = f"heads share {name}, which is repeated for each here; write into {self._short}._{name}, the groups' own"
        repeated = plain(group_weight).repeat_interleave(self._model.cfg.n_heads // len(group_weight), 0)
        return read_only(repeated, group_weight.why if isinstance(group_weight, ReadOnlyTensor) else why)

    @property
    def attn_type(self) -> str:
        """`local` for a sliding window, else `global`."""
        kinds = self._model.cfg.attn_types
        return kinds[self._layer] if kinds else "global"

    @property
    def mask(self) -> Tensor:
        """An empty tensor, as in TransformerLens 3.5: the model makes its own mask for each input."""
        return torch.empty(0, 0, dtype=torch.bool, device=self._model.device)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "mask" or not torch.equal(value, self.mask):
            super().__setattr__(name, value)

    @property
    def OV(self) -> Any:  # noqa: N802
        """The OV circuit of each head."""
        return self._model.OV[self._layer]

    @property
    def QK(self) -> Any:  # noqa: N802
        """The QK circuit of each head."""
        return self._model.QK[self._layer]

    def forward(  # type: ignore[override]
        self,
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        past_kv_cache_entry: None = None,
        additive_attention_mask: None = None,
        attention_mask: Tensor | None = None,
        position_bias: None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The output of attention for normalized inputs, shared by all heads or one per head."""
        if (past_kv_cache_entry, additive_attention_mask, position_bias) != (None, None, None):
            raise HooklineError("a part of a model takes no cache, additive mask or bias: run the model with them")
        model, layer, outputs = self._model, self._layer, []
        inputs = {"q": query_input, "k": key_input, "v": value_input}
        projections = {name: self._projected(name, x) for name, x in inputs.items()}
        fwd_hooks: list[Any] = [
            (f"{self._path}.hook_{name}", lambda _, hook: projections[hook.name.rpartition("_")[2]])
            for name in projections
        ]
        fwd_hooks.append((model.anatomy.blocks[layer].o, lambda x: outputs.append(x)))
        rows, width = query_input.shape[:2], model.anatomy.width
        stream = query_input.new_zeros(*rows, width)
        model.run_with_hooks(
            stream, start_at_layer=layer, stop_at_layer=layer + 1, attention_mask=attention_mask, fwd_hooks=fwd_hooks
        )
        return outputs[0]

    def _projected(self, name: str, x: Tensor) -> Tensor:
        matrix, bias = (weight(self._model.index, self._layer, f"{kind}_{name.upper()}") for kind in "Wb")
        axes = "bphd" if x.ndim == 4 else "bpd"
        return torch.einsum(f"{axes},hde->bphe", x, matrix) + bias


class Attention(AbstractAttention):
    """Attention with keys and values for each head."""


class GroupedQueryAttention(AbstractAttention):
    """Attention with heads that share keys and values."""


class CanBeUsedAsMLP(Part):
    """The MLP of a layer."""

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The output for the normalized stream."""
        kind = self._model.anatomy.kind
        if self._model.anatomy.architecture.residual_in_mlp:
            raise HooklineError(f"the MLP of {kind} adds the residual itself, and cannot be called on its own")
        return super().forward(x)


class MLP(CanBeUsedAsMLP):
    """An MLP without a gate."""


class GatedMLP(CanBeUsedAsMLP):
    """An MLP with a gate."""


_NORMS: dict[str | None, type[LayerNorm]] = {"LNPre": LayerNormPre, "RMS": RMSNorm, "RMSPre": RMSNormPre}


def _kind_of(cfg: Any, name: str) -> type[Part]:
    """The class of a component, which depends on the model."""
    if name == "attn":
        return Attention if cfg.n_key_value_heads is None else GroupedQueryAttention
    if name == "mlp":
        return GatedMLP if cfg.gated_mlp else MLP
    return _NORMS.get(cfg.normalization_type, LayerNorm)


_OF_BLOCK = ("attn", "mlp", "ln1", "ln2", "ln1_post", "ln2_post")


class TransformerBlock(Part):
    """A layer."""

    def __getattr__(self, name: str) -> Any:
        if (module := self._model._attached.get(f"{self._path}.{name}")) is not None:
            return module
        if name in _OF_BLOCK:
            return self.part(name)
        return super().__getattr__(name)

    def part(self, name: str) -> Part:
        """The component of that name, even if another module is in its place."""
        block = self._model.anatomy.blocks[self._layer]
        module = getattr(block, name)
        if module is None and not (name == "mlp" and block.mlp_out is not None):
            raise AttributeError(f"{self._path} has no {name!r}")
        return _kind_of(self._model.cfg, name)(self._model, f"{self._path}.{name}", module)

    def forward(self, resid_pre: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The output stream of the layer for an input stream."""
        layers = {"start_at_layer": self._layer, "stop_at_layer": self._layer + 1}
        return self._model(resid_pre, attention_mask=attention_mask, **layers)


def parts_of(model: HookedTransformer) -> dict[str, Any]:
    """The top-level components, by attribute name."""
    anatomy = model.anatomy
    modules: dict[str, tuple[type[Part], nn.Module | None]] = {
        "embed": (Embed, anatomy.main.embed),
        "pos_embed": (PosEmbed, positions_of(model)),
        "ln_final": (_kind_of(model.cfg, "ln_final"), anatomy.main.ln_final),
        "unembed": (Unembed, anatomy.unembed),
    }
    parts = {name: kind(model, name, module) for name, (kind, module) in modules.items() if module is not None}
    layers = enumerate(anatomy.blocks)
    return parts | {
        "blocks": nn.ModuleList(
            TransformerBlock(model, model.index.layer(layer), block.module) for layer, block in layers
        )
    }
