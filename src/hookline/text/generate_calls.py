"""Generations: what the model's own `generate` knows about the text that it writes.

A forward pass does not know how long the prompt is. With an assistant or prompt lookup, one pass covers several new
tokens, and the first one the prompt and some new tokens; without a cache every pass covers the whole text; and a long
prompt may be processed in chunks. So the prompt is read from the call of `generate` that the pass belongs to, which
also works when a user calls the `generate` of the wrapped model. Reading a frame has no side effects, unlike replacing
`generate` on the model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import CodeType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from hookline.engine import HookAction
from hookline.errors import HooklineError
from hookline.functions.keywords import is_dropped


@dataclass(frozen=True)
class Generation:
    """One call of `generate`: its prompt, with one row for each generated text."""

    prompt: int
    """The number of positions in the prompt, padding included."""
    tokens: Tensor | None
    mask: Tensor | None
    keeps_rows: bool
    """Whether a row is the same text in every pass; in beam search rows change places."""
    settings: ref[Any]
    """The settings that `generate` made for this call only, which distinguish it from other calls."""


def generation_of(model: nn.Module) -> Generation | None:
    """The generation that the forward pass of `model` that begins now belongs to, or None.

    Raises an error if the pass runs on another text than the generated one.
    """
    body, is_draft = _body(), False
    frame = sys._getframe(1) if body is not None else None
    while frame is not None:
        if HookAction.is_called_in(frame):
            return None  # a hook runs the model on its own text
        if frame.f_globals.get("__name__") == "transformers.generation.logits_process":
            raise HooklineError("a logits processor, such as that of guidance_scale, runs the model on its own text")
        if frame.f_code is body:
            frame_locals = frame.f_locals
            if getattr(frame_locals.get("generation_config"), "is_assistant", False):
                is_draft = True
            elif _holds(frame_locals["self"], model):
                return _read(frame_locals)
            elif is_draft:
                raise HooklineError("this model drafts for another model, which drops some of its tokens")
            else:
                return None
        frame = frame.f_back
    return None


def _body() -> CodeType | None:
    """The code of transformers' `generate`; None if it has not been imported."""
    utils = sys.modules.get("transformers.generation.utils")
    return inspect.unwrap(utils.GenerationMixin.generate).__code__ if utils is not None else None


def _holds(generating: Any, model: nn.Module) -> bool:
    return generating is model or any(module is model for module in generating.modules())


def _read(frame_locals: Mapping[str, Any]) -> Generation | None:
    """The generation from the local variables of `generate`; None before it has processed the prompt."""
    length, tokens, model_kwargs = (
        frame_locals.get("input_ids_length"),
        frame_locals.get("input_ids"),
        frame_locals.get("model_kwargs", {}),
    )
    if not isinstance(length, int) or not isinstance(tokens, Tensor):
        return None
    is_decoder = frame_locals["self"].config.is_encoder_decoder
    mask = model_kwargs.get("decoder_attention_mask" if is_decoder else "attention_mask")
    mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
    # A continued prompt may lack the tokens that are in the cache, but its mask covers all of them.
    mask_length = (
        mask.shape[1] if mask is not None else getattr(frame_locals["generation_config"], "_mask_length", None)
    )
    prompt = max(length, mask_length) if isinstance(mask_length, int) and not is_decoder else length
    method = getattr(frame_locals.get("decoding_method"), "__name__", "")
    return Generation(
        prompt,
        tokens if tokens.shape[1] == prompt else None,
        mask if mask is not None and mask.shape[1] == prompt else None,
        method in ("_sample", "_assisted_decoding"),
        ref(frame_locals["generation_config"]),
    )


def check_generation(model: nn.Module, options: Mapping[str, Any], *, is_hooked: bool) -> None:
    """Raise if a model cannot generate, or not with these options: `is_hooked` says whether there are hooks on it."""
    if "fwd_hooks" in options or "bwd_hooks" in options:
        raise HooklineError("generate takes no hooks; write: with model.hooks(fwd_hooks=[…]): model.generate(…)")
    if not getattr(model, "can_generate", lambda: True)():
        raise HooklineError(
            f"{type(model).__name__} cannot generate text: it has no language-model head. Load the "
            f"model with one (AutoModelForCausalLM, AutoModelForSeq2SeqLM)"
        )
    if is_hooked and options.get("cache_implementation") == "paged":
        raise HooklineError(
            "hooks do not work with continuous batching (cache_implementation='paged'), which packs several texts "
            "into one row in another thread: use another cache"
        )
    if options.get("custom_generate") is None:  # which has options of its own
        _check_names(model, options)


def _check_names(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise for a name that is no option of `generate`, and that the model does not use."""
    generation_config = getattr(model, "generation_config", None)
    option_names = [
        *inspect.signature(model.generate).parameters,  # type: ignore[arg-type]
        *inspect.signature(model.prepare_inputs_for_generation).parameters,  # type: ignore[arg-type]
        *(generation_config.to_dict() if generation_config is not None else ()),
        *("max_new_tokens", "prepend_bos", "images", "seed", "tokenizer", "assistant_tokenizer"),
    ]
    for name in options:
        if name not in option_names and is_dropped(model, name):
            near = get_close_matches(name, option_names, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"nor does {type(model).__name__}.forward take it"
            raise HooklineError(f"generate has no option {name!r}: {hint}")


def check_generated_output(model: nn.Module, options: Mapping[str, Any], *, why_tokens: str) -> None:
    """Raise if options ask for more than is returned: `why_tokens` says why that is tokens only, "" if it is not."""
    if "monitors" in options:
        raise HooklineError(
            "monitors would have no effect in generate, which returns no scores: use generate_with_cache(…, "
            "monitors=[…]) or stream(…, monitors=[…])"
        )
    config = options.get("generation_config") or getattr(model, "generation_config", None)
    has_object = options.get("return_dict_in_generate", getattr(config, "return_dict_in_generate", False))
    if has_object and why_tokens:
        raise HooklineError(f"return_dict_in_generate=True would have no effect: {why_tokens}")
    for name, value in options.items():
        if name.startswith("output_") and value and not has_object:
            raise HooklineError(
                f"{name}={value!r} would have no effect: generate returns more than tokens only for token ids and with "
                f"return_dict_in_generate=True"
            )
