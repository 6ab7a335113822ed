"""Transcoders: an MLP's output as a sparse sum of features of its input, for one layer or across layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import relu

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.sae import transcoder_files
from hookline.store.identity import weights_digest

FileFormat: TypeAlias = Literal["circuit-tracer", "saelens"]


class Transcoder(nn.Module):
    """The features of one layer: what they read from the MLP's input, and what they write to layers' outputs.

        features = transcoder.encode(mlp_input)         # [*place, d_sae], mostly 0
        transcoder.decode(features)                     # {layer: [*place, d_out]}, without biases and skip

    `W_enc[:, i]` is what feature i reads, `W_dec[i, n]` what it writes to the n-th of the layers in `writes`. A feature
    is active if its pre-activation is over its `threshold` (0 without one). `W_skip`, [d_out, d_in], maps the input
    linearly to the output of the same layer. `b_dec` is added to the output of the layer, whoever writes there.
    """

    W_enc: nn.Parameter
    b_enc: nn.Parameter
    W_dec: nn.Parameter
    b_dec: nn.Parameter
    threshold: nn.Parameter | None
    W_skip: nn.Parameter | None

    def __init__(self, layer: int, weights: Mapping[str, Tensor], *, writes: Iterable[int] | None = None) -> None:
        super().__init__()
        self.layer, self.writes = layer, tuple(writes if writes is not None else (layer,))
        needed = ("W_enc", "b_enc", "W_dec", "b_dec")
        if missing := [name for name in needed if name not in weights or not weights[name].ndim]:
            raise HooklineError(f"the transcoder of layer {layer} has no {' and no '.join(missing)}")
        tensors = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in weights.items()}
        if tensors["W_dec"].ndim == 2:
            tensors["W_dec"] = tensors["W_dec"][:, None]
        for name in ("W_enc", "b_enc", "W_dec", "b_dec", "threshold", "W_skip"):
            x = tensors.pop(name, None)
            setattr(self, name, None if x is None else nn.Parameter(x))
        self._check(tensors)

    def _check(self, unknown: Mapping[str, Tensor]) -> None:
        if unknown:
            raise HooklineError(f"a transcoder has no weights named {', '.join(unknown)}")
        d_in, d_sae, d_out = self.W_enc.shape[0], self.W_enc.shape[-1], self.W_dec.shape[-1]
        shapes = {
            **{"W_enc": (d_in, d_sae), "b_enc": (d_sae,), "W_dec": (d_sae, len(self.writes), d_out), "b_dec": (d_out,)},
            **{"threshold": (d_sae,), "W_skip": (d_out, d_in)},
        }
        for name, x in self.named_parameters():
            if tuple(x.shape) != shapes[name]:
                raise HooklineError(
                    f"{name} of the transcoder of layer {self.layer} has the shape {list(x.shape)}, expected "
                    f"{list(shapes[name])} for d_in={d_in}, d_sae={d_sae} and writing to {len(self.writes)} layers"
                )
        if any(to < self.layer for to in self.writes):
            raise HooklineError(f"features of layer {self.layer} cannot write to earlier layers: {list(self.writes)}")

    @property
    def d_in(self) -> int:
        """The width of what it reads."""
        return self.W_enc.shape[0]

    @property
    def d_sae(self) -> int:
        """The number of features."""
        return self.W_enc.shape[1]

    @property
    def d_out(self) -> int:
        """The width of what it writes."""
        return self.b_dec.shape[0]

    def pre_activations(self, x: Float[Tensor, "*place d_in"]) -> Float[Tensor, "*place d_sae"]:
        """What each feature reads from inputs, with its bias, before the nonlinearity."""
        if x.shape[-1] != self.d_in:
            raise HooklineError(
                f"the transcoder of layer {self.layer} reads activations of width {self.d_in}, got {list(x.shape)}"
            )
        if x.device != self.W_enc.device:
            raise HooklineError(
                f"the transcoder of layer {self.layer} is on {self.W_enc.device}, but its input is on {x.device}: "
                f"transcoders.to({str(x.device)!r})"
            )
        return x.to(self.W_enc) @ self.W_enc + self.b_enc

    def encode(self, x: Float[Tensor, "*place d_in"]) -> Float[Tensor, "*place d_sae"]:
        """The activations of the features."""
        return self.activate(self.pre_activations(x))

    def activate(self, pre: Float[Tensor, "*place d_sae"]) -> Float[Tensor, "*place d_sae"]:
        """The activations of features with these pre-activations."""
        return relu(pre) if self.threshold is None else relu(pre) * (pre > self.threshold)

    def decode(self, features: Float[Tensor, "*place d_sae"]) -> dict[int, Float[Tensor, "*place d_out"]]:
        """What the features write to the MLP output of each layer."""
        return {layer: features.to(self.W_dec) @ self.W_dec[:, nth] for nth, layer in enumerate(self.writes)}

    def skip(self, x: Tensor) -> Tensor:
        """The linear part of its output."""
        assert self.W_skip is not None
        return (x.to(self.W_skip) @ self.W_skip.T).to(x)

    def extra_repr(self) -> str:
        """The part in parentheses when the module is printed."""
        kind = "relu" if self.threshold is None else "jumprelu"
        to = "" if self.writes == (self.layer,) else f" → layers {self.writes[0]} to {self.writes[-1]}"
        return (
            f"layer {self.layer}{to}, {kind}, {self.d_in} → {self.d_sae}{', skip' if self.W_skip is not None else ''}"
        )


@dataclass(frozen=True)
class TranscoderOrigin:
    """Where transcoders were trained: the model, and the points of a layer that they read and replace."""

    reads: str = "mlp.hook_in"
    writes: str = "hook_mlp_out"
    model_name: str | None = None
    weights: str | None = None
    """A checksum of the model's weights, if they were trained on a store."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other entries of the file's config, which are written back."""


class Transcoders(nn.Module):
    """The transcoders of a model, by layer: one for each layer (per-layer) or features that write to later layers too.

        transcoders = Transcoders.load("folder")         # circuit-tracer's or SAELens's files
        transcoders[3].encode(mlp_input)
        transcoders.outputs({0: x0, 1: x1})              # what they compute in place of the MLPs
        graphs.attribution_graph(model, prompt, transcoders)

    `origin.reads` and `origin.writes` are points of a layer: by default the MLP's own input, after the norm, and what
    the MLP adds to the stream.
    """

    def __init__(self, transcoders: Iterable[Transcoder], origin: TranscoderOrigin | None = None) -> None:
        super().__init__()
        self.origin = origin or TranscoderOrigin()
        every = list(transcoders)
        by_layer = {transcoder.layer: transcoder for transcoder in every}
        if len(by_layer) < len(every) or not every:
            raise HooklineError("two transcoders are of the same layer" if every else "there are no transcoders")
        self.by_layer = nn.ModuleDict({str(layer): by_layer[layer] for layer in sorted(by_layer)})
        missing = sorted({to for transcoder in self for to in transcoder.writes} - set(by_layer))
        if missing:
            raise HooklineError(f"features write to layers {missing}, which have no transcoder of their own")

    @property
    def layers(self) -> list[int]:
        """The layers that have a transcoder."""
        return [int(layer) for layer in self.by_layer]

    @property
    def is_cross_layer(self) -> bool:
        """Whether features write to more layers than their own."""
        return any(transcoder.writes != (transcoder.layer,) for transcoder in self)

    def __getitem__(self, layer: int) -> Transcoder:
        if str(layer) not in self.by_layer:
            raise HooklineError(f"layer {layer} has no transcoder: there are {self.layers}")
        return self.by_layer[str(layer)]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Transcoder]:
        return iter(self.by_layer.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.by_layer)

    def __contains__(self, layer: object) -> bool:
        return str(layer) in self.by_layer

    def constant(self, layer: int, x: Float[Tensor, "*place d_in"]) -> Float[Tensor, "*place d_out"]:
        """The output of a layer without features: its bias, and its skip connection if there is one."""
        transcoder = self[layer]
        bias = transcoder.b_dec.expand(*x.shape[:-1], transcoder.d_out)
        return bias if transcoder.W_skip is None else bias + transcoder.skip(x).to(bias)

    def outputs(
        self, inputs: Mapping[int, Tensor], features: Mapping[int, Tensor] | None = None
    ) -> dict[int, Float[Tensor, "*place d_out"]]:
        """What they compute in place of the MLPs, given the input of each layer, and features if they are edited."""
        outputs = {layer: self.constant(layer, inputs[layer]) for layer in self.layers if layer in inputs}
        for layer, x in inputs.items():
            active = self[layer].encode(x) if features is None or layer not in features else features[layer]
            for to, part in self[layer].decode(active).items():
                if to in outputs:
                    outputs[to] = outputs[to] + part
        return outputs

    forward = outputs

    def points(self, model: HookedModel, layer: int) -> tuple[str, str]:
        """The names of the points that a layer's transcoder reads and replaces."""
        prefix = model.index.layer(layer)
        return f"{prefix}.{self.origin.reads}", f"{prefix}.{self.origin.writes}"

    def check_fit(self, model: HookedModel) -> None:
        """Raise unless they are transcoders of this model: its name and weights, its layers, and its widths."""
        name = self.origin.model_name
        if name is not None and _short(name) != _short(model.cfg.model_name):
            raise HooklineError(f"these transcoders are of {name!r}, but the model is {model.cfg.model_name!r}")
        if self.layers[-1] >= model.cfg.n_layers:
            raise HooklineError(
                f"these transcoders are of layers {self.layers}, but {model.cfg.model_name} has "
                f"{model.cfg.n_layers} layers: they are of another model"
            )
        for transcoder in self:
            if not all(bool(weight.isfinite().all()) for weight in transcoder.state_dict().values()):
                raise HooklineError(f"the transcoder of layer {transcoder.layer} has weights that are NaN or infinite")
            for point in self.points(model, transcoder.layer):
                model.point(point)  # raises if the model does not have it
            if transcoder.d_out != model.cfg.d_model:
                raise HooklineError(
                    f"the transcoder of layer {transcoder.layer} writes activations of width {transcoder.d_out}, but "
                    f"{model.cfg.model_name} has d_model={model.cfg.d_model}"
                )
        if self.origin.weights is not None and self.origin.weights != weights_digest(model.module):
            raise HooklineError(
                f"these transcoders were trained on a {name} with other weights: load that checkpoint, without "
                f"processed weights and adapters; to use them anyway, transcoders.without_weights()"
            )

    def without_weights(self) -> Self:
        """The same transcoders without the checksum of the model that they were trained on."""
        return type(self)(self, replace(self.origin, weights=None))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        check: bool = True,
        revision: str | None = None,
    ) -> Self:
        """Load a folder in the format of circuit-tracer (a set, or a cross-layer transcoder) or of SAELens.

            Transcoders.load("my_transcoders")
            Transcoders.load("owner/name")                 # a repository of the hub, or owner/name/folder

        In SAELens's format, the folder has one transcoder, or one folder for each layer. Weights that are not finite
        are refused; files that hookline wrote have checksums, which `check=False` ignores. `revision` is a branch, tag
        or commit on the hub.
        """
        folder = transcoder_files.folder_of(path, revision)
        arguments, origin = transcoder_files.read_transcoders(folder, check=check)
        transcoders = [Transcoder(layer, weights, **options) for layer, weights, options in arguments]
        return cls(transcoders, TranscoderOrigin(**origin)).to(device=device, dtype=dtype)

    def save(self, path: str | Path, format: FileFormat = "circuit-tracer") -> None:
        """Save to a folder, in the format of circuit-tracer, or of SAELens with one folder for each layer."""
        transcoder_files.write_transcoders(Path(path), list(self), self.origin, format)

    def extra_repr(self) -> str:
        """The part in parentheses when the module is printed."""
        kind = "cross-layer" if self.is_cross_layer else "per layer"
        return f"{kind}, {self.origin.reads} → {self.origin.writes}, of {self.origin.model_name or 'an unnamed model'}"


def _short(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
