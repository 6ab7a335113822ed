"""Decoding: a step of a generation on a static key-value cache, as one function that can be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, StaticCache, StaticLayer

from hookline.compiled.fixed import fixed
from hookline.compiled.not_compiled import NotCompiled
from hookline.compiled.program import Clock, Program
from hookline.compiled.sampling import Sampler, Sampling
from hookline.functions.signatures import parameters_of
from hookline.transformer.architectures import architecture


def bucket(length: int, size: int = 64) -> int:
    """The length that is compiled for a text: 64, 96, 128, 192, 256, 384, …"""
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def static_cache(config: Any, length: int) -> StaticCache:
    """A cache of fixed size, all of it in tensors; NotCompiled if the model has layers of another kind.

    Layers with a sliding window get the full length too: transformers' own count positions in Python, which compiles
    again at the end of the window. The model's mask hides what is outside it.
    """
    try:
        cache = StaticCache(config=config, max_cache_len=length)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise NotCompiled(f"there is no static cache for it ({type(error).__name__}: {error})") from error
    others = {type(layer).__name__ for layer in cache.layers} - {"StaticLayer", "StaticSlidingWindowLayer"}
    if others:
        raise NotCompiled(f"its cache has layers of another kind: {', '.join(sorted(others))}")
    cache.layers = [ColumnLayer(length) for _ in cache.layers]
    return cache


class ColumnLayer(StaticLayer):
    """A layer of a static cache that writes at a column of the text, which one tensor states for all layers.

    In transformers' own each layer counts by itself, which is one more kernel in every layer and step.
    """

    keys: Any
    values: Any
    cumulative_length: Any

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values, and return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        where = torch.arange(key_states.shape[-2], device=self.device) + self.cumulative_length
        self.keys.index_copy_(2, where, key_states.to(self.keys.dtype))  # another one if autocast has begun since
        self.values.index_copy_(2, where, value_states.to(self.values.dtype))
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the tensors of this layer."""
        super().lazy_initialization(key_states, value_states)
        fixed(self.keys)
        fixed(self.values)

    def get_seq_length(self) -> Any:
        """The column, as a tensor without axes."""
        return self.cumulative_length.view(()) if self.is_initialized else 0


def _hidden_before(module: Any, mask: Tensor) -> Tensor:
    """How many columns before the first new token have no position of their own, `[row, 1]`: those of padding.

    Where a prompt ends in a masked token, which has the position 0, transformers counts on from that, not from the
    last token of the text.
    """
    hidden = (mask == 0).sum(1, keepdim=True)
    counts_on = hasattr(module, "_prepare_position_ids_for_generation")  # versions before count the mask at each token
    return torch.where(mask[:, -1:] == 0, mask.shape[1] - 1, hidden) if counts_on else hidden


def vocab_of(module: Any) -> int:
    """The width of the logits."""
    head = module.get_output_embeddings()
    return head.weight.shape[0] if head is not None else module.config.get_text_config().vocab_size


class DecodeState:
    """The tensors of a generation, for one size of batch and one length; used by one generation at a time."""

    kind, is_one_of_many = "", False

    def __init__(self, module: nn.Module, cache: Any, rows: int, length: int, vocab: int) -> None:
        device = next(module.parameters()).device
        self.module, self.cache, self.rows, self.length, self.key = module, cache, rows, length, (rows, length)
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(rows, length + 1, dtype=torch.long, device=device)
        self.mask = torch.ones(rows, length, dtype=torch.long, device=device)
        self.padding = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.finished = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        for tensor in (self.token, self.column, self.tokens, self.mask, self.padding, self.finished):
            fixed(tensor)
        for layer in () if cache is None else cache.layers:
            layer.cumulative_length = self.column
        self.sampler = Sampler(rows, vocab, device)
        ids = max(vocab, module.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self.clock = Clock(rows, length, device, self.column, self.token, ids)
        parameter_names = parameters_of(module)[0]
        self.takes_positions, self.keeps_logits = "position_ids" in parameter_names, "logits_to_keep" in parameter_names
        # Biases are added to all keys of the cache, those of later columns too, and counted by the mask.
        self.takes_whole_mask = cache is not None and architecture(module.config).positions == "alibi"
        self.variants: list[Any] = []

    def begin(self, ids: Tensor, mask: Tensor, sampling: Sampling) -> None:
        """Begin a text, at its first column."""
        start = ids.shape[1]
        self.cache.reset()
        self.mask.fill_(1)
        self.mask[:, :start] = mask
        self.padding.copy_(_hidden_before(self.module, mask))
        self.tokens[:, :start] = ids
        self.finished.zero_()
        self.sampler.set(sampling)
        self.column.zero_()

    def prefill(self, ids: Tensor, mask: Tensor, sampling: Sampling, *, all_logits: bool) -> None:
        """Run the prompt, with the hooks of the engine, and choose the first new token."""
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": self.mask if self.takes_whole_mask else mask}
        if self.takes_positions:
            inputs["position_ids"] = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
        if self.keeps_logits and not all_logits:
            inputs["logits_to_keep"] = 1
        output = self.module(**inputs, past_key_values=self.cache, use_cache=True)
        self.column.fill_(ids.shape[1] - 1)
        if sampling.temperature is not None:
            self.sampler.draw()
        self.choose(output.logits[:, -1].float(), sampling)

    def stepper(self, sampling: Sampling, *, draws: bool = False) -> Callable[[Program], Callable[[], Tensor]]:
        """Return a function that makes the step for a program: run the newest token, and choose the next one.

        `draws`: it draws the noise itself, after hooks may have drawn random numbers, as the model's own `generate`.
        """

        def make(program: Program) -> Callable[[], Tensor]:
            def step() -> Tensor:
                program.seen()
                inputs = {"input_ids": self.token, "attention_mask": self.seen()}
                if self.takes_positions:
                    inputs["position_ids"] = self.column - self.padding
                output = self.module(**inputs, past_key_values=self.cache, use_cache=True)
                logits = output.logits[:, -1].float()
                if draws:
                    self.sampler.draw()
                self.choose(logits, sampling)
                program.forget()
                return logits

            return step

        return make

    def seen(self) -> Tensor:
        """The attention mask over the positions of the cache; the model itself hides later positions."""
        return self.mask

    def choose(self, logits: Tensor, sampling: Sampling) -> None:
        """Choose the next token of each row, and move on to it."""
        chosen = self.sampler.choose(logits, sampling)
        chosen = torch.where(self.finished, self.sampler.pad, chosen)
        self.finished.logical_or_((chosen == self.sampler.stops).any(-1, keepdim=True))  # -1 is none
        self.column.add_(1)
        self.tokens.index_copy_(1, self.column, chosen)
        self.token.copy_(chosen)

    def moving(self) -> list[Tensor]:
        """The tensors that a step changes, without the cache, where repeating a step writes the same column again."""
        return [self.token, self.column, self.tokens, self.finished]

    def cached(self, column: int) -> list[Tensor]:
        """The keys and values of one column."""
        return [tensor.narrow(2, column, 1) for layer in self.cache.layers for tensor in (layer.keys, layer.values)]

    def ended(self, start: int, stop: int) -> int:
        """The length of the text: up to the first column at which every row has ended, or `stop`."""
        is_stop = (self.tokens[:, start:stop, None] == self.sampler.stops).any(-1)
        has_ended = is_stop.cumsum(1).gt(0).all(0)
        return start + int(has_ended.int().argmax()) + 1 if bool(has_ended.any()) else stop


class GrowingState(DecodeState):
    """The state of a generation that is not compiled, with the model's usual cache, which grows."""

    def __init__(self, module: nn.Module, rows: int, length: int, vocab: int) -> None:
        super().__init__(module, None, rows, length, vocab)

    def begin(self, ids: Tensor, mask: Tensor, sampling: Sampling) -> None:
        """Begin a text."""
        self.cache = DynamicCache(config=self.module.config)  # type: ignore[arg-type]
        super().begin(ids, mask, sampling)

    def seen(self) -> Tensor:
        """The mask up to the token that runs now."""
        return self.mask[:, : int(self.column) + 1]
