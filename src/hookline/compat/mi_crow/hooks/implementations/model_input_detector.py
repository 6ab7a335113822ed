"""`ModelInputDetector`, under mi-crow's path."""

from hookline.hooks import ModelInputDetector as ModelInputDetector
