"""Positions in a text, by index or by meaning: where a hook acts, an edit applies, or a cache records.

    from hookline.positions import at, last, token
    model.run_with_hooks(prompt, fwd_hooks=[("blocks.3.hook_resid_post", at(token(" Mary"), fn))])

`at`, `last` and `token` are also in `hookline` itself. See docs/transformers.md.
"""

from hookline.text.token_positions import Positions, at, image_tokens, last, new_tokens, step, token

__all__ = ["at", "last", "token", "image_tokens", "new_tokens", "step", "Positions"]


def __dir__() -> list[str]:
    return sorted(__all__)
