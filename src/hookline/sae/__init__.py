"""Sparse autoencoders as hooks: load and save, splice in, edit features, train, evaluate, and find top contexts.

See docs/sae.md.
"""

from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.dashboard import dashboard
from hookline.sae.position_quality import PositionQuality, QualityByPosition, evaluate_by_position
from hookline.sae.published import published, releases
from hookline.sae.quality import Quality, evaluate
from hookline.sae.sae_config import SAEConfig
from hookline.sae.splice import FeatureDetector, Splice, run_with_features
from hookline.sae.top_contexts import Contexts, Profile, profile, top_contexts
from hookline.sae.train import Training, train, train_many
from hookline.sae.training_plan import Metrics
from hookline.sae.transcoder_training import TranscoderTraining, train_transcoders
from hookline.sae.transcoders import Transcoder, TranscoderOrigin, Transcoders

__all__ = [
    "SparseAutoencoder",
    "SAEConfig",
    "Splice",
    "FeatureDetector",
    "run_with_features",
    "train",
    "train_many",
    "Training",
    "Metrics",
    "evaluate",
    "Quality",
    "evaluate_by_position",
    "QualityByPosition",
    "PositionQuality",
    "published",
    "releases",
    "dashboard",
    "profile",
    "Profile",
    "top_contexts",
    "Contexts",
    "Transcoder",
    "Transcoders",
    "TranscoderOrigin",
    "train_transcoders",
    "TranscoderTraining",
]


def __dir__() -> list[str]:
    return sorted(__all__)
