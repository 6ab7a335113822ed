"""Positions in a text, by index or by meaning: where a hook acts, an edit applies, or a cache records.

    >>> from hookline.positions import at, last, step, token
    >>> name = "blocks.3.hook_resid_post"
    >>> logits = model.run_with_hooks(prompt, fwd_hooks=[(name, at(token(" Mary"), torch.zeros_like))])
    >>> model.cache(prompt, names_filter=name, pos_slice=last)[name].shape
    torch.Size([1, 128])
    >>> with model.hooks(fwd_hooks=[(name, at(step(0), torch.zeros_like))]):     # only at the prompt
    ...     text = model.generate(prompt, max_new_tokens=2)

`last` is the last token of each row that is not padding, `new_tokens` are those of a generation after the prompt, and
`image_tokens` those of images. `turn("user")` is what the messages of a role say (docs/chat.md), `span("the store")`
the tokens of some words, and `sentence(0)` a sentence. `at`, `last` and `token` are also in `hookline` itself. See
docs/transformers.md.
"""

from hookline.text.at_positions import at
from hookline.text.token_positions import Positions, image_tokens, last, new_tokens, step, token
from hookline.text.turn_positions import sentence, span, turn

__all__ = ["at", "last", "token", "turn", "span", "sentence", "image_tokens", "new_tokens", "step", "Positions"]


def __dir__() -> list[str]:
    return sorted(__all__)
