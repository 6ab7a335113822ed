"""Names of TransformerLens that are not available, by module, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hookline.errors import HooklineError

_WRAP = "hookline.hook(model) wraps that kind of model, with encoder.… and decoder.… points"
_INIT = "use torch.nn.init, or HookedTransformerConfig(init_mode=…) for a toy model"
_TRAIN = 'write the loop: model(tokens, return_type="loss").backward(), and an optimizer of torch'
_SWEEP = "hookline.experiments.patching.sweep patches any point"

ABSENT: dict[str, dict[str, str]] = {
    "transformer_lens": {
        **dict.fromkeys(("HookedEncoder", "HookedEncoderDecoder", "HookedAudioEncoder"), _WRAP),
        "BertNextSentencePrediction": _WRAP,
        "SVDInterpreter": "model.OV[layer, head].svd() returns the vectors, and vector @ model.W_U their logits",
        "evals": 'model(tokens, return_type="loss") on data of your own',
        "head_detector": "hookline.experiments.head_detectors has head_scores and detect",
        "train": _TRAIN,
        "HookedSAETransformer": "hookline.sae has autoencoders, and runs the model with them",
        "loading_from_pretrained": "use utils.OFFICIAL_MODEL_NAMES and utils.get_official_model_name",
        "past_key_value_caching": "import HookedTransformerKeyValueCache from hookline.compat.transformer_lens",
    },
    "transformer_lens.utils": {
        "get_dataset": "datasets.load_dataset(…), then utils.tokenize_and_concatenate",
        **dict.fromkeys(("init_xavier_uniform_", "init_xavier_normal_"), _INIT),
        **dict.fromkeys(("init_kaiming_uniform_", "init_kaiming_normal_", "calc_fan_in_and_fan_out"), _INIT),
        **dict.fromkeys(("get_nested_attr", "set_nested_attr"), "operator.attrgetter, and setattr"),
        "override_or_use_default_value": "`default if value is None else value`",
        "check_structure": "compare the tensors themselves",
    },
    "transformer_lens.hook_points": {
        "LensHandle": "add_hook(…) returns the function that removes the hook, and reset_hooks() removes all",
        "NamesFilter": "a names_filter is a name, a list of names or a predicate",
    },
    "transformer_lens.patching": {
        "generic_activation_patch": _SWEEP,
        "make_df_from_ranges": "results of hookline.experiments have labels",
        **{
            f"layer_{what}_patch_setter": _SWEEP
            for what in ("pos", "pos_head_vector", "head_vector", "head_pattern", "head_pos_pattern")
        },
        "layer_head_dest_src_pos_pattern_patch_setter": _SWEEP,
    },
}


class AbsentNameError(HooklineError, ImportError):
    """A name of TransformerLens that is not available; the message says what to use instead."""


def refusing(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__` that raises, with what to use instead for names that are not available."""

    def refuse(name: str) -> Any:
        if name in ABSENT[module]:
            raise AbsentNameError(f"{module}.{name} is not in hookline.compat: {ABSENT[module][name]}")
        raise AttributeError(f"module 'hookline.compat.{module}' has no attribute {name!r}")

    return refuse
