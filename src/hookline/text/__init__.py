"""Tokens, positions in a text, and which part of a text a forward pass is about."""
