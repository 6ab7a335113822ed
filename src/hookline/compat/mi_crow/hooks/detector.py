"""Detectors, under mi-crow's path."""

from hookline.hooks import Detector as Detector
