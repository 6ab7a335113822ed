"""Anatomy: which module of a transformer plays which role, as data, and the proof that it does."""
