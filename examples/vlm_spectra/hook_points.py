"""The points that vlm-spectra names by role and layer: what they are, and their shapes."""

from __future__ import annotations

import hookline

ROLES = {
    "lm.layer.pre": "the input of a layer",
    "lm.layer.post": "the output of a layer",
    "lm.mlp.out": "the output of the MLP",
    "lm.attn.out": "the output of attention",
    "lm.attn.z": "the output of each head, before the output projection",
    "lm.attn.pattern": "the attention pattern of each head",
}
ATTENTION_INPUT = "transformer.h.1.attn.input"  # lm.attn.pre, by its native name


def main() -> dict[str, tuple[int, ...]]:
    """Print and return the shape at each point of layer 1."""
    model = hookline.load("tinyworld")
    names = [(role, 1) for role in ROLES]
    _, cache = model.run_with_cache("The cat sat", names_filter=[*names, ATTENTION_INPUT])
    shapes = {role: tuple(cache[role, 1].shape) for role in ROLES}
    for role, what in ROLES.items():
        print(f"{role:16} {shapes[role]!s:15} {what}")
    shapes["lm.attn.pre"] = tuple(cache[ATTENTION_INPUT].shape)
    print(f"{'lm.attn.pre':16} {shapes['lm.attn.pre']!s:15} the input of attention, after the norm")
    return shapes


if __name__ == "__main__":
    main()
