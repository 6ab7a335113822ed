"""A model for lm-eval: its model for transformers, with edits.

    from hookline.evaluation.lm_harness import HooklineLM

    lm_eval.simple_evaluate(HooklineLM("gpt2", edits="my-edits", batch_size=8), tasks=["lambada_openai"])

On the command line, `python -m hookline.evaluation.lm_harness` is `lm_eval` with this model registered:

    python -m hookline.evaluation.lm_harness run --model hookline --model_args pretrained=gpt2,edits=my-edits --tasks …
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any, cast

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from hookline.evaluation import Edits, edits_for
from hookline.loading import hook
from hookline.model import HookedModel
from hookline.transformer.hub import EMBEDDED, find_model


@register_model("hookline")
class HooklineLM(HFLM):
    """lm-eval's `HFLM` with edits: a model by name or in memory, and a folder of edits or `(name, edit)` pairs.

    All other arguments are those of `HFLM`.
    """

    def __init__(self, pretrained: str | HookedModel | Any, edits: Edits = None, **options: Any) -> None:
        hooked_model = pretrained if isinstance(pretrained, HookedModel) else None
        if hooked_model is not None:
            options = {"tokenizer": hooked_model.tokenizer} | options
            pretrained = hooked_model.module
        elif pretrained in EMBEDDED:
            pretrained = str(find_model(pretrained, {}).path)
        super().__init__(pretrained, **options)
        self.hooked = cast(HookedModel, hook(self.model, self.tokenizer)) if hooked_model is None else hooked_model
        self.edits = edits_for(self.hooked, edits)

    def _model_call(self, *args: Any, **kwargs: Any) -> Any:
        with self.hooked.hooks(fwd_hooks=self.edits):
            return super()._model_call(*args, **kwargs)

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.hooked.hooks(fwd_hooks=self.edits):
            return super()._model_generate(*args, **kwargs)

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """Score requests; with edits, only requests of one length share a batch.

        `HFLM` pads on the right without a mask, so edits at the last position would be made at the padding.
        """
        if not self.edits:
            return super()._loglikelihood_tokens(requests, *args, **kwargs)
        groups = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            groups[len(context) + len(continuation)].append(index)
        results: dict[int, tuple[float, bool]] = {}
        for _, group in sorted(groups.items(), reverse=True):  # the longest first: it needs the most memory
            scores = super()._loglikelihood_tokens([requests[index] for index in group], *args, **kwargs)
            results.update(zip(group, scores, strict=True))
        return [results[index] for index in range(len(requests))]

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes into its results, with the edits."""
        return super().get_model_info() | {"hookline_edits": [f"{name}: {edit}" for name, edit in self.edits]}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(cli_evaluate())
