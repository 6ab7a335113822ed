"""Hooks that stay until they are removed."""
