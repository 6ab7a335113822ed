"""Partial reruns: variants of a run that reuse its residual stream, keys and values."""
