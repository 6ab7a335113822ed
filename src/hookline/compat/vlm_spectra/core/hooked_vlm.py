"""HookedVLM: a hooked model with vlm-spectra's methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

import hookline
from hookline.compat.vlm_spectra.core.activation_cache import ActivationCache, Key
from hookline.compat.vlm_spectra.core.hooking import cached_places, caching, hooking
from hookline.compat.vlm_spectra.core.messages import InputsError, Template, chat_of, inputs_of, rendered
from hookline.compat.vlm_spectra.models.base_adapter import ModelAdapter
from hookline.engine import HookPoint, Run
from hookline.errors import HooklineError
from hookline.hooks.hooked_module import HookedModule
from hookline.model import HookedModel
from hookline.transformer.contexts import EagerAttention, EvalMode


class HookedVLM:
    """A vision-language model or language model, with hooks that declare their own locations.

        model = HookedVLM.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct")
        inputs = model.prepare_messages("What is this?", image)
        with model.run_with_cache(["lm.layer.post"]) as cache:
            model.forward(inputs)
        with model.run_with_hooks([PatchResidualHook(3, token_idx=-1, replacement=cache[("lm.layer.post", 3)][0, -1])]):
            model.generate(inputs, max_new_tokens=20)

    `hooked` is the same model with hookline's own methods.
    """

    def __init__(self, hooked: HookedModel, default_prompt: Template = None, model_name: str | None = None) -> None:
        self.hooked = hooked
        self.adapter = ModelAdapter(hooked)
        self.prompt = default_prompt
        self.model_name = model_name or hooked.cfg.model_name
        self.cache: dict[Key, Tensor] | None = None
        """The cache of the last `run_with_cache`."""

    @classmethod
    def from_pretrained(
        cls, model_name: str, device: str | torch.device = "auto", default_prompt: Template = None, **kwargs: Any
    ) -> Self:
        """Load a model and its processor from the hub or a folder. `device="auto"` is the GPU if there is one."""
        if device == "auto" and "device_map" not in kwargs:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        hooked = hookline.load(model_name, device=None if device == "auto" else device, **kwargs)
        return cls(hooked, default_prompt, str(model_name))

    @classmethod
    def from_model(cls, model: nn.Module, processor: Any = None, default_prompt: Template = None) -> Self:
        """Wrap a model with its processor, or with its tokenizer if it takes no images."""
        hooked = hookline.hook(model, processor)
        if not isinstance(hooked, HookedModel):
            raise HooklineError(f"{type(model).__name__} is not a supported language model")
        return cls(hooked, default_prompt)

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        return self.hooked.module

    @property
    def processor(self) -> Any:
        """The processor; the tokenizer of a model that has none."""
        return self.hooked.tokenizer if self.hooked.processor is None else self.hooked.processor

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs."""
        return self.hooked.device

    @property
    def lm_num_layers(self) -> int:
        """The number of layers of the language model."""
        return self.adapter.lm_num_layers

    def get_model_components(self) -> dict[str, Any]:
        """The final norm, the unembedding and the tokenizer."""
        norm, head = self.adapter.get_lm_norm(), self.adapter.get_lm_head()
        return {"norm": norm, "lm_head": head, "tokenizer": self.hooked.tokenizer}

    def run_with_hooks(self, hooks: Iterable[Any]) -> Run:
        """A context manager in which these hooks are active, including every step of generation.

        A hook is called as `(module, args, kwargs, output)`. It declares its location as `hook_point` and `layer`, or
        is passed with a name: `("lm.blocks.5.hook_resid_post", hook)`. Contexts nest.
        """
        return hooking(self.hooked, hooks)

    def run_with_cache(self, cache_names: Sequence[Any]) -> AbstractContextManager[ActivationCache]:
        """A context manager that caches the activations of these names, by name and layer.

        The cache contains activations after all hooks there, from the last forward pass if there are several.
        """
        return self._caching(cached_places(cache_names, self.hooked.index))

    @contextmanager
    def _caching(self, places: dict[Key, HookPoint]) -> Iterator[ActivationCache]:
        cache = ActivationCache()
        try:
            with caching(self.hooked, places, cache):
                yield cache
        finally:
            self.cache = dict(cache.items())

    def forward(
        self, inputs: Mapping[str, Any], require_grads: bool = False, return_dict: bool = True, **kwargs: Any
    ) -> Any:
        """The model's own output. `require_grads` enables gradients, and sets requires_grad on all parameters."""
        with self._running(require_grads, kwargs):
            arguments = {**self._placed(inputs), **self._placed(kwargs)}
            return HookedModule.__call__(self.hooked, return_dict=return_dict, **arguments)

    def __call__(self, inputs: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """`forward`, also with the inputs as keywords."""
        return self.forward({} if inputs is None else inputs, **kwargs)

    def generate(
        self,
        inputs: Mapping[str, Any],
        max_new_tokens: int = 512,
        require_grads: bool = False,
        do_sample: bool = False,
        return_dict_in_generate: bool = True,
        **kwargs: Any,
    ) -> Any:
        """The output of the model's `generate`: `.sequences`, unless `return_dict_in_generate` is False."""
        if require_grads:
            raise HooklineError("transformers generates without gradients: use forward(inputs, require_grads=True)")
        options = {"do_sample": do_sample, "return_dict_in_generate": return_dict_in_generate, **kwargs}
        with self._running(False, kwargs):
            return self.hooked.generate(**self._placed(inputs), max_new_tokens=max_new_tokens, **options)

    def prepare_inputs(
        self,
        text: str,
        image: Any = None,
        prompt_template: Template = None,
        append_text: str = "",
        assistant_prefill: str | None = "",
        return_text: bool = False,
    ) -> Any:
        """The inputs of `prepare_messages`, optionally with a template other than the default prompt."""
        images = None if image is None else [image]
        inputs, texts = self._prepared([text], images, prompt_template or self.prompt, append_text, assistant_prefill)
        return (inputs, texts[0]) if return_text else inputs

    def prepare_messages(
        self, task: str, image: Any = None, append_text: str = "", assistant_prefill: str | None = "",
        return_text: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """The inputs of a chat with a task and an image; with `return_text`, also the prompt.

        The answer begins with `assistant_prefill`, and `append_text` comes after everything.
        """
        kwargs |= {"append_text": append_text, "assistant_prefill": assistant_prefill, "return_text": return_text}
        return self.prepare_inputs(task, image, **kwargs)

    def prepare_messages_batch(
        self,
        tasks: Sequence[str],
        images: Sequence[Any],
        append_text: str = "",
        assistant_prefill: str | None = "",
        return_text: bool = False,
    ) -> Any:
        """The inputs of several chats, each with its image; padded on the left."""
        if len(tasks) != len(images):
            raise InputsError(f"the number of tasks, {len(tasks)}, must match the number of images, {len(images)}")
        inputs, texts = self._prepared(tasks, images, self.prompt, append_text, assistant_prefill)
        return (inputs, texts) if return_text else inputs

    def forward_batch(self, inputs_list: Any = None, tasks: Any = None, images: Any = None, **kwargs: Any) -> Any:
        """`forward` for several chats, or for the inputs of `prepare_messages_batch`."""
        return self.forward(self._batch(inputs_list, tasks, images), **kwargs)

    def generate_batch(self, inputs_list: Any = None, tasks: Any = None, images: Any = None, **kwargs: Any) -> Any:
        """`generate` for several chats, or for the inputs of `prepare_messages_batch`."""
        return self.generate(self._batch(inputs_list, tasks, images), **kwargs)

    def get_image_token_range(self, inputs: Mapping[str, Any]) -> tuple[int, int]:
        """The first and last position of the image, for inputs with one row."""
        places = self.hooked.image_token_mask(inputs)
        if len(places) > 1:
            raise InputsError(
                f"got {len(places)} rows, expected one: hooked.image_token_mask(inputs) works for several"
            )
        positions = places[0].nonzero().flatten().tolist()
        if not positions:
            raise InputsError("these inputs have no image")
        return positions[0], positions[-1]

    def _prepared(
        self, tasks: Sequence[str], images: Sequence[Any] | None, template: Template, after: str, prefill: str | None
    ) -> tuple[Any, list[str]]:
        """The inputs of these tasks and images, and the prompts."""
        options: Any = {"has_image": images is not None, "append_text": after, "assistant_prefill": prefill}
        texts = [chat_of(self.hooked, rendered(task, template), **options) for task in tasks]
        return inputs_of(self.hooked, texts, images), texts

    def _batch(self, inputs: Any, tasks: Any, images: Any) -> Mapping[str, Any]:
        is_given = [argument is not None for argument in (inputs, tasks, images)]
        if is_given not in ([True, False, False], [False, True, True]):
            raise InputsError("pass either inputs_list, or tasks and images")
        if inputs is None:
            return self.prepare_messages_batch(tasks, images)
        if isinstance(inputs, list) and len(inputs) != 1:
            raise InputsError(f"{len(inputs)} inputs cannot be joined into a batch: use prepare_messages_batch")
        return inputs[0] if isinstance(inputs, list) else inputs

    def _placed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs on the model's device."""
        if not isinstance(inputs, Mapping):
            what = type(inputs).__name__
            raise InputsError(f"inputs must come from prepare_messages or the processor, not a {what}")
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}

    @contextmanager
    def _running(self, require_grads: bool, options: Mapping[str, Any]) -> Iterator[None]:
        if require_grads:
            self.model.requires_grad_(True)
        attention = EagerAttention(self.model) if options.get("output_attentions") else nullcontext()
        with torch.set_grad_enabled(require_grads), EvalMode(self.model), attention:
            yield

    def __repr__(self) -> str:
        return f"HookedVLM({self.model_name!r}, {self.lm_num_layers} layers)"
