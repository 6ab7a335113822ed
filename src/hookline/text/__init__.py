"""Tokens, positions in a text, and which part of a text a forward pass is about."""

from hookline.text import support as support  # the engine asks it about texts
