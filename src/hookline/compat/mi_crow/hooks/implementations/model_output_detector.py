"""`ModelOutputDetector`, under mi-crow's path."""

from hookline.hooks import ModelOutputDetector

__all__ = ["ModelOutputDetector"]
