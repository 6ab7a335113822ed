"""A model provider for Inspect: its provider for transformers, with edits.

    from inspect_ai.model import get_model

    get_model("hookline/gpt2", edits="my-edits")                       # a hub id
    get_model("hookline/mine", hooked=model, edits=[("blocks.3.hook_mlp_out", zero())])

On the command line: `inspect eval task.py --model hookline/gpt2 -M edits=my-edits`.
"""

from __future__ import annotations

import copy
from typing import Any

from inspect_ai.model import GenerateConfig, ModelAPI, modelapi
from inspect_ai.model._providers.hf import HuggingFaceAPI  # not public, but it is what results are compared with

from hookline.errors import HooklineError
from hookline.evaluation import Edits, edits_for
from hookline.loading import hook
from hookline.model import HookedModel
from hookline.transformer.hub import EMBEDDED, find_model

_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("batch_size", "chat_template", "use_chat_template", "enable_thinking", "hidden_states")),
    "tokenizer_call_args": {},
    "do_sample": True,
}
"""The attributes that `HuggingFaceAPI` reads when it generates, for a model in memory."""


class EditedModel:
    """A model that generates with edits, in the thread that calls it: the provider generates in one of its own."""

    def __init__(self, hooked: HookedModel, edits: Edits) -> None:
        self.hooked = hooked
        self.edits = edits_for(hooked, edits)
        self.device = next(hooked.module.parameters()).device

    def generate(self, **kwargs: Any) -> Any:
        """Generate as `model.module.generate` does, with the edits."""
        with self.hooked.hooks(fwd_hooks=self.edits):
            module: Any = self.hooked.module
            return module.generate(**kwargs)


class HooklineAPI(HuggingFaceAPI):
    """Inspect's provider `hf` with edits: a model by name or in memory, and a folder of edits or `(name, edit)` pairs.

    All other arguments are those of the provider `hf`.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 (Inspect's own default)
        *,
        hooked: HookedModel | None = None,
        edits: Edits = None,
        **options: Any,
    ) -> None:
        if hooked is None:
            if model_name in EMBEDDED:
                options = {"model_path": str(find_model(model_name, {}).path)} | options
            super().__init__(model_name, base_url, api_key, config, **options)
        else:
            ModelAPI.__init__(self, model_name, base_url, api_key, [], config)
            self._take(hooked, options)
        self.model: Any = EditedModel(hook(self.model, self.tokenizer) if hooked is None else hooked, edits)

    def _take(self, hooked: HookedModel, options: dict[str, Any]) -> None:
        """Set what `HuggingFaceAPI` sets when it loads a model."""
        if unknown := set(options) - set(_OPTIONS):
            raise HooklineError(f"a model in memory does not take {sorted(unknown)}, but {sorted(_OPTIONS)}")
        for name, value in (_OPTIONS | options).items():
            setattr(self, name, value)
        self.tokenizer: Any = copy.deepcopy(hooked.tokenizer)
        self.tokenizer.pad_token, self.tokenizer.padding_side = self.tokenizer.eos_token, "left"


@modelapi(name="hookline")
def hookline_provider() -> type[ModelAPI]:
    """Return the provider of models whose names begin with `hookline/`."""
    return HooklineAPI
