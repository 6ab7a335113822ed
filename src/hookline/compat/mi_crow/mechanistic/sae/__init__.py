"""Sparse autoencoders as hooks: hookline's own, with mi-crow's methods."""
