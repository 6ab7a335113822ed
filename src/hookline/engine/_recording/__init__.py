"""Caches: what a run keeps, runs that only record, and runs that are used again."""
