"""What keeps a model, or one call of it, from being compiled, looked at before every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hookline.compiled.not_compiled import NotCompiled, check_no
from hookline.engine import Action, Run, compiling, open_runs
from hookline.transformer.architectures import chooses_keys, depends_on_length
from hookline.transformer.index import ModelPoints


def check_call(points: ModelPoints) -> None:
    """Raise NotCompiled if a call of the model that begins now cannot be compiled."""
    modules = [*points.root.modules()]
    check_no(_why_not(points.root, modules) or compiling.why_not_here() or compiling.why_replaced(points, modules))


def _why_not(root: nn.Module, modules: Sequence[nn.Module]) -> str | None:
    """Why the model cannot be compiled whole; None if it can."""
    if not getattr(root, "_can_compile_fullgraph", False):
        return f"transformers says that {type(root).__name__} cannot be compiled whole"
    if root.config.is_encoder_decoder:  # type: ignore[union-attr]
        return "it is an encoder-decoder model"
    quantizer = getattr(root, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return "its quantization cannot be compiled"
    if any(module.training for module in modules):
        return "it is in training mode: call model.eval()"
    parameters = [parameter for module in modules for parameter in module._parameters.values() if parameter is not None]
    if len({parameter.device for parameter in parameters}) > 1:
        return "it is on several devices"
    if "DTensor" in {kind.__name__ for kind in {*map(type, parameters)}}:
        return "its parameters are sharded over several processes"
    return None


def text_config(points: ModelPoints) -> Any:
    """The config of the language model."""
    module: Any = points.root
    return module.config.get_text_config()


def is_for_one_length(points: ModelPoints) -> bool:
    """Whether padding would change what is computed before it."""
    config = text_config(points)
    return depends_on_length(config) or chooses_keys(config)


def are_one_text(position_ids: Tensor) -> bool:
    """Whether the positions of each row follow one another. Without a mask, transformers takes gaps for ends of texts.

    It looks for them in some passes only, which differ between compiled and uncompiled ones.
    """
    return bool((position_ids.diff(dim=1) == 1).all())


def actions_of(points: ModelPoints) -> list[Action]:
    """All actions on a model in this thread, in the order in which they were added."""
    actions: list[Action] = []
    for run in open_runs():
        if not isinstance(run, Run) or run.root is not points.root:
            raise NotCompiled("hooks of another model, which may share modules with it, are active")
        actions += run.actions
    for permanent in points.permanent_hooks():
        actions += permanent.actions
    return sorted(actions, key=lambda action: (action.stage, action.order))


def inferred_mask(module: Any, ids: Tensor, config: Any) -> Tensor:
    """The mask that the model's own `generate` takes for a prompt without one: padding is found by its token."""
    mask: Tensor = module._prepare_attention_mask_for_generation(ids, config, {})
    return mask


def generation_settings(module: Any, ids: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Transformers' settings for a generation, and its logits processors; NotCompiled if our loop lacks one."""
    keywords = dict(options)
    config, more = module._prepare_generation_config(keywords.pop("generation_config", None), **keywords)
    more = {name: value for name, value in more.items() if value is not None and name not in ("use_cache",)}
    if more:
        raise NotCompiled(f"{', '.join(sorted(more))} is for the model's own generate")
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    wrong = [] if mode in ("greedy_search", "sample") else [mode]
    neutral = {
        "num_return_sequences": (None, 1),
        "use_cache": (None, True),
        "max_time": (None,),
        "stop_strings": (None,),
    }
    neutral |= dict.fromkeys(("cache_implementation", "prefill_chunk_size", "compile_config"), (None,))
    outputs = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
    neutral |= dict.fromkeys((*outputs, "token_healing"), (None, False))
    wrong += [name for name, allowed in neutral.items() if getattr(config, name, None) not in allowed]
    if wrong:
        raise NotCompiled(f"{', '.join(wrong)} is for the model's own generate")
    module._prepare_special_tokens(config, True, device=ids.device)
    processors = module._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        device=ids.device,
        model_kwargs={},
    )
    return config, processors
