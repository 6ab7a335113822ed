"""Blocks that undo what they did, however they end."""
