"""Sparse autoencoders as hooks, under mi-crow's path."""
