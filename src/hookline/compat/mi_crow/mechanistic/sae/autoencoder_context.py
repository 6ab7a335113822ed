"""The settings that an autoencoder and its concepts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.compat.mi_crow.mechanistic.sae.modules.topk_sae import TopKSae


@dataclass
class AutoencoderContext:
    """Sizes, the language model that it is used on, and which texts are tracked."""

    autoencoder: TopKSae
    n_latents: int
    n_inputs: int
    lm: Any = None
    lm_layer_signature: str | int | None = None
    model_id: str | None = None
    device: str = "cpu"
    experiment_name: str | None = None
    run_id: str | None = None
    text_tracking_enabled: bool = False
    text_tracking_k: int = 5
    text_tracking_negative: bool = False
    store: Any = None
