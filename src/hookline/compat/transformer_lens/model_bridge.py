"""TransformerBridge: weights are not processed by default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl import entries
from hookline.compat.transformer_lens._impl.absent import METHODS, refusing
from hookline.compat.transformer_lens._impl.bridge_registry import BridgePoints, bridge_names
from hookline.compat.transformer_lens._impl.describe import NO_BOS_IN_BRIDGE
from hookline.compat.transformer_lens._impl.hooked_transformer import HookedTransformer
from hookline.compat.transformer_lens._impl.pretrained import refuse
from hookline.engine import HookPoint
from hookline.errors import UnknownPointError
from hookline.model import HookedModel

_OPTIONS = {"hf_model", "device_map", "revision", "checkpoint_index", "checkpoint_value"}


class TransformerBridge(HookedTransformer):
    """A HookedTransformer without weight processing. Both naming schemes always work.

    bridge = TransformerBridge.boot_transformers("gpt2", device="cpu")
    logits, cache = bridge.run_with_cache("Hello, world")
    cache["blocks.5.attn.q.hook_out"]               # the same as cache["blocks.5.attn.hook_q"]
    """

    _no_bos = NO_BOS_IN_BRIDGE
    compatibility_mode = False
    hook_aliases: ClassVar[dict[str, str]] = {}

    @classmethod
    def boot_transformers(
        cls,
        model_name: str,
        hf_config_overrides: dict[str, Any] | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        tokenizer: Any = None,
        load_weights: bool = True,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Load a model by name or from a folder, or wrap one in memory (`hf_model`).

        Other options are `device_map`, `revision`, `checkpoint_index` and `checkpoint_value`.
        """
        refuse(
            load_weights=None if load_weights else "make the model from its configuration, and pass it as hf_model",
            **dict.fromkeys(
                set(kwargs) - _OPTIONS, "boot_transformers takes what TransformerLens 3.5 documents for it"
            ),
        )
        options = {name: value for name, value in kwargs.items() if value is not None} | (hf_config_overrides or {})
        if trust_remote_code:
            options["trust_remote_code"] = True
        return cls.from_pretrained_no_processing(model_name, device=device, dtype=dtype, tokenizer=tokenizer, **options)

    @property
    def original_model(self) -> nn.Module:
        """The transformers model inside."""
        return self.module

    @property
    def _hook_registry(self) -> BridgePoints:
        """The points by their Bridge names, and what is attached there. SAELens reads and writes it."""
        return BridgePoints(self)

    def _collect_hook_aliases_from_registry(self) -> dict[str, str]:
        """The Bridge names of points by their usual names. SAELens calls it."""
        return bridge_names(self._points)

    def tl_parameters(self) -> dict[str, Tensor]:
        """The weights by TransformerLens's names and in its layout; views of the model's own where possible."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.endswith(entries.NOT_LEARNED)}

    get_params = tl_parameters

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The weights and their names, one after the other."""
        yield from self.tl_parameters().items()

    def get_hook_point(self, hook_name: str) -> HookPoint | None:
        """The point with that name, in either naming scheme; None if there is none."""
        try:
            return self.point(hook_name)
        except UnknownPointError:
            return None

    def hf_generate(
        self, input: Any = "", max_new_tokens: int = 10, return_type: str | None = "input", **kwargs: Any
    ) -> Any:
        """Text or tokens from the `generate` of the transformers model, with its options; hooks fire."""
        prompt = self.to_tokens(input) if return_type == "tokens" and not isinstance(input, Tensor) else input
        generated = HookedModel.generate(self, prompt, max_new_tokens, **kwargs)
        return self.to_string(generated) if return_type == "str" and isinstance(generated, Tensor) else generated

    def __getattr__(self, name: str) -> Any:
        if name in METHODS["TransformerBridge"]:
            raise AttributeError(f"{name} is not available: {METHODS['TransformerBridge'][name]}")
        return super().__getattr__(name)

    def enable_compatibility_mode(
        self,
        disable_warnings: bool = False,  # noqa: ARG002
        no_processing: bool = False,
        **processing: bool,
    ) -> None:
        """Process the weights as in HookedTransformer. Both naming schemes work before and after."""
        self.compatibility_mode = True
        if not no_processing:
            self.process_weights_(**processing)


__getattr__ = refusing("transformer_lens.model_bridge")
