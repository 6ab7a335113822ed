"""One point, many names: caches, hooks and filters accept all of them."""

from __future__ import annotations

from torch import Tensor

import hookline

NAMES = {
    "classic": ("blocks.1.attn.hook_q", "blocks.1.hook_resid_post", "hook_embed"),
    "bridge": ("blocks.1.attn.q.hook_out", "blocks.1.hook_out", "embed.hook_out"),
    "shorthand": (("q", 1), ("resid_post", 1), "embed"),
    "native": (None, "transformer.h.1", "transformer.wte"),
    "role": (("lm.attn.q", 1), ("lm.layer.post", 1), None),
}


def main() -> dict[str, list[Tensor]]:
    """Print the table of names; return the cached activations by dialect."""
    model = hookline.load("tinyworld")
    _, cache = model.run_with_cache("Hello, world")
    found = {}
    for dialect, names in NAMES.items():
        found[dialect] = [cache[name] for name in names if name is not None]
        print(f"{dialect:10}", *(f"{'–' if name is None else str(name):26}" for name in names))

    asked = [name for names in NAMES.values() for name in names if name is not None]
    together = model.cache("Hello, world", names_filter=asked)
    print(f"\n{len(asked)} names in one filter select {len(set(map(id, together.values())))} activations.")
    return found


if __name__ == "__main__":
    main()
