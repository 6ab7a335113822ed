"""Memory: what a run needs, known before it runs, and what happens when it runs out."""
