"""Transformers: the role of each module, the points of a model by name, and their verification."""
