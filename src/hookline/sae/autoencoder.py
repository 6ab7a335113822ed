"""SparseAutoencoder: activations as sparse sums of features."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import relu

from hookline.engine import HookPoint
from hookline.errors import HooklineError, warn
from hookline.sae import saefile
from hookline.sae.sae_config import SAEConfig, dtype_of, shapes_of
from hookline.types import Filter

if TYPE_CHECKING:
    from hookline.sae.splice import FeatureDetector, Splice

_EPS = 1e-5


class SparseAutoencoder(nn.Module):
    """A sparse autoencoder: "standard" (ReLU), "gated", "topk" or "jumprelu".

        sae = SparseAutoencoder.load("my_sae")
        features = sae.encode(activations)        # [batch, pos, d_sae], mostly 0
        sae.decode(features)                      # [batch, pos, d_in]
        with model.hooks([sae.spliced("blocks.2.hook_resid_post", edits=[zero(neuron=7)])]): …

    `W_dec[i]` is the decoder direction of feature i, `W_enc[:, i]` its encoder direction. Activations are cast to the
    autoencoder's dtype. It must be on the device of the activations: `sae.to("cuda")`.
    """

    b_dec: nn.Parameter
    b_enc: nn.Parameter
    b_gate: nn.Parameter
    b_mag: nn.Parameter
    r_mag: nn.Parameter
    threshold: nn.Parameter

    def __init__(self, cfg: SAEConfig, *, seed: int = 0) -> None:
        super().__init__()
        if cfg.normalize_activations == "expected_average_only_in":
            raise HooklineError(
                "the activations were scaled to an expected norm in training, and the factor is not in the config: "
                "SparseAutoencoder.load(path, norm_scaling_factor=…) folds it into the weights"
            )
        self.cfg = cfg
        self._places: set[str] = set()  # where it was used
        random = torch.Generator().manual_seed(seed)
        directions = torch.randn(cfg.d_sae, cfg.d_in, generator=random)
        directions = (directions / directions.norm(dim=1, keepdim=True)).to(dtype_of(cfg.dtype))
        self.W_enc = nn.Parameter(directions.T.clone())
        self.W_dec = nn.Parameter(directions)
        for name, shape in shapes_of(cfg).items():
            if name not in ("W_enc", "W_dec"):
                setattr(self, name, nn.Parameter(directions.new_zeros(shape)))

    @property
    def d_in(self) -> int:
        """The width of the activations."""
        return self.cfg.d_in

    @property
    def d_sae(self) -> int:
        """The number of features."""
        return self.cfg.d_sae

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights, in which it computes."""
        return self.W_enc.dtype

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return self.W_enc.device

    def as_data(self) -> tuple[Any, ...]:
        """Returns the values that determine its output: the config and the weights."""
        return self.cfg, dict(self.state_dict())

    def encode(self, x: Float[Tensor, "*any"]) -> Float[Tensor, "*place d_sae"]:
        """Returns the feature activations [*place, d_sae] of activations [*place, d_in].

        An autoencoder over all heads (`hook_z`) also accepts [*place, head, d_head].
        """
        pre_activations = self.projected(x)
        match self.cfg.architecture:
            case "gated":
                return self.gated(pre_activations)
            case "jumprelu":
                pre_activations = pre_activations + self.b_enc
                return relu(pre_activations) * (pre_activations > self.threshold)
            case "topk":
                return self._largest(pre_activations + self.b_enc)
            case _:
                return relu(pre_activations + self.b_enc)

    def gated(self, found: Float[Tensor, "*place d_sae"]) -> Float[Tensor, "*place d_sae"]:
        """Returns the features of a "gated" autoencoder, given what its encoder directions find."""
        return relu(found * self.r_mag.exp() + self.b_mag) * (found + self.b_gate > 0)

    def projected(self, x: Float[Tensor, "*any"]) -> Float[Tensor, "*place d_sae"]:
        """Returns what the encoder directions find in activations, before biases and the nonlinearity."""
        inputs = self._normalized(self._cast(self.flattened(x)))
        if self.cfg.apply_b_dec_to_input:
            inputs = inputs - self.b_dec
        return inputs @ self.W_enc

    def decode(
        self, features: Float[Tensor, "*place d_sae"], x: Float[Tensor, "*place d_in"] | None = None
    ) -> Float[Tensor, "*place d_in"]:
        """Returns the reconstruction of activations from features.

        An autoencoder that normalizes activations needs `x`, the original activations, to undo it.
        """
        self._check_width(features, self.d_sae, "features", "got")
        features = self._cast(features)
        if self.cfg.rescale_acts_by_decoder_norm:
            features = features / self.W_dec.norm(dim=1)
        return self._denormalized(features @ self.W_dec + self.b_dec, x)

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Returns the reconstruction of activations, in their shape."""
        return self.decode(self.encode(x), self.flattened(x)).view(x.shape)

    def flattened(self, x: Tensor, point: HookPoint | None = None) -> Tensor:
        """Returns activations as [*place, d_in]: an autoencoder over all heads flattens the heads.

        `point` is named in the error for another width, and in a warning if it is in another layer than the
        autoencoder was trained at.
        """
        is_of_heads = self.cfg.reshape_activations == "hook_z"
        activations = x.flatten(-2) if is_of_heads and x.ndim > 1 and x.shape[-1] != self.d_in else x
        what = "flattened heads" if is_of_heads else "activations"
        self._check_width(activations, self.d_in, what, "got" if point is None else f"{point.name!r} has")
        if point is not None and point.canonical_name not in self._places:
            self._places.add(point.canonical_name)
            warn_of_another_layer(self.cfg.hook_name, point)
        return activations

    def spliced(self, point: Filter = None, **options: Any) -> Splice:
        """Returns a hook that splices it in at a point, by default where it was trained. Options: see `Splice`."""
        from hookline.sae.splice import Splice

        return Splice(self, point, **options)

    def detector(self, point: Filter = None, **options: Any) -> FeatureDetector:
        """Returns a hook that reads features at a point and changes nothing. Options: see `FeatureDetector`."""
        from hookline.sae.splice import FeatureDetector

        return FeatureDetector(self, point, **options)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        norm_scaling_factor: float | None = None,
        check: bool = True,
    ) -> Self:
        """Load an autoencoder from a folder with `cfg.json` and `sae_weights.safetensors`, the format of SAELens.

        `norm_scaling_factor` is the factor by which activations were multiplied in training; it is required if
        `normalize_activations` is "expected_average_only_in". Files saved by hookline have checksums, which
        `check=False` ignores. Weights that are not finite, or that overflow the dtype, are refused.
        """
        cfg, weights = saefile.read(Path(path), norm_scaling_factor, dtype, check=check)
        sae = cls(cfg)
        sae.load_state_dict(weights)
        return sae.to(device)

    def save(self, path: str | Path) -> None:
        """Save it to a folder, which is created if needed, as `cfg.json` and `sae_weights.safetensors`."""
        saefile.write(Path(path), self.cfg, self.state_dict())

    def _largest(self, pre_activations: Tensor) -> Tensor:
        """Keep the k largest values, and set the others to 0."""
        if self.cfg.rescale_acts_by_decoder_norm:
            pre_activations = pre_activations * self.W_dec.norm(dim=1)
        values, indices = pre_activations.topk(self.cfg.k or 0, dim=-1, sorted=False)
        return torch.zeros_like(pre_activations).scatter(-1, indices, relu(values))

    def _normalized(self, x: Tensor) -> Tensor:
        if self.cfg.normalize_activations == "layer_norm":
            mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
            return (x - mean) / (std + _EPS)
        if self.cfg.normalize_activations == "constant_norm_rescale":
            return x * (self.d_in**0.5 / x.norm(dim=-1, keepdim=True))
        return x

    def _denormalized(self, y: Tensor, x: Tensor | None) -> Tensor:
        if self.cfg.normalize_activations == "none":
            return y
        if x is None:
            raise HooklineError(
                f"this autoencoder normalizes activations ({self.cfg.normalize_activations}), so decoding needs "
                f"the original activations: decode(features, x)"
            )
        x = self._cast(self.flattened(x))
        if self.cfg.normalize_activations == "layer_norm":
            return y * x.std(-1, keepdim=True) + x.mean(-1, keepdim=True)
        return y * (x.norm(dim=-1, keepdim=True) / self.d_in**0.5)

    def _check_width(self, x: Tensor, width: int, what: str, phrase: str) -> None:
        if x.shape[-1:] != (width,):
            trained = f". It was trained at {self.cfg.hook_name!r}" if self.cfg.hook_name else ""
            raise HooklineError(
                f"this autoencoder takes {what} of width {width}, but {phrase} the shape {list(x.shape)}{trained}"
            )

    def _cast(self, x: Tensor) -> Tensor:
        """Check the device, and cast to the dtype of the weights."""
        if x.device != self.device:
            raise HooklineError(
                f"the autoencoder is on {self.device}, but its input is on {x.device}: sae.to({str(x.device)!r})"
            )
        return x.to(self.dtype)

    def extra_repr(self) -> str:
        """The part in parentheses when the module is printed."""
        cfg = self.cfg
        kind = cfg.architecture if cfg.k is None else f"{cfg.architecture}, k={cfg.k}"
        return f"{kind}, {cfg.d_in} → {cfg.d_sae}" + (f", at {cfg.hook_name!r}" if cfg.hook_name else "")


def warn_of_another_layer(trained_at: str | None, point: HookPoint) -> None:
    """Warn if an autoencoder is used in another layer than where it was trained: only the width is the same."""
    trained_layer, layer = _layer(trained_at or ""), _layer(point.canonical_name)
    if trained_layer is not None and layer is not None and trained_layer != layer:
        warn(f"the autoencoder was trained at {trained_at!r}, and is used in another layer, at {point.name!r}")


def _layer(name: str) -> int | None:
    """The number of the layer in the name of a point. The stream that enters a layer is that which left the last."""
    number = next((int(part) for part in name.split(".") if part.isdigit()), None)
    return number - 1 if number is not None and name.endswith("hook_resid_pre") else number
