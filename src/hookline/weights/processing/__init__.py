"""Processing: exact and reversible rewriting of weights, such as folding norms and centering."""

from hookline.weights.processing.process import Processing, WeightProcessing, processing_of
from hookline.weights.processing.swaps import Swaps

__all__ = ["Processing", "Swaps", "WeightProcessing", "processing_of"]
