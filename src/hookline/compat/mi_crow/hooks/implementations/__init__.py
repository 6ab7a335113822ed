"""The ready-made hooks, under mi-crow's paths."""
