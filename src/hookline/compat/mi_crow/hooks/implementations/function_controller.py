"""`FunctionController`, under mi-crow's path."""

from hookline.hooks import FunctionController

__all__ = ["FunctionController"]
