"""`LayerActivationDetector`, under mi-crow's path."""

from hookline.hooks import LayerActivationDetector as LayerActivationDetector
