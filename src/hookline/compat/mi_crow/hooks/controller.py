"""Controllers, under mi-crow's path."""

from hookline.hooks import Controller

__all__ = ["Controller"]
