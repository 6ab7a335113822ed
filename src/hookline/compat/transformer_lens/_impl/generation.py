"""Generation with the options of TransformerLens, by transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from hookline.compat.transformer_lens._impl.lens_errors import LensAssertionError, check
from hookline.compat.transformer_lens._impl.tokens import USE_DEFAULT_VALUE
from hookline.errors import HooklineError, warn
from hookline.model import HookedModel
from hookline.text.tokenizer import Side

LogitsProcessor: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def frequency_penalty(penalty: float) -> LogitsProcessor:
    """A logits processor that subtracts the penalty from each logit per occurrence of its token."""

    def penalized(
        input_ids: Int[Tensor, "batch pos"], scores: Float[Tensor, "batch vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - penalty * counts

    return penalized


def sampling(
    do_sample: bool, top_k: int | None, top_p: float | None, temperature: float, freq_penalty: float
) -> dict[str, Any]:
    """The matching options of transformers' `generate`. A temperature of 0 means greedy decoding."""
    check(top_k is None or top_k > 0, f"top_k={top_k}: it must be at least 1")
    check(top_p is None or 0 < top_p <= 1, f"top_p={top_p} must be more than 0 and at most 1")
    if temperature < 0:
        raise HooklineError(f"temperature={temperature} must not be negative")
    if not do_sample or temperature == 0:
        penalties = [frequency_penalty(freq_penalty)] if freq_penalty else []
        return {"do_sample": False, "logits_processor": penalties}
    # The penalty comes before the temperature here, but after it in TransformerLens.
    penalties = [frequency_penalty(freq_penalty * temperature)] if freq_penalty else []
    return {
        "do_sample": True,
        "top_k": top_k or 0,
        "top_p": 1.0 if top_p is None else top_p,
        "temperature": temperature,
        "logits_processor": penalties,
    }


def stopping(model: HookedModel, stop_at_eos: bool, eos_token_id: int | Sequence[int] | None) -> dict[str, Any]:
    """The stopping options."""
    tokenizer_eos = model.tokenizer.eos_token_id if model.tokenizer is not None else None
    if not stop_at_eos:
        return {"eos_token_id": None, "pad_token_id": tokenizer_eos if tokenizer_eos is not None else 0}
    stops = tokenizer_eos if eos_token_id is None else eos_token_id
    if stops is None:
        raise LensAssertionError("without a tokenizer, pass eos_token_id or stop_at_eos=False")
    ends = [stops] if isinstance(stops, int) else list(stops)
    return {"eos_token_id": ends, "pad_token_id": tokenizer_eos if tokenizer_eos is not None else ends[0]}


class LensGeneration(HookedModel):
    """Generation of a HookedTransformer. A mixin."""

    def generate(  # type: ignore[override]  # text only: a HookedTransformer takes no images
        self,
        input: str | Sequence[str] | Tensor = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Side | None = USE_DEFAULT_VALUE,
        return_type: Literal["input", "str", "tokens", "embeds"] = "input",
        verbose: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Continue a prompt with transformers' `generate`, with hooks. Several texts are padded on the left.

        `return_type="embeds"` returns the embeddings of all tokens.

        With `output_logits=True` it returns transformers' `GenerateDecoderOnlyOutput`: all tokens as `sequences`, and
        as `logits` those of each step, [batch, d_vocab], before sampling changes them.
        """
        from transformers import LogitsProcessorList
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        is_tokens = isinstance(input, Tensor)
        if return_type not in ("input", "str", "tokens", "embeds"):
            raise HooklineError(f'return_type must be "input", "str", "tokens" or "embeds", not {return_type!r}')
        if is_tokens and prepend_bos:
            raise HooklineError("prepend_bos=True applies to text only: tokens are used as they are")
        if padding_side == "right" and not isinstance(input, str):
            raise HooklineError('generation needs left padding: omit padding_side, or pass "left"')
        prompt = input if is_tokens else self.to_tokens(input, prepend_bos=prepend_bos, padding_side="left")  # type: ignore[arg-type]
        ids, mask = self._inputs(prompt, None, padding_side)
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids) if mask is None else mask}
        options |= sampling(do_sample, top_k, top_p, temperature, freq_penalty)
        options |= stopping(self, stop_at_eos, eos_token_id) | {"use_cache": use_past_kv_cache}
        # As in TransformerLens, `return_dict_in_generate` alone changes nothing.
        kwargs.pop("return_dict_in_generate", None)
        with_logits = bool(kwargs.pop("output_logits", False))
        if useless := [name for name in sorted(kwargs) if name.startswith("output_") and kwargs.pop(name)]:
            warn(f"unsupported generation kwargs are ignored: {useless}; hooks read what is inside the model")
        options |= {"output_logits": True, "return_dict_in_generate": True} if with_logits else {}
        with tqdm(total=max_new_tokens, disable=not verbose) as bar:

            def advance(_: Tensor, scores: Tensor) -> Tensor:
                bar.update()
                return scores

            processors = LogitsProcessorList([*options.pop("logits_processor"), advance])
            new = super().generate(ids, max_new_tokens, logits_processor=processors, **options, **kwargs)
        if with_logits:
            return GenerateDecoderOnlyOutput(sequences=new.sequences, logits=new.logits)
        if return_type == "embeds":
            return self.embed(new)
        if return_type == "tokens" or (return_type == "input" and is_tokens):
            return new
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts[0] if len(texts) == 1 else texts
