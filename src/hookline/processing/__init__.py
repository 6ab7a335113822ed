"""Processing: weights rewritten so that less stands in the way of reading them, exactly, and undone at will."""

from hookline.processing.process import Processing, WeightProcessing, processing_of
from hookline.processing.swaps import Swaps

__all__ = ["Processing", "Swaps", "WeightProcessing", "processing_of"]
