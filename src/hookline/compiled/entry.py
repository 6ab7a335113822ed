"""What keeps a model, or one call of it, from being compiled, looked at before every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from hookline.compiled.classify import Placement, placed, refusal
from hookline.engine import interception, skipping
from hookline.engine.actions import Action
from hookline.engine.calls import running
from hookline.engine.order import Kind
from hookline.engine.runs import Run, open_runs
from hookline.engine.taps import Tap, has_foreign_hooks
from hookline.transformer.index import ModelPoints

_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


def of_model(module: nn.Module) -> str | None:
    """Why a model cannot be compiled whole; None if it can."""
    if not getattr(module, "_can_compile_fullgraph", False):
        return f"transformers says that {type(module).__name__} cannot be compiled whole"
    if module.config.is_encoder_decoder:  # type: ignore[union-attr]
        return "it is an encoder-decoder model"
    quantizer = getattr(module, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return "its quantization cannot be compiled"
    if len({each.device for each in module.parameters()}) > 1:
        return "it is on several devices"
    if any(type(each).__name__ == "DTensor" for each in module.parameters()):
        return "its parameters are sharded over several processes"
    return None


def of_call(points: ModelPoints) -> str | None:
    """Why the call that begins now cannot be compiled: what others did to the model or the thread."""
    root, own = points.root, points.permanent_hooks()
    if running.hooks:
        return "it is called in a hook"
    if interception.stack.interceptors or torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return "a mode of torch is on"
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if skipping.skips_here():
        return "some of its layers are skipped"
    if any(getattr(torch_module, name) for name in _GLOBAL):
        return "there are hooks on all modules of the process"
    for name, each in root.named_modules():
        if has_foreign_hooks(each, Kind.INPUT) or has_foreign_hooks(each, Kind.OUTPUT) or each._backward_hooks:
            return f"somebody else has a torch hook on {name or 'the model'!r}"
        taps = [
            hook for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values()) if type(hook) is Tap
        ]
        if any(other not in own for tap in taps for other in tap.permanent):
            return f"a wrapper of a part of the model has a permanent hook on {name!r}"
        if skipping.is_detoured(each):
            return "another thread skips some of its layers"
        if "forward" in vars(each) or vars(each).get("_compiled_call_impl") is not None:
            return f"the call of {name or 'the model'!r} is replaced"
    return None


def actions_of(points: ModelPoints) -> list[Action] | str:
    """All actions on a model in this thread, in the order in which they were added; a sentence if others interfere."""
    found: list[Action] = []
    for run in open_runs():
        if not isinstance(run, Run) or run.root is not points.root:
            return "hooks of another model, which may share modules with it, are active"
        found += run.actions
    for permanent in points.permanent_hooks():
        found += permanent.actions
    return sorted(found, key=lambda action: (action.stage, action.order))


def placements(actions: Sequence[Action]) -> tuple[list[Placement], str | None]:
    """How each action runs, and why they cannot all be compiled."""
    found = [placed(action) for action in actions]
    return found, refusal(found)


def generation_settings(module: Any, ids: Any, options: dict[str, Any]) -> tuple[Any, Any] | str:
    """Transformers' settings for a generation, and its logits processors; a sentence if the loop has not got them."""
    given = dict(options)
    config, more = module._prepare_generation_config(given.pop("generation_config", None), **given)
    more = {name: value for name, value in more.items() if value is not None and name not in ("use_cache",)}
    if more:
        return f"{', '.join(sorted(more))} is for the model's own generate"
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
        return f"{', '.join(wrong)} is for the model's own generate"
    module._prepare_special_tokens(config, True, device=ids.device)
    processors = module._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        device=ids.device,
        model_kwargs={},
    )
    return config, processors
