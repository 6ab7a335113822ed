"""Cache activations: all of them, those that a filter selects, or a single one."""

from __future__ import annotations

import hookline


def main() -> dict[str, hookline.ActivationCache]:
    """Print what each of three filters caches; return the caches."""
    model = hookline.load("tinyworld")
    prompt = "Hello, world"

    _, everything = model.run_with_cache(prompt)
    for name in ("blocks.0.attn.hook_q", "blocks.3.hook_resid_post", "ln_final.hook_normalized"):
        print(f"{name:26} {list(everything[name].shape)}")

    _, stream = model.run_with_cache(prompt, names_filter=lambda name: name.endswith("hook_resid_post"))
    one = model.cache(prompt, names_filter="blocks.1.hook_resid_post")  # only the cache: nothing after block 1 is run

    caches = {"no filter": everything, "a function": stream, "one name": one}
    for kind, cache in caches.items():
        print(f"{kind:11} {len(cache):3} activations, {cache.nbytes / 1000:6.1f} kB")
    return caches


if __name__ == "__main__":
    main()
