"""Processing: weights rewritten so that less stands in the way of reading them, exactly, and undone at will."""

from hookline.weights.processing.process import Processing, WeightProcessing, processing_of
from hookline.weights.processing.swaps import Swaps

__all__ = ["Processing", "Swaps", "WeightProcessing", "processing_of"]
