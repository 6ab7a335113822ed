"""`FunctionController`, under mi-crow's path."""

from hookline.hooks import FunctionController as FunctionController
