"""The methods of a model that write text: `generate`, `generate_with_cache` and `stream`, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from numbers import Integral
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torch import Tensor

from hookline.engine import Record, Recorder, Run, compiling, open_runs
from hookline.errors import HooklineError
from hookline.functions.listed_options import lists
from hookline.hooks.scores import Score
from hookline.model_options import (
    CompileKeywords,
    GenerateOptions,
    GenerationCacheOptions,
    ManyPrompts,
    OnePrompt,
    WatchedOptions,
)
from hookline.text.chats import Chat
from hookline.text.forward_pass import begin_pass, whole_text
from hookline.text.generate_calls import check_generated_output, check_generation
from hookline.text.joining import joined_steps
from hookline.transformer.empty import check_weights_there
from hookline.transformer.model_inputs import ModelInputs
from hookline.types import Filter

if TYPE_CHECKING:
    from hookline.compiled.executor import CompiledRuns
    from hookline.residual import ModelCache


_COMPILE = SimpleNamespace(backend="inductor", limit=8)
"""Defaults of `compile` other than None. Not read from its own options: these import torch's compiler."""


@compiling.verbs
class GenerationMethods(ModelInputs):
    """A base of `HookedModel`."""

    @lists(CompileKeywords, _COMPILE)
    def compile(self, **options: Unpack[CompileKeywords]) -> CompiledRuns:  # type: ignore[override]
        """Run in compiled graphs from now on, wherever that gives the same result; hooks included.

            model.compile()
            with model.hooks([("blocks.5.hook_resid_post", add(direction, 4.0))]):
                model.generate("The weather is")

        Options: `backend`, `mode` and `options`, as of `torch.compile` (the default is inductor, with CUDA graphs on a
        GPU); `points`, a filter for points that will be edited; `limit`, how many graphs are kept; `patience`, the
        seconds that a shape of batches in experiments and harvests takes uncompiled before it is compiled (20 with
        inductor, which takes about as long). Returns an object that prints what was compiled, and what ran uncompiled
        and why; its `close()` frees the graphs and ends this.
        """
        # By its name: it imports torch's compiler, which takes a second.
        executor = import_module("hookline.compiled.executor")
        runs = vars(self)["_compiled_runs"] = executor.compiled_runs(self._points, options)
        return runs

    @lists(CompileKeywords, _COMPILE)
    @contextmanager
    def compiled(self, **options: Unpack[CompileKeywords]) -> Iterator[CompiledRuns]:
        """`compile` for the length of a `with` block."""
        before = vars(self).get("_compiled_runs")
        runs = self.compile(**options)
        try:
            yield runs
        finally:
            runs.close()
            vars(self)["_compiled_runs"] = before

    @property
    def _graphs(self) -> CompiledRuns | None:
        runs: CompiledRuns | None = vars(self).get("_compiled_runs")
        return runs if runs is not None and runs.is_open else None

    @overload
    def generate(self, input: OnePrompt, max_new_tokens: int = 20, **options: Unpack[GenerateOptions]) -> str: ...
    @overload
    def generate(
        self, input: ManyPrompts, max_new_tokens: int = 20, **options: Unpack[GenerateOptions]
    ) -> list[str]: ...
    @overload
    def generate(
        self, input: Tensor | None = None, max_new_tokens: int = 20, **options: Unpack[GenerateOptions]
    ) -> Tensor: ...
    @overload
    def generate(
        self,
        input: Sequence[str] | Tensor | None = None,
        max_new_tokens: int = 20,
        *,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        output_logits: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Any: ...
    @lists(GenerateOptions)
    def generate(
        self,
        input: Any = None,
        max_new_tokens: int = 20,
        *,
        attention_mask: Tensor | None = None,
        images: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Continue the prompt; hooks fire on every step.

            >>> model.generate("The capital of France is", max_new_tokens=2, do_sample=False)
            'The capital of France is Paris.'

        Text returns text; token ids and keyword inputs return ids. `images` and `prepend_bos` are as in a call. Other
        options are those of the model's own `generate`, which does the work unless `compile` is on. `seed` makes
        sampling repeatable, and leaves torch's own random state as it was. For token ids,
        `return_dict_in_generate=True` returns transformers' output object, with `output_scores` and the like.
        """
        is_ids = input is None or isinstance(input, Tensor)
        prompt, images = self._read(input, images, is_open=True)
        why_tokens = "" if is_ids else "text returns text; pass token ids, model.to_tokens(…)"
        check_generated_output(self.module, kwargs, why_tokens=why_tokens)
        ids, inputs = self._prompt(prompt, max_new_tokens, attention_mask, images, kwargs)
        with _seeded(seed, ids.device):
            new = self._continued(ids, inputs, max_new_tokens)
        if is_ids:
            return new
        return self._texts(prompt, ids, new)

    def _texts(self, input: Any, ids: Tensor, new: Tensor) -> str | list[str]:
        """What was written: for texts with the prompt, for conversations the answer only."""
        prompts = [input] if isinstance(input, str) else list(input)
        copies = len(new) // len(prompts)
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        for row in range(len(new)):
            if isinstance(prompts[row // copies], Chat):
                texts[row] = self.tokenizer.decode(new[row, self._prompt_length(ids) :], skip_special_tokens=True)
        return texts[0] if isinstance(input, str) else texts

    def _prompt_length(self, ids: Tensor) -> int:
        return 0 if self.anatomy.is_encoder_decoder else ids.shape[1]

    def _prompt(
        self, input: Any, max_new_tokens: int, attention_mask: Tensor | None, images: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """The token ids of a prompt, and the other inputs and options of a generation."""
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
            raise HooklineError(f"max_new_tokens must be a whole number above 0, not {max_new_tokens!r}")
        prepend_bos = kwargs.pop("prepend_bos", None)
        check_weights_there(self.anatomy.main.embed)
        check_generation(self._points.root, kwargs, is_hooked=bool(open_runs() or self._points.permanent.steps))
        is_text = input is not None and not isinstance(input, Tensor)
        inputs = self._prepared(input, kwargs, attention_mask, prepend_bos, "left" if is_text else None, images)
        if "input_ids" not in inputs:
            raise HooklineError("generate needs a prompt: text, token ids, or input_ids= with other keyword inputs")
        inputs.pop("position_ids", None)  # generate counts them itself
        ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
        self._check_room(ids.shape[1] + max_new_tokens)
        if mask is not None and not self.anatomy.is_encoder_decoder and not bool(mask[:, -1].all()):
            raise HooklineError(
                "these tokens are padded on the right, so new tokens would follow the padding: pass the texts, or "
                'to_tokens(…, padding_side="left")'
            )
        pad: Any = self.module.generation_config.pad_token_id
        if mask is None and (is_text or pad is None or not bool(ids.eq(pad).any())):
            mask = torch.ones_like(ids)  # otherwise generate finds padding by its token
        return ids, inputs if mask is None else {**inputs, "attention_mask": mask}

    def _watched(self, monitors: Sequence[Any], ids: Tensor, inputs: Mapping[str, Any]) -> list[Score]:
        """What keeps the scores of monitors in a generation that begins now."""
        for number, monitor in enumerate(monitors):
            if not hasattr(monitor, "watch") or monitor in monitors[:number]:
                raise HooklineError(
                    f"monitors is a list of different monitors, probes.Monitor(…), but it has {monitor!r:.60}"
                )
        return [monitor.watch(self, ids, inputs.get("attention_mask")) for monitor in monitors]

    def _continued(
        self, ids: Tensor, inputs: dict[str, Any], max_new_tokens: int, scores: Sequence[Score] = ()
    ) -> Tensor:
        """The tokens with new ones."""
        options = {"max_new_tokens": max_new_tokens, **inputs}
        if (runs := self._graphs) is not None:
            generation = runs.generation(ids, options, scores)
            if generation is not None:
                return self._run(generation.run, (), {})
        mask = inputs.get("attention_mask")
        if open_runs() and (self.anatomy.is_encoder_decoder or self.anatomy.towers):
            begin_pass(self._points.root, {"input_ids": ids, "attention_mask": mask})  # before the model's own forward
        if not scores:
            return self._run(self.module.generate, (ids,), options)  # type: ignore[arg-type]
        with Run(self._points.root, scores, is_one_pass=True):
            return self._run(self.module.generate, (ids,), self._ending(options, scores))  # type: ignore[arg-type]

    def _ending(self, options: dict[str, Any], scores: Sequence[Score]) -> dict[str, Any]:
        """Options with which a row ends when one of its scores says so."""
        if all(score.ended() is None for score in scores):
            return options
        from transformers import StoppingCriteriaList

        config: Any = self.module.generation_config
        pad = options.get("pad_token_id", config.pad_token_id)
        criteria = [*(options.get("stopping_criteria") or ()), EndedByScores(scores)]
        return {**options, "stopping_criteria": StoppingCriteriaList(criteria), "pad_token_id": pad or 0}

    @overload
    def generate_with_cache(
        self, input: OnePrompt, max_new_tokens: int = 20, **options: Unpack[GenerationCacheOptions]
    ) -> tuple[str, ModelCache]: ...
    @overload
    def generate_with_cache(
        self, input: ManyPrompts, max_new_tokens: int = 20, **options: Unpack[GenerationCacheOptions]
    ) -> tuple[list[str], ModelCache]: ...
    @overload
    def generate_with_cache(
        self, input: Tensor | None = None, max_new_tokens: int = 20, **options: Unpack[GenerationCacheOptions]
    ) -> tuple[Tensor, ModelCache]: ...
    @overload
    def generate_with_cache(
        self, input: Sequence[str], max_new_tokens: int = 20, **options: Unpack[GenerationCacheOptions]
    ) -> tuple[Any, ModelCache]: ...
    @lists(GenerationCacheOptions, SimpleNamespace(monitors=()))
    def generate_with_cache(
        self,
        input: Any = None,
        max_new_tokens: int = 20,
        *,
        names_filter: Filter = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        monitors: Sequence[Any] = (),
        **kwargs: Any,
    ) -> tuple[Any, ModelCache]:
        """Continue the prompt, and return the text or ids, and the activations at every position of both.

            >>> text, cache = model.generate_with_cache(prompt, 2, names_filter="blocks.*.hook_resid_post")
            >>> cache["blocks.0.hook_resid_post"].shape      # all tokens but the last
            torch.Size([1, 15, 128])

        Position `i` of an activation belongs to token `i`. The last token was chosen but not run, so there is one
        position less than tokens. `monitors` score each token with a probe (`experiments.probes.Monitor`). Other
        arguments are those of `generate`.
        """
        check_generated_output(self.module, kwargs, why_tokens="generate_with_cache returns the text and a cache")
        points = self._points.select(names_filter)
        recorder = Recorder(points, device, dtype, skips_missing=names_filter is None)
        if any(point.canonical_name.startswith("unembed.") for point in points):
            kwargs["logits_to_keep"] = 0  # generate would compute the prompt's last logits only
        prompt, images = self._read(input, kwargs.pop("images", None), is_open=True)
        ids, inputs = self._prompt(prompt, max_new_tokens, kwargs.pop("attention_mask", None), images, kwargs)
        watched = self._watched(monitors, ids, inputs)
        records = [Record(point, recorder) for point in points]
        with _ended_after(monitors), Run(self._points.root, records, held=self._points.held):
            with _seeded(inputs.pop("seed", None), ids.device):
                new = self._continued(ids, inputs, max_new_tokens, watched)
            tensors = joined_steps(
                recorder.by_point(), {point.name: point for point in points}, new.shape[1] - 1, len(new)
            )
        for monitor in monitors:
            monitor.settle(new.shape[1] - 1)
        cache: Any = self._cache(recorder, tensors, remove_batch_dim=False)
        mask = inputs.get("attention_mask")
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, new.shape[1] - 1 - mask.shape[1]), value=1)
        cache.forward_pass = whole_text(self._points.root, new[:, :-1], mask)
        is_ids = prompt is None or isinstance(prompt, Tensor)
        return new if is_ids else self._texts(prompt, ids, new), cache

    @overload
    def stream(
        self, input: OnePrompt, max_new_tokens: int = 20, **options: Unpack[WatchedOptions]
    ) -> Iterator[str]: ...
    @overload
    def stream(
        self, input: Tensor, max_new_tokens: int = 20, **options: Unpack[WatchedOptions]
    ) -> Iterator[Tensor]: ...
    @lists(WatchedOptions, SimpleNamespace(monitors=()))
    def stream(
        self,
        input: Any,
        max_new_tokens: int = 20,
        *,
        attention_mask: Tensor | None = None,
        seed: int | None = None,
        monitors: Sequence[Any] = (),
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Continue the prompt, and yield each new piece of text as soon as it is there; for ids, each column of ids.

            for piece in model.stream("The weather is"):
                print(piece, end="", flush=True)

        Hooks fire as in `generate`; the scores of `monitors` grow with each piece. Other options are those that choose
        a token: do_sample, temperature, top_k, top_p, and eos_token_id.
        """
        prompt, images = self._read(input, kwargs.pop("images", None), is_open=True)
        if not isinstance(prompt, str | Tensor):
            raise HooklineError(
                "stream takes one text, one list of messages or a tensor of token ids; for several texts use generate"
            )
        _check_seed(seed)
        ids, inputs = self._prompt(prompt, max_new_tokens, attention_mask, images, kwargs)
        executor = import_module("hookline.compiled.executor")
        runs = self._graphs or executor.uncompiled_runs(self._points)
        options, is_compiled = {"max_new_tokens": max_new_tokens, **inputs}, self._graphs is not None
        watched = self._watched(monitors, ids, inputs)
        steps = _all_of(runs.stream(ids, options, seed, watched, is_compiled=is_compiled), monitors)
        return self._pieces(steps) if isinstance(prompt, str) else steps

    def _pieces(self, columns: Iterator[Tensor]) -> Iterator[str]:
        """The text of each new token; of a character that takes several tokens, once it is complete."""
        new: list[int] = []
        shown = ""
        for column in columns:
            new.append(int(column[0]))
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            if text.endswith("\N{REPLACEMENT CHARACTER}"):
                continue
            if text != shown:
                yield text[len(shown) :]
            shown = text


@contextmanager
def _ended_after(monitors: Sequence[Any]) -> Iterator[None]:
    """A block after which monitors watch nothing, however it ends."""
    try:
        yield
    finally:
        for monitor in monitors:
            monitor.end()


def _all_of(steps: Iterator[Tensor], monitors: Sequence[Any]) -> Iterator[Tensor]:
    with _ended_after(monitors):
        yield from steps


class EndedByScores:
    """A stopping criterion of transformers: rows end when one of their scores says so."""

    eos_token_id = None
    """With this attribute, transformers fills rows that have ended with padding."""

    def __init__(self, scores: Sequence[Score]) -> None:
        self._scores = scores

    def __call__(self, ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        """Which rows have ended."""
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for score in self._scores:
            if (rows := score.ended()) is not None:
                ended = ended | rows.to(ids.device)
        return ended


def _check_seed(seed: object) -> None:
    if seed is not None and not isinstance(seed, Integral):
        raise HooklineError(f"seed must be a whole number or None, not {seed!r}")


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """While random numbers are drawn from a seed; None: from torch's own state."""
    _check_seed(seed)
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
