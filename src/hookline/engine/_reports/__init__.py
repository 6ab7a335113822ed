"""What is said when a hook fails, never fires, or misses positions."""
