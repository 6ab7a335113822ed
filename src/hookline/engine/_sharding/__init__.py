"""Models that are sharded over processes."""
