"""Tokenizers: what tells one from another, whatever it was used for meanwhile."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

_TRANSFORMERS = "transformers.tokenization_utils_base"


def is_tokenizer(value: Any) -> bool:
    """Whether it is a tokenizer of transformers."""
    known = getattr(sys.modules.get(_TRANSFORMERS), "PreTrainedTokenizerBase", None)
    return known is not None and isinstance(value, known)


def is_fast(value: Any) -> bool:
    """Whether it is a tokenizer of tokenizers, such as those of transformers have inside."""
    known = getattr(sys.modules.get("tokenizers"), "Tokenizer", None)
    return known is not None and isinstance(value, known)


def tokenizer_digest(tokenizer: Any) -> str | None:
    """Of what a tokenizer makes of text; without a tokenizer there is none."""
    if tokenizer is None:
        return None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return _digest(json.dumps([tokenizer.get_vocab(), str(tokenizer.special_tokens_map)], sort_keys=True))
    return fast_digest(fast)


def fast_digest(fast: Any) -> str:
    """Of a tokenizer of tokenizers. Its padding and truncation are of the last call, not of the tokenizer."""
    settings = json.loads(fast.to_str())
    return _digest(json.dumps({**settings, "truncation": None, "padding": None}, sort_keys=True))


def settings_of(tokenizer: Any) -> list[Any]:
    """What it is made of, for a hook that has one."""
    names = ("padding_side", "truncation_side", "model_max_length", "chat_template")
    settings = {name: getattr(tokenizer, name, None) for name in names}
    return [tokenizer_digest(tokenizer), str(tokenizer.special_tokens_map), settings]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
