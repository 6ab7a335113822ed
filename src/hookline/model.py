"""HookedModel: a Hugging Face transformer with classic points, text in, and logits or loss out."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, Unpack, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hookline.engine import PermanentHooks, Plan, compiling, open_runs
from hookline.errors import HooklineError
from hookline.functions.keywords import is_dropped
from hookline.functions.listed_options import lists
from hookline.generation import GenerationMethods
from hookline.model_options import (
    CallOptions,
    ExploreOptions,
    Input,
    LastLogitsOptions,
    ReturnType,
)
from hookline.rerun.baseline import Baseline
from hookline.rerun.strategy import Strategy
from hookline.residual import ModelCache
from hookline.run_methods import RunMethods
from hookline.text.chats import Messages
from hookline.text.forward_pass import begin_pass, processors, tokenizers
from hookline.text.ragged import last_columns
from hookline.text.tokenizer import Side, Text
from hookline.transformer.anatomy import Anatomy
from hookline.transformer.cfg import Cfg, cfg_of, n_ids
from hookline.transformer.find_anatomy import find_anatomy
from hookline.transformer.index import ModelPoints
from hookline.transformer.losses import next_token_loss, own_loss
from hookline.transformer.memory.run_memory import check_counts, run_memory
from hookline.transformer.model_inputs import checked_mask
from hookline.transformer.output_options import ignored_option
from hookline.transformer.outputs import has_outcome, outcome
from hookline.transformer.resume import resumed, stream_at
from hookline.transformer.verify.report import Report, verify_model
from hookline.types import Filter, HookList
from hookline.vision.image_methods import ImageMethods, with_shapes
from hookline.vision.images import Images
from hookline.vision.inputs import Inputs
from hookline.weights.attribute_access import follow
from hookline.weights.matrices import Weights
from hookline.weights.processing import WeightProcessing


class _Unset(str):
    """A default that equals a value, and can be distinguished from the same value given by the caller."""


_LOGITS: Any = _Unset("logits")
_BRANCHES = ("blocks", "encoder", "decoder", "ln_final", "unembed", "vision", "projector")
_WEIGHTS = frozenset(Weights.names())


@compiling.verbs
class HookedModel(RunMethods, GenerationMethods, ImageMethods, WeightProcessing):
    """A language model, wrapped but not changed.

        >>> logits, cache = model.run_with_cache("When Mary and John went to the store")
        >>> cache["blocks.0.attn.hook_pattern"].shape
        torch.Size([1, 8, 8, 8])

    Points have TransformerLens's names, among others; every module's input and output is a point too.
    """

    _elsewhere: ClassVar[dict[str, str]] = {
        **GenerationMethods._elsewhere,
        "show_attention": 'explore(prompt) shows attention patterns, and cache["pattern", layer] has them',
        "logit_lens": "experiments.logit_lens.logit_lens(model, prompt), or the method logit_lens of a cache",
    }
    _points: ModelPoints
    _points_class: type[ModelPoints] = ModelPoints
    _cache_class = ModelCache
    tokenizer: Any
    processor: Any
    _last_inputs: Inputs | None

    def __init__(self, module: nn.Module, tokenizer: Any, anatomy: Anatomy, processor: Any = None) -> None:
        # Not by attribute: that would write to the model's own attribute of that name.
        vars(self).update(tokenizer=tokenizer, processor=processor, _last_inputs=None, _first_anatomy=anatomy)
        super().__init__(module)
        del vars(self)["_first_anatomy"]
        self._tell_tokenizer()

    def _find_points(self) -> ModelPoints:
        """The points of the model."""
        anatomy = vars(self).get("_first_anatomy") or find_anatomy(self.module)
        assert anatomy is not None  # it had one before
        return self._points_class(self.module, PermanentHooks.of(self.module), anatomy)

    def _tell_tokenizer(self) -> None:
        """Make the tokenizer known to code that has only the model, such as positions given by their text."""
        if self.tokenizer is not None:
            tokenizers[self._points.root] = self.tokenizer
        if self.processor is not None:
            processors[self._points.root] = self.processor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("hook_") or name in _BRANCHES:
            with suppress(AttributeError):
                return follow(self._points, name)
        if name in _WEIGHTS:
            return getattr(self.weights, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _WEIGHTS:
            raise AttributeError(f"{name} cannot be assigned: write into the parameters of model.module")
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name.partition(".")[0] for name in self.hook_dict)})

    @lists(ExploreOptions, SimpleNamespace(images=(), other_images=(), port=0, browser=True, height=720))
    def explore(
        self, prompt: str | Messages = "", other: str | Messages = "", **options: Unpack[ExploreOptions]
    ) -> Any:
        """Look into the model: in a notebook as a widget, otherwise in a browser, from a server on this machine.

        For the options and what it returns see `hookline.explore.explore`.
        """
        return import_module("hookline.explore").explore(self, prompt, other, **options)  # which is built on this

    @property
    def weights(self) -> Weights:
        """The weights in the classic layout, stacked over layers: `model.weights.W_Q`, or `model.W_Q` for short."""
        return Weights(self._points)

    @property
    def cfg(self) -> Cfg:
        """The model's configuration: n_layers, n_heads, d_model, …"""
        return cfg_of(self.module, self.anatomy)

    @property
    def text(self) -> Text:
        """The model's tokenizer, with its checks."""
        id_count = n_ids(self.module, self.anatomy) or self.cfg.d_vocab
        text: Text | None = vars(self).get("_text")
        if text is None or text.n_ids != id_count or text.tokenizer is not self.tokenizer:
            n_ctx = self.cfg.n_ctx
            text = vars(self)["_text"] = Text(self.tokenizer, n_ctx=n_ctx, n_ids=id_count, processor=self.processor)
        return text

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_last_inputs": None})
        self._tell_tokenizer()

    def __getstate__(self) -> dict[str, Any]:
        saved_names = ("module", "tokenizer", "processor", "_outer")
        return {name: value for name, value in super().__getstate__().items() if name in saved_names}

    @overload
    def __call__(
        self, input: Input = ..., return_type: Literal["logits", "loss"] = ..., **options: Unpack[CallOptions]
    ) -> Tensor: ...
    @overload
    def __call__(
        self, input: Input = ..., return_type: Literal["both"] = ..., **options: Unpack[CallOptions]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, input: Input = ..., return_type: None = ..., **options: Unpack[CallOptions]) -> None: ...
    @overload
    def __call__(
        self, input: Input = ..., return_type: Literal["output"] = ..., **options: Unpack[CallOptions]
    ) -> Any: ...
    @overload
    def __call__(
        self,
        input: Input = ...,
        return_type: ReturnType = ...,
        *,
        labels: Tensor | None,
        **options: Unpack[CallOptions],
    ) -> Any: ...
    def __call__(
        self,
        input: Input = None,
        return_type: ReturnType = _LOGITS,
        *,
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: Side | None = None,
        attention_mask: Tensor | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        tokens: Tensor | None = None,
        decoder_input: Input = None,
        images: Images | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model on text, token ids, or its own keyword inputs; return logits, the loss, both, or None.

        `return_type="output"` returns the model's own output object, with what options such as
        `output_hidden_states=True` add to it. Otherwise these options raise an error.

        `prepend_bos=True` puts the tokenizer's BOS token before each text, False adds no special tokens; the default is
        what the tokenizer does by itself. `images` go in with the text: see `to_inputs`.

        With `stop_at_layer` the layers from that one on do not run, and the residual stream that would enter it is
        returned. With `start_at_layer` the layers before it do not run, and the input is the residual stream that
        enters it; the loss then needs `tokens`, as do a few models that read them in later layers.

        An encoder-decoder model also takes `decoder_input`; the default is its start token. A vision model takes a
        float tensor of images. A model without a head returns its last hidden state as logits. With `labels` the loss
        is the model's own, and by default the model's own output is returned, so that Trainer and peft can train the
        wrapper; so it is if it has no logits.
        """
        if kwargs:
            self._check_options(kwargs)
        has_loss, some_logits = return_type in ("loss", "both"), kwargs.get("logits_to_keep")
        some_logits = None if isinstance(some_logits, int) and some_logits == 0 else some_logits  # 0 means all
        stops, starts = stop_at_layer is not None, start_at_layer is not None
        if return_type not in ("logits", "loss", "both", "output", None):
            raise HooklineError(f'return_type must be "logits", "loss", "both", "output" or None, not {return_type!r}')
        is_own, is_default = return_type == "output", isinstance(return_type, _Unset)
        config = self.anatomy.main.config
        ignored = kwargs and ignored_option(kwargs, config, is_own=is_own, is_default=is_default, starts=starts)
        for is_wrong, problem in (
            (
                ignored,
                f'{ignored} asks for the model\'s own output: pass return_type="output", or call model.module(…)',
            ),
            (stops and return_type != "logits", "stop_at_layer returns a stream: leave out return_type"),
            (has_loss and some_logits is not None, "a loss needs all logits: leave out logits_to_keep"),
            (loss_per_token and not has_loss, 'loss_per_token needs return_type="loss" or "both"'),
            (tokens is not None and not starts, "tokens= needs start_at_layer: pass them as the input"),
        ):
            if is_wrong:
                raise HooklineError(problem)
        run: dict[str, Any] = {"layer": stop_at_layer, "return_type": return_type, "per_token": loss_per_token}
        if start_at_layer is None:
            inputs = self._prepared(input, kwargs, attention_mask, prepend_bos, padding_side, images)
            has_logits = return_type in ("logits", "both", "output") and stop_at_layer is None
            if has_logits and "attention_mask" in inputs and padding_side is None and images is None:
                self._warn_if_ragged(input, inputs["attention_mask"])
            return self._run_to(inputs | self._decoder_inputs(decoder_input, inputs), **run)
        if any(option is not None for option in (prepend_bos, padding_side, decoder_input, images)):
            raise HooklineError("prepend_bos, padding_side, decoder_input and images do not apply with start_at_layer")
        skipping, entering, resumed_inputs = resumed(self._points, start_at_layer, input, tokens, kwargs)
        with skipping, entering:
            inputs = {**resumed_inputs, **kwargs, "use_cache": False}
            if attention_mask is not None:
                inputs["attention_mask"] = checked_mask(attention_mask, inputs, self._points)
            return self._run_to(inputs, **run)

    def _check_options(self, kwargs: dict[str, Any]) -> None:
        super()._check_options(kwargs)
        root, types = self._points.root, kwargs.get("token_type_ids")
        if isinstance(types, Tensor) and is_dropped(root, "token_type_ids") and bool(types.any()):
            raise HooklineError(f"token_type_ids would have no effect: {type(root).__name__} has no token types")

    def _call_arguments(self) -> frozenset[str]:
        made = (getattr(preprocessor, "model_input_names", ()) for preprocessor in (self.tokenizer, self.processor))
        return super()._call_arguments().union(*made)

    def _run_to(self, inputs: dict[str, Any], layer: int | None, return_type: ReturnType, per_token: bool) -> Any:
        runs = open_runs()
        if runs or self._points.permanent.steps:
            begin_pass(self._points.root, inputs, is_only=False not in [run.is_one_pass for run in runs])
        if layer is not None:
            return stream_at(self._points, layer, lambda: self._output(inputs))
        if return_type == "output":
            return self._output(inputs, is_own=True)
        output = self._output(inputs)
        if isinstance(return_type, _Unset) and (inputs.get("labels") is not None or not has_outcome(output)):
            return output
        if inputs.get("labels") is not None:
            return own_loss(output, return_type, per_token)
        logits = outcome(output)
        if return_type is None or return_type == "logits":
            return None if return_type is None else logits
        loss = self._loss(logits, inputs, per_token)
        return loss if return_type == "loss" else (logits, loss)

    def _output(self, inputs: dict[str, Any], *, is_own: bool = False) -> Any:
        """The model's output, from a compiled graph if there is one, which computes logits only, unless `is_own`."""
        runs = self._graphs
        if is_own and runs is not None:
            runs.refused('return_type="output" is more than the logits that a graph computes')
            runs = None
        compiled = None if runs is None or self._called is not self.module else runs.forward(inputs)
        return self._forward(**inputs) if compiled is None else self._run(compiled.run, (), {})

    def _loss(self, logits: Tensor, inputs: dict[str, Any], per_token: bool) -> Tensor:
        return next_token_loss(self._points, logits, inputs, per_token=per_token)

    def baseline(
        self,
        input: str | Tensor | Mapping[str, Any],
        *,
        images: Images | None = None,
        fwd_hooks: HookList = (),
        keep: Sequence[str] = (),
        strategy: Strategy | None = None,
    ) -> Baseline:
        """A run on one prompt, of which variants can be rerun fast: see `Baseline`. `keep` names points to record.

        The prompt may have `images`, or be the keyword inputs that `to_inputs` returns.
        """
        inputs = self._one_input(input, images)
        ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            raise HooklineError("a baseline takes one prompt without padding")
        return Baseline(self, ids, inputs=inputs, fwd_hooks=fwd_hooks, keep=keep, strategy=strategy)

    def _one_input(self, input: Any, images: Images | None) -> dict[str, Any]:
        """Keyword inputs from a prompt with or without images, or from keyword inputs; no others are added."""
        prompt, images = self._read(input, images)
        if isinstance(prompt, Mapping) or images is not None:
            return dict(self.to_inputs(prompt, images) if images is not None else prompt)
        if self._are_pixels(prompt):
            return {"pixel_values": prompt.to(self.device)}
        ids, mask = self._inputs(prompt, None, None)
        return {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}

    def plan(
        self,
        names_filter: Filter = None,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        input: Any = None,
        *,
        images: Images | None = None,
        new_tokens: int = 0,
        texts: int = 0,
        devices: int = 1,
    ) -> Plan:
        """What a run would do, without running it. The input may be text or tokens, as for a run.

        `plan(…).memory` says whether the run fits: weights, keys and values, the peak of the forward pass, points. It
        also counts `new_tokens` after the input, a store of `texts` such inputs, and several `devices` (tensor
        parallel). None of it needs weights: `hookline.load(name, device="meta")` has none.
        While `compile` is on, it says for every hook how it would run: as a table, traced, or "eager" and why.
        With `images` the model runs once, because shapes of image inputs cannot be inferred without data.
        """
        check_counts(new_tokens=new_tokens, texts=texts)
        prompt, images = self._read(input, images)
        if images is None:
            inputs = self._for_plan(prompt)
            if new_tokens and isinstance(inputs, dict) and "input_ids" in inputs:
                self._check_room(inputs["input_ids"].shape[-1] + new_tokens)
            plan = super().plan(names_filter, fwd_hooks, bwd_hooks, inputs)
            if isinstance(inputs, dict):
                more = {"new_tokens": new_tokens, "texts": texts, "devices": devices}
                plan = replace(plan, estimate=partial(run_memory, self._points.root, plan, inputs, **more))
            if (runs := self._graphs) is None:
                return plan
            hooks = self._hook_actions(fwd_hooks, bwd_hooks)
            return runs.annotated(plan, hooks, [self._points.find(row.name) for row in plan if row.use == "cache"])
        return with_shapes(self, super().plan(names_filter, fwd_hooks, bwd_hooks), self.to_inputs(prompt, images))

    def points(
        self,
        names_filter: Filter = None,
        input: Any = None,
        *,
        type: builtins.type[nn.Module] | None = None,
        images: Images | None = None,
    ) -> Plan:
        """The points as a table; with an input, text, tokens or text with images (see `plan`), also their shapes.

        `type` selects the outputs of all modules of exactly this class: `model.points(type=nn.LayerNorm)`.

        Examples:
            >>> model.points("blocks.*.attn.hook_z", "Hello")
            point                 module  axes     shape
            blocks.0.attn.hook_z  Conv1D  b p h e  [1, 1, 8, 16]
            blocks.1.attn.hook_z  Conv1D  b p h e  [1, 1, 8, 16]
            blocks.2.attn.hook_z  Conv1D  b p h e  [1, 1, 8, 16]
            blocks.3.attn.hook_z  Conv1D  b p h e  [1, 1, 8, 16]
            4 points at 4 modules
        """
        prompt, images = self._read(input, images)
        if images is None:
            return super().points(names_filter, self._for_plan(prompt), type=type)
        return with_shapes(self, super().points(names_filter, type=type), self.to_inputs(prompt, images))

    def example_tokens(self) -> Int[Tensor, "batch pos"]:
        """Two short rows of token ids, for trying things out."""
        return (torch.arange(14, device=self.device) % max(1, self.cfg.d_vocab - 3) + 3).view(2, 7)

    @lists(LastLogitsOptions)
    def last_logits(
        self,
        input: Input | Mapping[str, Any] = None,
        *,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        padding_side: Side | None = None,
        images: Images | None = None,
        **options: Unpack[LastLogitsOptions],
    ) -> Float[Tensor, "batch d_vocab"]:
        """The logits at each row's last token that is not padding: the prediction of what comes after each text.

            model.last_logits(["a", "a longer text"]).argmax(-1)       # the next token of each

        The input is text, tokens, or keyword inputs, as for a call. Active hooks fire as on any call.
        """
        keywords: dict[str, Any] = {**options, **input} if isinstance(input, Mapping) else {**options}
        for name in ("stop_at_layer", "start_at_layer", "return_type", "loss_per_token", "logits_to_keep", "labels"):
            if keywords.pop(name, None) is not None:
                raise HooklineError(f"last_logits runs all layers, and returns only logits: leave out {name}")
        decoder_input = keywords.pop("decoder_input", None)
        prompt = None if isinstance(input, Mapping) else input
        inputs = self._prepared(prompt, keywords, attention_mask, prepend_bos, padding_side, images)
        inputs |= self._decoder_inputs(decoder_input, inputs)
        logits = self(None, "logits", **inputs)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise HooklineError("last_logits needs a model that returns logits for every position")
        mask = inputs.get("decoder_attention_mask" if self.anatomy.is_encoder_decoder else "attention_mask")
        tokens = inputs.get("decoder_input_ids" if self.anatomy.is_encoder_decoder else "input_ids")
        if mask is not None and isinstance(tokens, Tensor) and tokens.shape[1] != logits.shape[1]:
            n, width = tokens.shape[1], logits.shape[1]
            raise HooklineError(f"last_logits: the model returned logits at {width} positions for {n} tokens")
        return logits[torch.arange(len(logits), device=logits.device), last_columns(mask, logits)]

    def verify(  # type: ignore[override]
        self,
        input: str | Tensor | Mapping[str, Any] | None = None,
        *,
        images: Images | None = None,
        progress: bool = True,
    ) -> Report:
        """Verify every point of this model: a table of what is verified, what is not available, and what fails.

        The input is text, tokens or keyword inputs; points of the vision tower are verified if it has `images`.
        Without an input an example is used, with an image if there is a processor.
        """
        is_tokens = images is None and not isinstance(input, Mapping)
        if is_tokens and input is None:
            example = self.example_inputs()
            if example is not None:
                return verify_model(self, dict(example), progress=progress)
            if getattr(self.module, "main_input_name", None) == "pixel_values" and not self.cfg.d_vocab:
                raise HooklineError("this model takes images and no text: verify(images=[…])")
        inputs = self._one_input(self.example_tokens() if is_tokens and input is None else input, images)
        if is_tokens and self.anatomy.is_encoder_decoder:
            inputs["decoder_input_ids"] = self.example_tokens().flip(1)[: len(inputs["input_ids"])]
        return verify_model(self, inputs, progress=progress)

    def __repr__(self) -> str:
        cfg = self.cfg
        return (
            f"HookedModel({cfg.architecture}: {cfg.n_layers} layers, {cfg.n_heads} heads, d_model {cfg.d_model}, "
            f"{len(self.hook_dict)} points{self._points.added_hooks_text()})"
        )
