"""The weights of a HookedTransformer by the names and in the layout of TransformerLens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl import entries
from hookline.compat.transformer_lens._impl.module_methods import LensModule
from hookline.compat.transformer_lens._impl.moving import LensMoves
from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig
from hookline.compat.transformer_lens.FactoredMatrix import FactoredMatrix
from hookline.errors import HooklineError
from hookline.weights.matrices import Weights


class LensMatrices(Weights):
    """The weights of a HookedTransformer, with one key and value matrix per head even if heads share them."""

    _matrix = FactoredMatrix

    def __init__(self, model: Any) -> None:
        super().__init__(model.index)
        self._model = model

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:  # noqa: N802
        """The embedding of each token, multiplied with any factor that follows it in the model."""
        return self._model.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:  # noqa: N802
        """The learned positions; a shortformer's too."""
        entry = entries.find_entry(self._model, "pos_embed.W_pos")
        return super().W_pos if entry is None else entry.own

    def _stacked(self, name: str) -> Any:
        """A weight of all layers, with keys and values repeated for each head; None for the gate of an ungated MLP."""
        if name == "W_gate" and not self._model.cfg.gated_mlp:
            return None
        stacked = super()._stacked(name)
        return self._for_each_head(stacked) if name in ("W_K", "W_V", "b_K", "b_V") else stacked

    def tokens_to_residual_directions(
        self, tokens: str | int | Sequence[str] | Sequence[int] | Tensor
    ) -> Float[Tensor, "*some d_model"]:
        """The unembedding of each token; a tensor with a single token returns a vector."""
        is_one = isinstance(tokens, Tensor) and tokens.numel() == 1
        return super().tokens_to_residual_directions(tokens.reshape(()) if is_one else tokens)  # type: ignore[union-attr]


class LensWeights(LensMoves, LensModule):
    """The weights and state dict of a HookedTransformer. A mixin."""

    cfg: HookedTransformerConfig = None  # type: ignore[assignment]  # set for each model

    @property
    def weights(self) -> LensMatrices:
        """The weights, stacked over layers; their names are also attributes of the model."""
        return LensMatrices(self)

    @property
    def n_params_total(self) -> int:
        """The total number of parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def init_weights(self) -> None:
        """Initialize the weights of a toy model again."""
        from hookline.compat.transformer_lens._impl.native import NativeTransformer
        from hookline.compat.transformer_lens._impl.native.initial import draw_weights

        if not isinstance(self.module, NativeTransformer):
            raise HooklineError("init_weights is for models made by HookedTransformer(cfg): this one is pretrained")
        draw_weights(self.module)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The weights by TransformerLens's names and in its layout, as views if possible, and its redundant buffers.

        Weights without a TransformerLens name have their own name in the model. In the `state_dict` of a parent module
        all weights have their own names, by which torch loads them.
        """
        if kwargs.get("destination") is not None:
            state = self.module.state_dict(*args, **kwargs)
            for name, tensor in self._other_state().items():
                state[f"{kwargs.get('prefix', '')}{name}"] = tensor if kwargs.get("keep_vars") else tensor.detach()
            return state
        if args or kwargs:
            raise HooklineError("state_dict takes no arguments here: use model.module.state_dict(…)")
        state = {name: entry.snapshot(name) for name, entry in entries.weights_of(self).items()}  # type: ignore[arg-type]
        state |= entries.redundant_buffers(state, self.device)
        return state | {name: tensor.detach() for name, tensor in self._other_state().items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Load weights with TransformerLens's names."""
        if assign:
            raise HooklineError("assign=True is not supported for views of weights: omit it")
        others = self._other_state()
        model_state = {name: value for name, value in state_dict.items() if name not in others}
        absent = [name for name in others if name not in state_dict]
        if strict and absent:
            raise HooklineError(f"weights of attached modules are missing: {absent}")
        missing, unexpected = entries.load(self, model_state, strict=strict)  # type: ignore[arg-type]
        with torch.no_grad():
            for name in set(others) & set(state_dict):
                others[name].copy_(state_dict[name])
        missing += absent
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own parameters, under TransformerLens's names where the layout is the same."""
        start = f"{prefix}." if prefix else ""
        model_parameters = entries.named_parameters(self, remove_duplicate) if recurse else ()  # type: ignore[arg-type]
        others = self._other_parameters() if recurse else self._own_parameters()
        yield from ((start + name, parameter) for name, parameter in (*model_parameters, *others.items()))

    def _move(self, *args: Any, **kwargs: Any) -> None:
        super()._move(*args, **kwargs)
        self._own_tensors().to(*args, **kwargs)
        for _, module in self._others():
            module.to(*args, **kwargs)
