"""The components of TransformerLens: `model.blocks[0].attn.W_Q`, `model.unembed(model.ln_final(x))`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hookline.compat.transformer_lens.state import write
from hookline.errors import HooklineError
from hookline.transformer.architectures import architecture, embedding_factor
from hookline.transformer.norms import norm_of
from hookline.weights.attribute_access import follow
from hookline.weights.copies import Copy, copied, plain, shares_memory
from hookline.weights.matrices import weight, weight_and_parameter

if TYPE_CHECKING:
    from hookline.compat.transformer_lens.hooked_transformer import HookedTransformer


class Part:
    """A component of the model: its points are attributes, and it can be called on its own."""

    def __init__(self, model: HookedTransformer, path: str, module: nn.Module | None = None) -> None:
        vars(self).update(_model=model, _path=path, _module=module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("hook_"):
            return follow(self._model._points, f"{self._path}.{name}")
        return self._weight(name)

    def _weight(self, name: str) -> Tensor:
        raise AttributeError(f"{self._path} has no {name!r}")

    def __setattr__(self, name: str, value: Tensor) -> None:
        """Overwrite a weight."""
        target = getattr(self, name)
        if not isinstance(target, Tensor):
            raise HooklineError(f"{self._path}.{name} is not a weight and cannot be assigned")
        write(self._model, f"{self._path}.{name}", value)

    def _of_layer(self, name: str) -> Tensor:
        """A view of the model's parameter; if that is impossible, a read-only copy that says how to change it."""
        found, own = weight_and_parameter(self._model._points, int(self._path.split(".")[1]), name)
        if own is None:
            return copied(found, f"this model has no {self._path}.{name}, and zeros stand for it")
        if shares_memory(found, own):
            return found
        return copied(found, f"the model has {name} in another layout, so this is a copy; {self._assign(name)}")

    def _assign(self, name: str) -> str:
        return f"assign it instead: {self._short}.{name} = …"

    @property
    def _short(self) -> str:
        """Its path: model.blocks[0].attn."""
        return "model." + re.sub(r"\.(\d+)", r"[\1]", self._path)

    def __call__(self, x: Tensor) -> Tensor:
        """The output of the module for `x`, with hooks."""
        if self._module is None:
            raise HooklineError(f"no single module of this model corresponds to {self._path}: it cannot be called")
        return self._module(x)

    def __repr__(self) -> str:
        return f"{self._path} ({type(self._module).__name__})"


class Embed(Part):
    """The token embedding."""

    def __call__(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The embeddings of these tokens, as they enter the stream."""
        stack = self._model._anatomy.main
        found = super().__call__(tokens)
        found = found if stack.embed_norm is None else stack.embed_norm(found)
        return found * embedding_factor(stack.config)

    @property
    def W_E(self) -> Tensor:  # noqa: N802
        """One row per token."""
        return self._model.W_E


class PosEmbed(Part):
    """The position embedding, if it is added to the stream."""

    def __call__(
        self, tokens: Int[Tensor, "batch pos"], past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The position embeddings of these tokens; left padding does not count."""
        places = torch.arange(past_kv_pos_offset, past_kv_pos_offset + tokens.shape[1]).expand(tokens.shape)
        if attention_mask is not None:
            places = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, past_kv_pos_offset:]
        return self.W_pos[places.to(self.W_pos.device)]

    @property
    def W_pos(self) -> Tensor:  # noqa: N802
        """One row per position."""
        return self._model.W_pos


class Unembed(Part):
    """The unembedding, without a soft cap or factor that follows it."""

    @property
    def W_U(self) -> Tensor:  # noqa: N802
        """One column per token."""
        return self._model.W_U

    @property
    def b_U(self) -> Tensor:  # noqa: N802
        """The bias; zeros if there is none."""
        return self._model.b_U


class LayerNorm(Part):
    """A norm."""

    @property
    def w(self) -> Tensor:
        """The gain of the norm; ones if it has none."""
        norm = self._norm()
        own = getattr(self._module, "weight", None)
        if own is None or not norm.offset:
            return self._or(own, 1.0, "w")
        return copied(norm.gain, f"{self._path}.w is the model's weight plus {norm.offset}; {self._assign('w')}")

    @property
    def b(self) -> Tensor:
        """The bias of the norm; zeros if it has none."""
        return self._or(getattr(self._norm().module, "bias", None), 0.0, "b")

    def _norm(self) -> Any:
        norm = norm_of(self._module, self._model._anatomy.width)
        if norm is None:
            raise HooklineError(f"{self._path} is not a norm of a known form, and has no w and b")
        return norm

    def _or(self, own: Tensor | None, value: float, name: str) -> Tensor:
        if own is not None:
            return own
        filled = torch.full((self._model._anatomy.width,), value, device=self._model._device)
        return copied(filled, f"this model has no {self._path}.{name}, so this is a constant {value:g}")


class Attention(Part):
    """The attention of a layer."""

    def _weight(self, name: str) -> Tensor:
        if not _is_weight(name):
            return super()._weight(name)
        own, n_heads = self._of_layer(name.removeprefix("_")), self._model.cfg.n_heads
        if name not in ("W_K", "W_V", "b_K", "b_V") or len(own) == n_heads:
            return own
        why = f"heads share {name}, which is repeated for each here; write into {self._short}._{name}, the groups' own"
        return copied(plain(own).repeat_interleave(n_heads // len(own), 0), own.why if isinstance(own, Copy) else why)

    @property
    def _layer(self) -> int:
        return int(self._path.split(".")[1])

    @property
    def OV(self) -> Any:  # noqa: N802
        """The OV circuit of each head."""
        return self._model.OV[self._layer]

    @property
    def QK(self) -> Any:  # noqa: N802
        """The QK circuit of each head."""
        return self._model.QK[self._layer]

    def __call__(  # type: ignore[override]
        self, query_input: Tensor, key_input: Tensor, value_input: Tensor, *, attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The output of attention for normalized inputs, shared by all heads or one per head."""
        model, layer, found = self._model, self._layer, []
        inputs = {"q": query_input, "k": key_input, "v": value_input}
        own = {name: self._projected(name, x) for name, x in inputs.items()}
        fwd_hooks: list[Any] = [
            (f"{self._path}.hook_{name}", lambda _, hook: own[hook.name.rpartition("_")[2]]) for name in own
        ]
        fwd_hooks.append((model._anatomy.blocks[layer].o, lambda x: found.append(x)))
        rows, width = query_input.shape[:2], model._anatomy.width
        stream = query_input.new_zeros(*rows, width)
        model.run_with_hooks(
            stream, start_at_layer=layer, stop_at_layer=layer + 1, attention_mask=attention_mask, fwd_hooks=fwd_hooks
        )
        return found[0]

    def _projected(self, name: str, x: Tensor) -> Tensor:
        matrix, bias = (weight(self._model._points, self._layer, f"{kind}_{name.upper()}") for kind in "Wb")
        axes = "bphd" if x.ndim == 4 else "bpd"
        return torch.einsum(f"{axes},hde->bphe", x, matrix) + bias


class MLP(Part):
    """The MLP of a layer."""

    def _weight(self, name: str) -> Tensor:
        return self._of_layer(name) if _is_weight(name) else super()._weight(name)

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The output for the normalized stream."""
        kind = self._model._anatomy.kind
        if architecture(kind).residual_in_mlp:
            raise HooklineError(f"the MLP of {kind} adds the residual itself, and cannot be called on its own")
        return super().__call__(x)


class Block(Part):
    """A layer."""

    def __getattr__(self, name: str) -> Any:
        found = self._model._anatomy.blocks[int(self._path.split(".")[1])]
        path = f"{self._path}.{name}"
        if name == "attn":
            return Attention(self._model, path, found.attn)
        if name == "mlp" and (found.mlp or found.mlp_out) is not None:
            return MLP(self._model, path, found.mlp)
        if name in ("ln1", "ln2", "ln1_post", "ln2_post") and getattr(found, name) is not None:
            return LayerNorm(self._model, path, getattr(found, name))
        return super().__getattr__(name)

    def __call__(self, resid_pre: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The output stream of the layer for an input stream."""
        layer = int(self._path.split(".")[1])
        return self._model(resid_pre, start_at_layer=layer, stop_at_layer=layer + 1, attention_mask=attention_mask)


class Blocks:
    """All layers."""

    def __init__(self, model: HookedTransformer) -> None:
        self._model = model

    def __len__(self) -> int:
        return len(self._model._anatomy.blocks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if index not in range(-len(self), len(self)):
            raise IndexError(f"blocks[{index}] is out of range: the model has {len(self)} layers")
        layer = index % len(self)
        return Block(self._model, self._model._points.layer(layer), self._model._anatomy.blocks[layer].module)

    def __iter__(self) -> Iterator[Block]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"blocks: {len(self)} layers"


def _is_weight(name: str) -> bool:
    return name.removeprefix("_").startswith(("W_", "b_"))


def parts_of(model: HookedTransformer) -> dict[str, Any]:
    """The top-level components, by attribute name."""
    anatomy = model._anatomy
    parts: dict[str, Any] = {"embed": Embed(model, "embed", anatomy.main.embed), "blocks": Blocks(model)}
    if anatomy.main.pos_embed is not None:
        parts["pos_embed"] = PosEmbed(model, "pos_embed", anatomy.main.pos_embed)
    if anatomy.main.ln_final is not None:
        parts["ln_final"] = LayerNorm(model, "ln_final", anatomy.main.ln_final)
    if anatomy.unembed is not None:
        parts["unembed"] = Unembed(model, "unembed", anatomy.unembed)
    return parts
