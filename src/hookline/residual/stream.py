"""StreamCache: the residual stream in a cache, the norms that read it, and where in the text it is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hookline.engine.batch_index import Rows, checked_rows
from hookline.engine.cache import ActivationCache
from hookline.engine.passes import current
from hookline.errors import HooklineError
from hookline.text.token_positions import Positions, picked
from hookline.transformer.anatomy import Block
from hookline.transformer.cfg import cfg_of
from hookline.transformer.norms import Norm, norm_of
from hookline.weights.matrices import Weights
from hookline.weights.processing.process import Processing, processing_of

if TYPE_CHECKING:
    from hookline.engine.names import Points
    from hookline.transformer.index import ModelPoints

_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


class StreamCache(ActivationCache):
    """The activations of a language model, with the stream that runs through them; see `residual.ModelCache`."""

    _points: ModelPoints | None
    logits: Tensor | None = None
    """What the run gave, if it gave that: for the rows and positions that are in the cache."""
    _processing: Processing | None = None

    def __init__(self, tensors: dict[str, Tensor], points: Points, *, has_batch_dim: bool = True) -> None:
        super().__init__(tensors, points, has_batch_dim=has_batch_dim)
        self._processing = processing_of(points.root)

    def keep_logits(self, logits: Float[Tensor, "batch pos vocab"]) -> None:
        """Remember what the run gave, at the positions that were kept."""
        if self.positions is None or self.forward_pass is not None:
            self.logits = self._logits_at(logits, self.positions)

    def rows(self, which: Rows) -> Self:
        """A cache of some rows of the batch only; see `ActivationCache.rows`."""
        new = super().rows(which)
        if self.logits is not None:  # they keep their batch axis always
            new.logits = self.logits[[which] if isinstance(which, int) else which]
        return new

    def at(self, positions: Positions) -> Self:
        """A cache of some positions only, as `run_with_cache(…, pos_slice=positions)` would have given it.

            cache.at(-1)["resid_post", 5]      # [batch, d_model]

        Of scores and patterns it is the positions that look. What has no positions stays as it is.
        """
        new = self._with({name: self._at(x, positions, name) for name, x in self._tensors.items()})
        new.positions = positions
        new.logits = self._logits_at(self.logits, positions)
        return new

    def _logits_at(self, logits: Tensor | None, positions: Positions) -> Tensor | None:
        """The logits at the positions of the cache; None if those are of an encoder's text, or of images."""
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
            raise HooklineError(
                f"{path} has activations of {about['architecture']} ({about.get('model')}): this is {kind}"
            )
        current = processing_of(points.root)
        is_same = about.get("processing") == (repr(current) if current is not None else None)
        self._processing = current if is_same else Processing()  # which is never in force

    def _axes(self, name: str) -> str:
        point = self._points.find(name.removesuffix("_grad")) if self._points is not None else None
        return point.axes if point is not None else ""

    @property
    def _model(self) -> ModelPoints:
        if self._points is None:
            raise HooklineError("this cache has lost its model: it was pickled; ask the model for another")
        return self._points

    @property
    def _weights(self) -> Weights:
        self._check_weights()
        return Weights(self._model)

    def _check_weights(self) -> None:
        """The model's weights must be what they were in the run."""
        if processing_of(self._model.root) != self._processing:
            raise HooklineError(
                "the model's weights were processed or restored since this cache was made: its activations are of "
                "other weights; run the model again"
            )

    @property
    def n_layers(self) -> int:
        """How many layers the model has."""
        return len(self._model.anatomy.blocks)

    def stack_activation(self, name: str, layer: int = -1, sublayer: str | None = None) -> Float[Tensor, "layer ..."]:
        """The same point of all layers, or of those before `layer`."""
        more = (self._model.anatomy.main.name, *([] if sublayer is None else [sublayer]))
        return torch.stack([self[(name, each, *more)] for each in range(self._upto(layer))])

    def _of(self, layer: int | None, point: str) -> Tensor:
        """A point of a layer of the stack that the output comes from, or of that stack itself."""
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
        """The parts as the norm before `layer`, or the final one, scales their sum: centered, and divided alike.

        The stack is of the positions and rows that `pos_slice` and `batch_slice` say, of all of them by default. With
        `recompute_ln` each is normed by itself, and has the final norm's weight and bias: what the unembedding would
        read.
        """
        last, module = self._upto(layer), self._norm_module(layer, mlp_input)
        if recompute_ln:
            if last != self.n_layers:
                raise HooklineError("recompute_ln is for the final norm: leave the layer out")
            self._check_weights()
            return module.forward(residual_stack) if module is not None else residual_stack
        scale = self._scale(layer, mlp_input, pos_slice, batch_slice, has_batch_dim)
        places = scale.shape[:-1]
        if residual_stack.ndim <= len(places) or residual_stack.shape[-1 - len(places) : -1] != places:
            raise HooklineError(
                f"a stack of shape {list(residual_stack.shape)} is not of the rows and positions {list(places)}: "
                f"pos_slice and batch_slice say which of the cache's it is of"
            )
        norm = self._norm(module)
        if norm is not None and norm.subtracts_mean:
            residual_stack = residual_stack - residual_stack.mean(-1, keepdim=True)
        return residual_stack / scale

    def _scale(
        self, layer: int | None, mlp_input: bool, where: Positions, rows: Rows | None, has_batch_dim: bool
    ) -> Float[Tensor, "*place 1"]:
        """What the norm there divides by, at some rows and positions; 1 where there is no norm."""
        last, module = self._upto(layer), self._norm_module(layer, mlp_input)
        name = "ln_final" if last == self.n_layers else "ln2" if module is self._block(last).ln2 else "ln1"
        if self._norm(module) is None:
            scale = torch.ones_like(self._stream(last, mlp_input)[..., :1])
        else:
            scale = self._of(None if name == "ln_final" else last, f"{name}.hook_scale")
        if self._model.anatomy.main.architecture.flattened_rows:
            scale = scale.reshape(*self._stream(last).shape[:-1], 1)
        return self._rows_of(self._at(scale, where), rows, has_batch_dim)

    def _rows_of(self, x: Tensor, rows: Rows | None, has_batch_dim: bool) -> Tensor:
        """Of some rows, or of the only one."""
        if rows is not None and not (self.has_batch_dim and has_batch_dim):
            raise HooklineError("batch_slice is for a cache and a stack with a batch axis: there is none")
        if rows is not None:
            return x[checked_rows(rows, x.shape[0])]
        if has_batch_dim or not self.has_batch_dim:
            return x
        if x.shape[0] != 1:
            raise HooklineError(f"has_batch_dim=False, but the cache is of {x.shape[0]} rows: use cache.rows first")
        return x[0]

    def _block(self, layer: int) -> Block:
        return self._model.anatomy.blocks[layer]

    def _norm_module(self, layer: int | None, mlp_input: bool) -> nn.Module | None:
        """The norm through which a layer's attention, its MLP, or the unembedding reads the stream; None if none."""
        last = self._upto(layer)
        if last == self.n_layers:
            if mlp_input:
                raise HooklineError("mlp_input is about a layer: after the last one comes no MLP")
            return self._model.anatomy.main.ln_final
        block = self._block(last)
        shares = mlp_input and block.ln2 is None and self._model.anatomy.main.architecture.parallel
        return block.ln2 if mlp_input and not shares else block.ln1

    def _norm(self, module: nn.Module | None) -> Norm | None:
        """How a norm computes; None if there is none, or it does nothing."""
        if module is None or isinstance(module, nn.Identity):
            return None
        norm = norm_of(module, self._model.anatomy.width)
        if norm is None:
            raise HooklineError(
                f"{type(module).__name__} is no norm of a known form: what it makes of parts is not known"
            )
        return norm

    def _embeddings(self) -> dict[str, Tensor]:
        """What enters the first layer, of every row and position."""
        stream = self._of(0, "hook_resid_pre")
        names = {"embed": "hook_embed", "pos_embed": "hook_pos_embed"}
        parts = {
            label: self._of(None, name)
            for label, name in names.items()
            if self._named(None, name) in self._model.hook_dict
        }
        for label, part in parts.items():
            if part.ndim > stream.ndim or part.shape[-1] != stream.shape[-1] or stream.ndim > 3:
                raise HooklineError(
                    f"{label} has the shape {list(part.shape)}, and the stream {list(stream.shape)}: "
                    f"{self._model.anatomy.kind} has no one stream that all is added to"
                )
            parts[label] = part.expand_as(stream)
        rest = stream - sum(parts.values())
        if not is_rounding(rest, stream):
            parts["embed_other"] = rest
        return parts

    def _stream(self, layer: int, mlp_input: bool = False) -> Tensor:
        """The stream that a layer's attention or MLP reads, or that leaves the last layer."""
        if layer == self.n_layers:
            return self._of(self.n_layers - 1, "hook_resid_post")
        return self._of(layer, "hook_resid_mid" if self._includes_attention(layer, mlp_input) else "hook_resid_pre")

    def _includes_attention(self, layer: int, mlp_input: bool) -> bool:
        """Whether what the MLP of this layer reads has what its attention adds in it."""
        self._norm_module(layer, mlp_input)  # refuses what cannot be asked
        return mlp_input and not self._model.anatomy.main.architecture.parallel

    def _given(
        self, parts: dict[str, Tensor], layer: int, *, apply_ln: bool, mlp_input: bool, where: Positions, labels: bool
    ) -> Any:
        """The parts, at these positions already, as one tensor."""
        if not parts:
            raise HooklineError("there are no such parts before this layer")
        stack = torch.stack([*parts.values()])
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input=mlp_input, pos_slice=where)
        return (stack, list(parts)) if labels else stack

    def _check_sum(self, total: Tensor, layer: int, mlp_input: bool, where: Positions) -> None:
        """All parts must be all that there is."""
        stream = self._at(self._stream(layer, mlp_input), where)
        if not is_rounding(total - stream, stream):
            raise HooklineError(
                f"what is known to be added to the stream of {self._model.anatomy.kind} does not sum to it: it was "
                f"edited on the way, or something else writes to it"
            )

    def _at(self, x: Tensor, where: Positions, name: str | None = None) -> Tensor:
        """At positions in the text, as everywhere: see `positions.py`. The axes are a point's, or the stream's."""
        if where is None:
            return x
        if self.positions is not None:
            raise HooklineError(f"this cache has {self.positions!r} only: no position can be picked from it again")
        if name is not None and not {"p", "k"} & {*self._axes(name).split()}:
            if x.ndim < 2 or not self._axes(name):
                raise HooklineError(f"no axis of positions is known of {name!r}: cache it apart")
            return x
        found = self._picked(x if self.has_batch_dim else x[None], where, name)
        return found if self.has_batch_dim else found[0]

    def _picked(self, x: Tensor, where: Positions, name: str | None = None) -> Tensor:
        if self.forward_pass is None:
            raise HooklineError("this cache no longer knows its text: pick positions from what is given instead")
        before, current.forward_pass = current.forward_pass, self.forward_pass
        try:
            point = name.removesuffix("_grad") if name is not None else f"{self._model.layer(0)}.hook_resid_pre"
            return picked(x, self._model.find(point), where)
        finally:
            current.forward_pass = before

    def _upto(self, layer: int | None) -> int:
        if layer is None or layer == -1:
            return self.n_layers
        if layer not in range(self.n_layers + 1):
            raise HooklineError(f"layer {layer}, but the model has {self.n_layers} layers")
        return layer

    def _has(self, layer: int, point: str) -> bool:
        return self._named(layer, point) in self._model.hook_dict

    def _check_sums(self) -> None:
        anatomy = self._model.anatomy
        if anatomy.main.is_post_norm:
            raise HooklineError(f"{anatomy.kind} norms the stream after each addition: what was added does not add up")
        stream = self._tensors.get(self._named(0, "hook_resid_pre"))
        if stream is not None and stream.ndim > 3:
            raise HooklineError(f"{anatomy.kind} has several streams side by side ({list(stream.shape)}): none adds up")


def is_rounding(difference: Tensor, whole: Tensor) -> bool:
    """Whether it is nothing but rounding."""
    tolerance = _ROUNDING.get(whole.dtype, 3e-2)
    return bool(difference.float().norm() <= tolerance * whole.float().norm())
