"""Gradients at points, and checkpointed regions, which run twice."""
