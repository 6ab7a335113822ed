"""Moving a model and changing its dtype, with `cfg.device` and `cfg.dtype` kept up to date."""

from __future__ import annotations

from typing import Any, Self

import torch

from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig
from hookline.model import HookedModel


class LensMoves(HookedModel):
    """`to` and the methods that are short for it. A mixin."""

    cfg: HookedTransformerConfig = None  # type: ignore[assignment]  # set for each model

    def to(self, *args: Any, print_details: bool = True, **kwargs: Any) -> Self:  # noqa: ARG002
        """Move the model, or change its dtype; the arguments are those of `nn.Module.to`."""
        args = args[:-1] if len(args) == 2 and isinstance(args[1], bool) else args  # TransformerLens's print_details
        self._move(*args, **kwargs)
        self.cfg.device, self.cfg.dtype = self.device, next(self.module.parameters()).dtype
        return self

    def _move(self, *args: Any, **kwargs: Any) -> None:
        self.module.to(*args, **kwargs)

    def cuda(self, device: int | str | torch.device | None = None) -> Self:
        """Move the model to the GPU."""
        return self.to(f"cuda:{device}" if isinstance(device, int) else device or "cuda")

    def cpu(self) -> Self:
        """Move the model to the CPU."""
        return self.to("cpu")

    def mps(self) -> Self:
        """Move the model to Apple's GPU."""
        return self.to("mps")

    def float(self) -> Self:
        """Change the dtype to float32."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """Change the dtype to float64."""
        return self.to(torch.float64)

    def half(self) -> Self:
        """Change the dtype to float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """Change the dtype to bfloat16."""
        return self.to(torch.bfloat16)
