"""The basic pattern: get the activations of one layer for a batch of texts."""

from __future__ import annotations

import hookline

TEXTS = ["Hello, world!", "The cat sat on the mat."]
LAYER = "transformer.h.0.attn.c_attn"


def main() -> hookline.ActivationCache:
    """Print and return the activations of a layer. Nothing stays attached after the run, even if it fails."""
    model = hookline.load("tinyworld")
    logits, cache = model.run_with_cache(TEXTS, names_filter=LAYER)
    print(f"logits {list(logits.shape)}\n{cache}")
    return cache


if __name__ == "__main__":
    main()
