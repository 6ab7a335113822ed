"""StreamCache: the residual stream in a cache, the norms that read it, and positions in the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hookline.engine import ActivationCache, pass_state
from hookline.errors import HooklineError, UnavailablePointError
from hookline.text.at_positions import picked
from hookline.text.token_positions import Positions
from hookline.transformer.cfg import cfg_of
from hookline.transformer.norms import Norm, norm_of
from hookline.values.rows import Rows, checked_rows
from hookline.weights.matrices import Weights
from hookline.weights.processing.process import Processing, processing_of

if TYPE_CHECKING:
    from hookline.engine import Points
    from hookline.transformer.index import ModelPoints

_RESID_PRE, _RESID_POST = "hook_resid_pre", "hook_resid_post"
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""How far a sum may be from the whole, relative to it. Norms of transformers round to float32 in float64 models too."""


class StreamCache(ActivationCache):
    """The activations of a language model, with access to its residual stream; see `ModelCache`."""

    _points: ModelPoints | None
    logits: Tensor | None = None
    """The logits of the run, if it returned them, at the rows and positions of the cache."""
    _processing: Processing | None = None
    passes_stream_on: bool = False
    """Whether each layer got what the layer before it returned: then a `resid_post` is also the next `resid_pre`."""

    def __init__(self, tensors: dict[str, Tensor], points: Points, *, has_batch_dim: bool = True) -> None:
        super().__init__(tensors, points, has_batch_dim=has_batch_dim)
        self._processing = processing_of(points.root)

    def keep_logits(self, logits: Float[Tensor, "batch pos vocab"]) -> None:
        """Keep the logits of the run, at the positions of the cache."""
        if self.positions is None or self.forward_pass is not None:
            self.logits = self._logits_at(logits, self.positions)

    def _key(self, name: Any) -> str:
        try:
            return super()._key(name)
        except UnavailablePointError:
            if (before := self._resid_post_before(name)) is None:
                raise
            return before

    def _resid_post_before(self, name: Any) -> str | None:
        """The key of the output of the layer before the one whose input is asked for, if it is the same."""
        if not self.passes_stream_on:
            return None
        canonical = self._canonical(name if isinstance(name, str) else self._model.name_of(name))
        before = {self._named(layer + 1, _RESID_PRE): self._named(layer, _RESID_POST) for layer in range(self.n_layers)}
        return self._keys.get(before.get(canonical, ""))

    def _check_needs(self, method: str, layer: int, points: Sequence[str], *more: str) -> None:
        """Raise if a method needs what is not in the cache, with the whole filter for it.

        It needs these points of all layers before `layer`, the stream there, and `more` by name.
        """
        end = self._named(layer, _RESID_PRE) if layer < self.n_layers else self._named(layer - 1, _RESID_POST)
        needed = [*(self._named(index, point) for index in range(layer) for point in points), end, *more]
        missing = [name for name in dict.fromkeys(needed) if name in self._model.hook_dict and name not in self]
        if missing:
            layers = f"{self._model.anatomy.main.name}.*"
            globs = [f"{layers}.{point}" for point in points] if layer else []
            if self.passes_stream_on and _RESID_PRE in points:
                globs[points.index(_RESID_PRE)] = f"{layers}.{_RESID_POST}"
                end = self._named(0, _RESID_PRE)
            raise UnavailablePointError(
                f"{method} needs {', '.join(map(repr, missing[:3]))}{', …' if len(missing) > 3 else ''}, "
                f"which this cache does not have: pass names_filter={[*dict.fromkeys([*globs, end, *more])]}"
            )

    def rows(self, which: Rows) -> Self:
        """A cache of some rows of the batch; see `ActivationCache.rows`."""
        new = super().rows(which)
        if self.logits is not None:  # they always have a batch axis
            new.logits = self.logits[[which] if isinstance(which, int) else which]
        return new

    def at(self, positions: Positions) -> Self:
        """A cache of some positions, as `run_with_cache(…, pos_slice=positions)` returns it.

            cache.at(-1)["resid_post", 5]      # [batch, d_model]

        Scores and patterns are indexed by query position. Activations without positions are unchanged.
        """
        new = self.mapped(lambda x, name: self._at(x, positions, name), is_now=True)
        new.positions = positions
        new.logits = self._logits_at(self.logits, positions)
        return new

    def _logits_at(self, logits: Tensor | None, positions: Positions) -> Tensor | None:
        """The logits at positions; None if the cache has only points of an encoder or of images."""
        if logits is None or positions is None:
            return logits
        streams = {self._model.find(name.removesuffix("_grad")).stream for name in self._tensors}
        return self._picked(logits, positions) if not streams or "text" in streams else None

    def _about(self) -> dict[str, str]:
        about = super()._about()
        if self._points is not None:
            anatomy = self._points.anatomy
            about |= {"architecture": anatomy.kind, "model": cfg_of(self._points.root, anatomy).model_name}
        return about if self._processing is None else about | {"processing": repr(self._processing)}

    def _adopt(self, points: Points, about: dict[str, str], path: str | Path) -> None:
        super()._adopt(points, about, path)
        kind = self._model.anatomy.kind
        if about.get("architecture", kind) != kind:
            raise HooklineError(f"{path} has activations of {about['architecture']}, but this model is {kind}")
        current = processing_of(points.root)
        is_same = about.get("processing") == (repr(current) if current is not None else None)
        self._processing = current if is_same else Processing()  # which no model has

    def _axes(self, name: str) -> str:
        point = self._points.find(name.removesuffix("_grad")) if self._points is not None else None
        return point.axes if point is not None else ""

    @property
    def _model(self) -> ModelPoints:
        if self._points is None:
            raise HooklineError("this cache was pickled and has no model: run the model again")
        return self._points

    @property
    def _weights(self) -> Weights:
        self._check_weights()
        return Weights(self._model)

    def _check_weights(self) -> None:
        """Raise if the weights were processed or restored since the run."""
        if processing_of(self._model.root) != self._processing:
            raise HooklineError("the weights were processed or restored since this cache was made: run the model again")

    @property
    def n_layers(self) -> int:
        """The number of layers of the model."""
        return len(self._model.anatomy.blocks)

    def stack_activation(self, name: str, layer: int = -1, sublayer: str | None = None) -> Float[Tensor, "layer ..."]:
        """The activations of one point in all layers, or in the layers before `layer`."""
        more = (self._model.anatomy.main.name, *([] if sublayer is None else [sublayer]))
        return torch.stack([self[(name, layer_index, *more)] for layer_index in range(self._upto(layer))])

    def _of(self, layer: int | None, point: str) -> Tensor:
        """The activation at a point of a layer, or of the whole main stack if the layer is None."""
        return self[self._named(layer, point)]

    def _named(self, layer: int | None, point: str) -> str:
        if layer is not None:
            return f"{self._model.layer(layer)}.{point}"
        anatomy = self._model.anatomy
        return f"{anatomy.main.name}.{point}" if anatomy.is_encoder_decoder else point

    def apply_ln_to_stack(
        self,
        residual_stack: Float[Tensor, "*part d_model"],
        layer: int | None = None,
        *,
        mlp_input: bool = False,
        pos_slice: Positions = None,
        batch_slice: Rows | None = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Float[Tensor, "*part d_model"]:
        """The components, centered and divided by the scale of the norm before `layer`, or of the final norm.

        `pos_slice` and `batch_slice` are the positions and rows of the stack, all by default. With `recompute_ln` the
        final norm is applied to each component on its own, including weight and bias, as for the logit lens.
        """
        last = self._upto(layer)
        _, module = self._norm_before(last, mlp_input)
        if recompute_ln:
            if last != self.n_layers:
                raise HooklineError("recompute_ln applies to the final norm: leave the layer out")
            self._check_weights()
            return module.forward(residual_stack) if module is not None else residual_stack
        scale = self._scale(last, mlp_input, pos_slice, batch_slice, has_batch_dim)
        places = scale.shape[:-1]
        if residual_stack.ndim <= len(places) or residual_stack.shape[-1 - len(places) : -1] != places:
            raise HooklineError(
                f"the stack has the shape {list(residual_stack.shape)}, but rows and positions are {list(places)}: "
                f"pass its pos_slice and batch_slice"
            )
        norm = self._norm(module)
        if norm is not None and norm.subtracts_mean:
            residual_stack = residual_stack - residual_stack.mean(-1, keepdim=True)
        return residual_stack / scale

    def _scale(
        self, layer: int, mlp_input: bool, where: Positions, rows: Rows | None, has_batch_dim: bool
    ) -> Float[Tensor, "*place 1"]:
        """The scale of the norm before a layer or at the end, at some rows and positions; 1 if there is no norm."""
        name, module = self._norm_before(layer, mlp_input)
        if self._norm(module) is None:
            scale = torch.ones_like(self._stream(layer, mlp_input)[..., :1])
        else:
            scale = self[f"{name}.hook_scale"]
        if self._model.anatomy.main.architecture.flattened_rows:
            scale = scale.reshape(*self._stream(layer).shape[:-1], 1)
        return self._rows_of(self._at(scale, where), rows, has_batch_dim)

    def _rows_of(self, x: Tensor, rows: Rows | None, has_batch_dim: bool) -> Tensor:
        """The values of some rows, or of the only row."""
        if rows is not None and not (self.has_batch_dim and has_batch_dim):
            raise HooklineError("batch_slice needs a cache and a stack with a batch axis")
        if rows is not None:
            return x[checked_rows(rows, x.shape[0])]
        if has_batch_dim or not self.has_batch_dim:
            return x
        if x.shape[0] != 1:
            raise HooklineError(f"has_batch_dim=False, but the cache has {x.shape[0]} rows: use cache.rows first")
        return x[0]

    def _norm_before(self, layer: int, mlp_input: bool) -> tuple[str, nn.Module | None]:
        """The norm before the attention or the MLP of a layer, or before the unembedding: its name and its module."""
        main = self._model.anatomy.main
        if layer == self.n_layers:
            if mlp_input:
                raise HooklineError("mlp_input needs a layer: there is no MLP after the last one")
            return self._named(None, "ln_final"), main.ln_final
        block = main.blocks[layer]
        is_second = mlp_input and (block.ln2 is not None or not main.architecture.parallel)
        return self._named(layer, "ln2" if is_second else "ln1"), block.ln2 if is_second else block.ln1

    def _norm(self, module: nn.Module | None) -> Norm | None:
        """The formula of a norm; None if there is none, or it is an identity."""
        if module is None or isinstance(module, nn.Identity):
            return None
        norm = norm_of(module, self._model.anatomy.width)
        if norm is None:
            raise HooklineError(f"{type(module).__name__} is not a norm of a known form")
        return norm

    def _embeddings(self) -> dict[str, Tensor]:
        """The components of the stream at the input of the first layer."""
        stream = self._of(0, "hook_resid_pre")
        added = ("embed", "pos_embed") if self._model.anatomy.main.pos_embed is not None else ("embed",)
        points = {name: self._named(None, f"hook_{name}") for name in added}
        parts = {label: self[point] for label, point in points.items() if point in self._model.hook_dict}
        for label, part in parts.items():
            if part.ndim > stream.ndim or part.shape[-1] != stream.shape[-1] or stream.ndim > 3:
                raise HooklineError(f"{label} has the shape {list(part.shape)}, but the stream {list(stream.shape)}")
            parts[label] = part.expand_as(stream)
        rest = stream - sum(parts.values())
        if not is_rounding(rest, stream):
            parts["embed_other"] = rest
        return parts

    def _stream(self, layer: int, mlp_input: bool = False) -> Tensor:
        """The stream at the input of the attention or MLP of a layer, or at the output of the last layer."""
        if layer == self.n_layers:
            return self._of(self.n_layers - 1, "hook_resid_post")
        return self._of(layer, "hook_resid_mid" if self._includes_attention(layer, mlp_input) else "hook_resid_pre")

    def _includes_attention(self, layer: int, mlp_input: bool) -> bool:
        """Whether the input asked for is that of an MLP, and includes the attention output of the same layer."""
        self._norm_before(layer, mlp_input)  # raises if there is no such input
        return mlp_input and not self._model.anatomy.main.architecture.parallel

    def _given(
        self, parts: dict[str, Tensor], layer: int, *, apply_ln: bool, mlp_input: bool, where: Positions, labels: bool
    ) -> Any:
        """The components as one tensor; they are already at these positions."""
        if not parts:
            raise HooklineError("there are no such components before this layer")
        stack = torch.stack([*parts.values()])
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input=mlp_input, pos_slice=where)
        return (stack, list(parts)) if labels else stack

    def _outputs(self, layer: int, kinds: list[str], where: Positions) -> dict[str, Tensor]:
        """The outputs of attention, cross-attention or MLP that a layer has, by label."""
        points = {f"{layer}_{kind}_out": f"hook_{kind}_out" for kind in kinds if self._has(layer, f"hook_{kind}_out")}
        return {label: self._at(self._of(layer, point), where) for label, point in points.items()}

    def _check_sum(self, parts: dict[str, Tensor], layer: int, mlp_input: bool, where: Positions) -> None:
        """Raise unless the components sum to the stream."""
        stream = self._at(self._stream(layer, mlp_input), where)
        if not is_rounding(sum(parts.values()) - stream, stream):
            raise HooklineError(f"the parts of {self._model.anatomy.kind} do not sum to the stream: was it edited?")

    def _at(self, x: Tensor, where: Positions, name: str | None = None) -> Tensor:
        """The values at positions in the text, with the axes of a point, or of the stream if `name` is None."""
        if where is None:
            return x
        if self.positions is not None:
            raise HooklineError(f"this cache has only the positions {self.positions!r}: run the model again for others")
        if name is not None and not {"p", "k"} & {*self._axes(name).split()}:
            if x.ndim < 2 or not self._axes(name):
                raise HooklineError(f"{name!r} has no known position axis: cache it separately")
            return x
        values = self._picked(x if self.has_batch_dim else x[None], where, name)
        return values if self.has_batch_dim else values[0]

    def _picked(self, x: Tensor, where: Positions, name: str | None = None) -> Tensor:
        if self.forward_pass is None:
            raise HooklineError("this cache has lost its text, which positions need: index the tensors instead")
        before, pass_state.forward_pass = pass_state.forward_pass, self.forward_pass
        try:
            point = name.removesuffix("_grad") if name is not None else f"{self._model.layer(0)}.hook_resid_pre"
            return picked(x, self._model.find(point), where)
        finally:
            pass_state.forward_pass = before

    def _upto(self, layer: int | None) -> int:
        if layer is None or layer == -1:
            return self.n_layers
        if layer not in range(self.n_layers + 1):
            raise HooklineError(f"layer {layer} is out of range: the model has {self.n_layers} layers")
        return layer

    def _has(self, layer: int, point: str) -> bool:
        return self._named(layer, point) in self._model.hook_dict

    def _summed_upto(self, layer: int | None) -> int:
        """The layer as a number; raises if the stream of this model is not the sum of what is added to it."""
        anatomy = self._model.anatomy
        if anatomy.main.is_post_norm:
            raise HooklineError(f"{anatomy.kind} normalizes the stream itself, so it is not a sum of components")
        stream = self._tensors.get(self._named(0, "hook_resid_pre"))
        if stream is not None and stream.ndim > 3:
            raise HooklineError(f"{anatomy.kind} has several streams, {list(stream.shape)}: none is a sum of parts")
        return self._upto(layer)


def is_rounding(difference: Tensor, whole: Tensor) -> bool:
    """Whether a difference is within rounding of the whole."""
    tolerance = _ROUNDING.get(whole.dtype, 3e-2)
    return bool(difference.float().norm() <= tolerance * whole.float().norm())
