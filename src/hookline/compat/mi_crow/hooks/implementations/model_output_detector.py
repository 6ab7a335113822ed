"""`ModelOutputDetector`, under mi-crow's path."""

from hookline.hooks import ModelOutputDetector as ModelOutputDetector
