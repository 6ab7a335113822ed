"""Controllers, under mi-crow's path."""

from hookline.hooks import Controller as Controller
