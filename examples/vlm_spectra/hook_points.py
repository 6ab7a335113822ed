"""The places that vlm-spectra names by their role, with a layer: what flows there, and its shape."""

from __future__ import annotations

import hookline

ROLES = {
    "lm.layer.pre": "what goes into a layer",
    "lm.layer.post": "what comes out of it",
    "lm.mlp.out": "what the MLP adds",
    "lm.attn.out": "what attention adds",
    "lm.attn.z": "the heads, before they are put together",
    "lm.attn.pattern": "where the heads look",
}
ATTENTION_INPUT = "transformer.h.1.attn.input"  # lm.attn.pre, by its native name


def main() -> dict[str, tuple[int, ...]]:
    """Print and return the shape at each, in layer 1."""
    model = hookline.load("tinyworld")
    names = [(role, 1) for role in ROLES]
    _, cache = model.run_with_cache("The cat sat", names_filter=[*names, ATTENTION_INPUT])
    shapes = {role: tuple(cache[role, 1].shape) for role in ROLES}
    for role, what in ROLES.items():
        print(f"{role:16} {shapes[role]!s:15} {what}")
    shapes["lm.attn.pre"] = tuple(cache[ATTENTION_INPUT].shape)
    print(f"{'lm.attn.pre':16} {shapes['lm.attn.pre']!s:15} what goes into attention, after the norm")
    return shapes


if __name__ == "__main__":
    main()
