"""HookedModel: a Hugging Face transformer with classic points, text in, and logits or loss out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hookline.engine.cache import ActivationCache
from hookline.engine.hooked import OPTIONS, HookList
from hookline.engine.keywords import check_keyword
from hookline.engine.names import Filter
from hookline.engine.permanent import standing_of
from hookline.engine.plan import Plan
from hookline.engine.points import hook_action
from hookline.engine.recorder import StopForward
from hookline.engine.signatures import parameters_of
from hookline.engine.taps import active
from hookline.errors import HooklineError, HooklineWarning, users_level
from hookline.rerun.baseline import Baseline
from hookline.rerun.strategy import Strategy
from hookline.residual import ModelCache
from hookline.text.forward_pass import begin_pass, processors, tokenizers
from hookline.text.image_tokens import image_token_id
from hookline.text.loss import lm_loss
from hookline.text.ragged import last_columns, warn_of_ragged
from hookline.text.token_methods import TokenHelpers
from hookline.text.tokenizer import Side, Text, shown_prompt
from hookline.transformer.cfg import Cfg, cfg_of, device_of, n_ids
from hookline.transformer.index import ModelPoints
from hookline.transformer.resume import resumed
from hookline.transformer.roles import Anatomy, find_anatomy
from hookline.transformer.verify.probe import outcome
from hookline.transformer.verify.report import Report, verify
from hookline.transformer.wrapped import WrappedTransformer
from hookline.vision.image_methods import Seeing
from hookline.vision.images import Pictures
from hookline.vision.inputs import Inputs
from hookline.vision.shapes import with_shapes
from hookline.weights.attribute_access import follow
from hookline.weights.matrices import Weights
from hookline.weights.processing import WeightProcessing

ReturnType = Literal["logits", "loss", "both"] | None
_BRANCHES = ("blocks", "encoder", "decoder", "ln_final", "unembed", "vision", "projector")


class HookedModel(WrappedTransformer, TokenHelpers, Seeing, Weights, WeightProcessing):
    """A language model, wrapped but not changed.

        model = hookline.hook(hf_model, tokenizer)
        logits, cache = model.run_with_cache("When Mary and John went to the store")
        cache["blocks.0.attn.hook_pattern"].shape      # [1, heads, positions, positions]

    Points have their classic names, and any other name they go by; every module's input and output is there too.
    """

    _points: ModelPoints
    _cache_class = ModelCache
    tokenizer: Any
    processor: Any
    _last_inputs: Inputs | None

    def __init__(self, module: nn.Module, tokenizer: Any, anatomy: Anatomy, processor: Any = None) -> None:
        super().__init__(module)
        # Not by attribute: a model may have something of these names itself, which would be written to.
        vars(self).update(tokenizer=tokenizer, processor=processor, _last_inputs=None)
        self._points = ModelPoints(module, standing_of(module), anatomy)
        self._tell_tokenizer()

    def _tell_tokenizer(self) -> None:
        """Let positions be found by their text, also where only the model is at hand."""
        if self.tokenizer is not None:
            tokenizers[self._points.root] = self.tokenizer
        if self.processor is not None:
            processors[self._points.root] = self.processor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("hook_") or name in _BRANCHES:
            with suppress(AttributeError):
                return follow(self._points, name)
        return super().__getattr__(name)

    @property
    def _anatomy(self) -> Anatomy:
        return self._points.anatomy

    @property
    def cfg(self) -> Cfg:
        """The model's sizes and kinds, in the field's words."""
        return cfg_of(self.module, self._anatomy)

    @property
    def text(self) -> Text:
        """The tokenizer's side of things."""
        known = n_ids(self.module, self._anatomy) or self.cfg.d_vocab
        found: Text | None = vars(self).get("_text")
        if found is None or found.n_ids != known or found.tokenizer is not self.tokenizer:
            found = vars(self)["_text"] = Text(self.tokenizer, n_ctx=self.cfg.n_ctx, n_ids=known)
        return found

    @property
    def _device(self) -> torch.device:
        return device_of(self.module, self._anatomy)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _last_inputs=None)
        anatomy = find_anatomy(self.module)
        assert anatomy is not None  # it had one before
        self._points = ModelPoints(self.module, standing_of(self.module), anatomy)
        self._tell_tokenizer()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("module", "tokenizer", "processor", "_outer")
        return {name: value for name, value in vars(self).items() if name in kept}

    def __call__(
        self,
        input: str | Sequence[str] | Tensor | None = None,
        return_type: ReturnType = "logits",
        *,
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: Side | None = None,
        attention_mask: Tensor | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        tokens: Tensor | None = None,
        decoder_input: str | Sequence[str] | Tensor | None = None,
        images: Pictures | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model on text, token ids, or its own keyword inputs; give logits, the loss, both, or nothing.

        `images` are pictures that go in with the text, each at its place in it: see `to_inputs`.
        With `stop_at_layer` no layer from that one on is run, and the residual stream that would enter it is given.
        With `start_at_layer` no layer before that one is run, and the input is the residual stream that enters it;
        `tokens` are needed beside it for the loss, and by the few models that look at them in later layers. A model
        with an encoder and a decoder takes `decoder_input` as well; by default it is the token that it starts with. Of
        a model without a head, the last hidden state is given for logits. With `labels` the loss is the model's own,
        and the default is the model's own output, which has it: so Trainer and peft can train the wrapper.
        """
        self._check_options(kwargs)
        if kwargs.get("return_dict") is False:
            raise HooklineError("return_dict=False gives a bare tuple: call model.module for that")
        if stop_at_layer is not None and return_type != "logits":
            raise HooklineError("with stop_at_layer the stream is given: there are no logits, and no loss")
        if return_type not in ("logits", "loss", "both", None):
            raise HooklineError(f'return_type must be "logits", "loss", "both" or None, not {return_type!r}')
        if loss_per_token and return_type not in ("loss", "both"):
            raise HooklineError('loss_per_token is about the loss: ask for return_type="loss" or "both"')
        if images is not None:
            if not (attention_mask is None and start_at_layer is None):
                raise HooklineError("images make all inputs, their attention_mask too, and go in at the first layer")
            kwargs |= self._with_pictures(input, images, prepend_bos, padding_side, kwargs)
            kwargs |= {"stop_at_layer": stop_at_layer, "tokens": tokens, "decoder_input": decoder_input}
            return self(None, return_type, loss_per_token=loss_per_token, **kwargs)
        if start_at_layer is not None:
            if not (prepend_bos is None and padding_side is None and decoder_input is None):
                raise HooklineError("prepend_bos, padding_side and decoder_input are for text: the input is a stream")
            skipping, entering, given = resumed(self._points, start_at_layer, input, tokens, kwargs)
            with skipping, entering:
                inputs = {**given, **kwargs, "use_cache": False}
                if attention_mask is not None:
                    inputs["attention_mask"] = _checked_mask(attention_mask, inputs)
                return self._run_to(stop_at_layer, inputs, return_type, loss_per_token)
        if tokens is not None:
            raise HooklineError("tokens are the input itself, unless start_at_layer says that the input is a stream")
        if isinstance(input, Tensor | None) and not (prepend_bos is None and padding_side is None):
            raise HooklineError("prepend_bos and padding_side are for text: tokens are taken as they are")
        if input is not None and "input_ids" in kwargs:
            raise HooklineError("the tokens are given twice: as the input, and as input_ids")
        if input is not None:
            kwargs["input_ids"], mask = self._inputs(
                input, prepend_bos, padding_side, has_mask=attention_mask is not None
            )
            gives_logits = return_type in ("logits", "both") and stop_at_layer is None
            if mask is not None and gives_logits and padding_side is None and not isinstance(input, Tensor):
                warn_of_ragged(mask, is_causal=self._anatomy.main.name != "encoder")
            kwargs |= self._positions(mask) if attention_mask is None and "position_ids" not in kwargs else {}
            attention_mask = attention_mask if attention_mask is not None else mask
        if attention_mask is not None:
            kwargs["attention_mask"] = _checked_mask(attention_mask, kwargs)
        kwargs |= self._decoder_inputs(decoder_input, kwargs)
        self._remember(kwargs)
        return self._run_to(stop_at_layer, kwargs, return_type, loss_per_token)

    def _check_keyword(self, name: str) -> None:
        made = (*getattr(self.tokenizer, "model_input_names", ()), *getattr(self.processor, "model_input_names", ()))
        if name not in made:
            check_keyword(self._points.root, name, OPTIONS)

    def _positions(self, mask: Tensor | None) -> dict[str, Tensor]:
        """Where text is padded on the left, positions count from its first token, in models that can be told so."""
        if mask is None or mask[:, 0].all() or "position_ids" not in parameters_of(self._points.root)[0]:
            return {}
        return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    def _decoder_inputs(self, decoder_input: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """What goes into the decoder of a model that has one."""
        if not self._anatomy.is_encoder_decoder:
            if decoder_input is not None:
                raise HooklineError("decoder_input is for a model with an encoder and a decoder: this has one stack")
            return {}
        if decoder_input is not None and "decoder_input_ids" in inputs:
            raise HooklineError("the decoder's tokens are given twice: as decoder_input, and as decoder_input_ids")
        if decoder_input is not None:
            ids, mask = self._inputs(decoder_input, None, None)
            return {"decoder_input_ids": ids, **({} if mask is None else {"decoder_attention_mask": mask})}
        if any(name in inputs for name in ("decoder_input_ids", "decoder_inputs_embeds", "labels")):
            return {}
        config: Any = self.module.config
        rows = next((x.shape[0] for x in inputs.values() if isinstance(x, Tensor)), 1)
        start = getattr(config, "decoder_start_token_id", None)
        start = start if start is not None else getattr(self.module.generation_config, "decoder_start_token_id", None)
        if start is None:
            raise HooklineError("give decoder_input: this model does not say what its decoder starts with")
        return {"decoder_input_ids": torch.full((rows, 1), start, device=self._device)}

    def _run_to(self, layer: int | None, inputs: dict[str, Any], return_type: ReturnType, per_token: bool) -> Any:
        if active.get() or self._points.standing.steps:
            begin_pass(self._points.root, inputs, is_only=all(run.is_one_pass for run in active.get()))
        if layer is not None:
            return self._stream_at(layer, inputs)
        output = self._forward(**inputs)
        if inputs.get("labels") is not None:
            return _for_labels(output, return_type, per_token)
        return self._result(outcome(output), inputs, return_type, per_token)

    def _stream_at(self, layer: int, inputs: dict[str, Any]) -> Tensor:
        """What enters a layer, or leaves the last; neither it nor what comes after it is run."""
        n_layers = len(self._anatomy.blocks)
        if layer not in range(-n_layers, n_layers + 1):
            raise HooklineError(f"stop_at_layer={layer}, but the model has {n_layers} layers")
        kept: list[Tensor] = []

        def stop(resid: Tensor) -> None:
            kept.append(resid)
            raise StopForward

        name = f"{layer % n_layers}.hook_resid_pre" if layer < n_layers else f"{layer - 1}.hook_resid_post"
        point = self._points.find(f"{self._anatomy.main.name}.{name}")
        stopping = hook_action(point, stop, "fwd")
        stopping.must_fire = False
        with self._one_pass([stopping]), suppress(StopForward):
            self._forward(**inputs)
        if not kept:
            raise HooklineError(f"stop_at_layer={layer} is before the layer that the run starts at")
        return kept[0]

    def run_with_cache(self, *args: Any, **kwargs: Any) -> tuple[Any, ModelCache]:
        """The output, and the activations; see `HookedModule.run_with_cache`. The cache knows the logits too."""
        output, cache = super().run_with_cache(*args, **kwargs)
        logits = output[0] if isinstance(output, tuple) else output
        logits = logits.get("logits") if isinstance(logits, Mapping) else logits
        is_whole = kwargs.get("stop_at_layer") is None
        if isinstance(cache, ModelCache) and is_whole and isinstance(logits, Tensor) and logits.ndim == 3:
            cache.keep_logits(logits.detach())
        return output, cache  # type: ignore[return-value]

    def baseline(
        self,
        input: str | Tensor | Mapping[str, Any],
        *,
        images: Pictures | None = None,
        fwd_hooks: HookList = (),
        keep: Sequence[str] = (),
        strategy: Strategy | None = None,
    ) -> Baseline:
        """A run on one text of which variants can be run fast: see `Baseline`. `keep` names what it is to record.

        The text may have pictures: `images`, or for both what `to_inputs` gives.
        """
        if images is not None or isinstance(input, Mapping):
            more = dict(input if isinstance(input, Mapping) else self.to_inputs(input, images))  # type: ignore[arg-type]
            ids, mask = more.pop("input_ids"), more.pop("attention_mask", None)
            if mask is not None and not bool(mask.all()):
                raise HooklineError("a baseline is of one text without padding")
            return Baseline(self, ids, inputs=more, fwd_hooks=fwd_hooks, keep=keep, strategy=strategy)
        ids, mask = self._inputs(input, None, None)
        if mask is not None:
            raise HooklineError("a baseline is of one text without padding")
        return Baseline(self, ids, fwd_hooks=fwd_hooks, keep=keep, strategy=strategy)

    def cache(self, *args: Any, stop_early: bool = True, **kwargs: Any) -> ActivationCache:
        """The activations only. No layer is run after the last one that is needed."""
        if len(args) < 2 and kwargs.get("stop_at_layer") is None:
            kwargs.setdefault("return_type", None)
        return super().cache(*args, stop_early=stop_early, **kwargs)

    def plan(
        self,
        names_filter: Filter = None,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        input: Any = None,
        *,
        images: Pictures | None = None,
    ) -> Plan:
        """What a run would touch, without running. The input may be text or tokens, as for a run.

        With `images` the model is run once, on them: models that take pictures cannot be followed without data.
        """
        if images is None:
            return super().plan(names_filter, fwd_hooks, bwd_hooks, self._for_plan(input))
        return with_shapes(self, super().plan(names_filter, fwd_hooks, bwd_hooks), self.to_inputs(input, images))

    def points(self, names_filter: Filter = None, input: Any = None, *, images: Pictures | None = None) -> Plan:
        """The points as a table; with an input, text, tokens or text with images (see `plan`), also their shapes."""
        if images is None:
            return super().points(names_filter, self._for_plan(input))
        return with_shapes(self, super().points(names_filter), self.to_inputs(input, images))

    def _for_plan(self, input: Any) -> Any:
        if input is None or isinstance(input, dict):
            return input
        ids, mask = self._inputs(input, None, None)
        inputs = {"input_ids": ids, "attention_mask": mask if mask is not None else torch.ones_like(ids)}
        return inputs | self._decoder_inputs(None, inputs)

    def _text_inputs(self, prompt: Any, prepend_bos: bool | None, padding_side: Side | None) -> dict[str, Any]:
        ids, mask = self._inputs(prompt, prepend_bos, padding_side)
        given = {"input_ids": ids, "attention_mask": mask if mask is not None else torch.ones_like(ids)}
        return given | self._positions(mask)

    def example_tokens(self) -> Int[Tensor, "batch pos"]:
        """Two short rows of tokens, to try things on."""
        return (torch.arange(14, device=self._device) % max(1, self.cfg.d_vocab - 3) + 3).view(2, 7)

    def _inputs(
        self,
        input: str | Sequence[str] | Tensor,
        prepend_bos: bool | None,
        padding_side: Side | None,
        *,
        has_mask: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self._check_prompt(input)
        if not isinstance(input, str | Sequence | Tensor):
            raise HooklineError(
                f"the input is text, several texts, or a tensor of token ids, not {shown_prompt(input)}"
            )
        if not isinstance(input, str | Tensor) and any(
            isinstance(each, int | Sequence) and not isinstance(each, str) for each in input
        ):
            raise HooklineError(f"token ids are given as a tensor, torch.tensor(…), not as a list: {input!r}")
        if not isinstance(input, Tensor):
            ids, mask = self.text.encode(input, prepend_bos=prepend_bos, padding_side=padding_side)
            return ids.to(self._device), None if mask.all() else mask.to(self._device)
        ids = input[None] if input.ndim == 1 else input
        if ids.ndim != 2:
            raise HooklineError(f"tokens are one row, or a batch of rows, not a tensor of shape {tuple(input.shape)}")
        self.text.check_ids(ids)
        known: Tensor | None = getattr(ids, "padding_mask", None)  # of what `to_tokens` gave
        if known is not None and not self.text.is_padded(ids, known):
            known = None  # it was written to
        if known is None and not has_mask:
            self._warn_of_padding(ids)
        return ids.to(self._device), known.to(self._device) if known is not None else None

    def _warn_of_padding(self, ids: Tensor) -> None:
        """Tokens are taken as they are; but those that look padded are probably meant to be masked."""
        row = self.text.padded_row(ids) if len(ids) > 1 and self.tokenizer is not None else None
        if row is not None:
            warnings.warn(
                f"row {row} of these tokens looks padded, but there is no attention_mask: pass one, or the texts "
                f"themselves. (What to_tokens gives remembers its padding, but not what is made from that.)",
                HooklineWarning,
                stacklevel=users_level(),
            )

    def _image_positions(self, tokens: Tensor) -> Tensor | None:
        """True where a token stands for an image; None for a model without a vision tower."""
        picture = image_token_id(self.module.config) if self._anatomy.towers else None
        return tokens == picture if picture is not None else None

    def last_logits(
        self,
        input: str | Sequence[str] | Tensor | Mapping[str, Any] | None = None,
        *,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        padding_side: Side | None = None,
        images: Pictures | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "batch d_vocab"]:
        """The logits at each row's last real token, whatever the padding: those of what comes after each text.

            model.last_logits(["a", "a longer text"]).argmax(-1)       # the next token of each

        The input is text, tokens, or keyword inputs, as for a call. Hooks that are active act as on any call.
        """
        given = {**kwargs, **input} if isinstance(input, Mapping) else kwargs
        if given.get("stop_at_layer") is not None or given.get("start_at_layer") is not None:
            raise HooklineError("last_logits runs all layers, on text, tokens or keyword inputs")
        if images is not None:
            given |= self._with_pictures(input, images, prepend_bos, padding_side, given)
        elif input is not None and not isinstance(input, Mapping):
            ids, mask = self._inputs(input, prepend_bos, padding_side, has_mask=attention_mask is not None)
            given |= {"input_ids": ids} | ({} if "position_ids" in given else self._positions(mask))
            attention_mask = mask if attention_mask is None else attention_mask
        mask = attention_mask if attention_mask is not None else given.pop("attention_mask", None)
        given |= self._decoder_inputs(given.pop("decoder_input", None), given)
        logits = self(None, "logits", attention_mask=mask, **given)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise HooklineError("last_logits is for models that give logits for every position, and takes no labels")
        if self._anatomy.is_encoder_decoder:
            mask = given.get("decoder_attention_mask")
        return logits[torch.arange(len(logits), device=logits.device), last_columns(mask, logits)]

    def _result(self, logits: Tensor, inputs: dict[str, Any], return_type: ReturnType, per_token: bool) -> Any:
        if return_type is None:
            return None
        if return_type == "logits":
            return logits
        if self._anatomy.main.name == "encoder" or logits.ndim != 3 or logits.shape[-1] != self.cfg.d_vocab:
            raise HooklineError("the loss is that of the next token: this is no model that predicts it")
        tokens = "decoder_input_ids" if self._anatomy.is_encoder_decoder else "input_ids"
        if tokens not in inputs:
            raise HooklineError("the loss is that of the tokens: give tokens or text, not embeddings")
        if logits.shape[1] < 2:
            raise HooklineError("the loss is that of the next token: give at least two tokens")
        mask = inputs.get("decoder_attention_mask" if tokens != "input_ids" else "attention_mask")
        seen = self._image_positions(inputs[tokens])
        if seen is not None and bool(seen[:, 1:].all()):
            raise HooklineError("the loss is that of text: there is none after the first position, only pictures")
        loss = lm_loss(logits, inputs[tokens], mask, seen, per_token=per_token)
        return loss if return_type == "loss" else (logits, loss)

    def generate(
        self,
        input: str | Sequence[str] | Tensor | None = None,
        max_new_tokens: int = 20,
        *,
        attention_mask: Tensor | None = None,
        images: Pictures | None = None,
        **kwargs: Any,
    ) -> Any:
        """Continue the prompt with the model's own generation, hooks and all. Text gives text, ids give ids.

        `images` are pictures that go in with the text; keyword inputs, as of `to_inputs`, give ids.
        """
        if "fwd_hooks" in kwargs or "bwd_hooks" in kwargs:
            raise HooklineError("generate takes no hooks: with model.hooks(fwd_hooks=[…]): model.generate(…)")
        if kwargs.get("cache_implementation") == "paged" and (active.get() or self._points.standing.steps):
            raise HooklineError(
                "continuous batching (cache_implementation='paged') runs the model in another thread, with several "
                "texts packed into one row: hooks cannot be used in it. Generate with another cache"
            )
        is_text = input is not None and not isinstance(input, Tensor)
        if images is not None:
            if attention_mask is not None:
                raise HooklineError("images make all inputs, their attention_mask too")
            kwargs |= self._with_pictures(input, images, None, "left", kwargs)
        given = kwargs.pop("input_ids", None)
        if (given is None) == (input is None or images is not None):
            raise HooklineError("give the prompt once: as text or tokens, or as input_ids= with other keyword inputs")
        if given is not None:
            kwargs.pop("position_ids", None)  # generation counts by itself
            ids, found = given, kwargs.pop("attention_mask", None)
            self._remember({"input_ids": ids, **kwargs})
        else:
            side: Side | None = "left" if is_text else None
            ids, found = self._inputs(input, None, side, has_mask=attention_mask is not None)  # type: ignore[arg-type]
        self._check_room(ids.shape[1] + max_new_tokens)
        mask = attention_mask if attention_mask is not None else found
        if mask is not None and not self._anatomy.is_encoder_decoder and not bool(mask[:, -1].all()):
            raise HooklineError(
                "these tokens are padded on the right, and new ones would come after the padding: give the texts, or "
                'to_tokens(…, padding_side="left")'
            )
        pad: Any = self.module.generation_config.pad_token_id  # type: ignore[union-attr]
        if mask is None and (is_text or pad is None or not bool(ids.eq(pad).any())):
            mask = torch.ones_like(ids)  # else the model's own generate tells padding by its token
        if mask is not None:
            kwargs["attention_mask"] = _checked_mask(mask, {"input_ids": ids})
        if active.get() and (self._anatomy.is_encoder_decoder or self._anatomy.towers):
            begin_pass(self._points.root, {"input_ids": ids, "attention_mask": mask})  # before the model's own forward
        how = {"max_new_tokens": max_new_tokens, **kwargs}
        new = self._run(self.module.generate, (ids,), how)  # type: ignore[arg-type]
        if not is_text:
            return new
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts[0] if isinstance(input, str) else texts

    def _check_room(self, length: int) -> None:
        """Where positions are learned, there are none after the last."""
        cfg = self.cfg
        if self._anatomy.main.pos_embed is not None and cfg.n_ctx is not None and length > cfg.n_ctx:
            raise HooklineError(
                f"the prompt and the new tokens are {length}, but this model's context has room for {cfg.n_ctx}"
            )

    def verify(
        self, input: str | Tensor | Mapping[str, Any] | None = None, *, images: Pictures | None = None
    ) -> Report:
        """Prove every point on this model: a table of what is proved, what is not to be had, and what fails.

        The input is text, tokens or keyword inputs; points of the part that sees are tried if there are `images` in it.
        Without an input an example is made, with a picture where a processor can make one.
        """
        if images is not None:
            return verify(self, dict(self.to_inputs(input, images)))  # type: ignore[arg-type]
        if isinstance(input, Mapping):
            return verify(self, dict(input))
        example = self.example_inputs() if input is None else None
        if example is not None:
            return verify(self, dict(example))
        if input is None and getattr(self.module, "main_input_name", None) == "pixel_values" and not self.cfg.d_vocab:
            raise HooklineError("this model takes pictures and no text: verify(images=[…])")
        ids, _ = self._inputs(self.example_tokens() if input is None else input, None, None)
        inputs = {"input_ids": ids}
        if self._anatomy.is_encoder_decoder:
            inputs["decoder_input_ids"] = self.example_tokens().flip(1)[: len(ids)]
        return verify(self, inputs)

    def __repr__(self) -> str:
        cfg = self.cfg
        return (
            f"HookedModel({cfg.architecture}: {cfg.n_layers} layers, {cfg.n_heads} heads, d_model {cfg.d_model}, "
            f"{len(self.hook_dict)} points)"
        )


def _for_labels(output: Any, return_type: ReturnType, per_token: bool) -> Any:
    """What was asked for of an output for which labels were given, and which has the model's own loss."""
    if per_token:
        raise HooklineError("loss_per_token is not available with labels: the model's own loss is one number")
    if output.get("loss") is None:
        raise HooklineError("labels were given, but the model returned no loss")
    if return_type is None:
        return None
    return {"logits": output, "loss": output["loss"], "both": (outcome(output), output["loss"])}[return_type]


def _checked_mask(mask: Tensor, inputs: dict[str, Any]) -> Tensor:
    """A mask over the tokens must be as they are; one laid out for the attention itself is the model's matter."""
    ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if mask.ndim > 2 or ids is None or inputs.get("past_key_values") is not None:
        return mask
    if mask.shape != ids.shape[:2]:
        raise HooklineError(
            f"attention_mask has the shape {list(mask.shape)}, but the tokens are {list(ids.shape[:2])}"
        )
    return mask
