"""What is done with a language model besides a pass: texts written, runs of some layers, early ends, each in both ways.

The option `does` of a run names it. `by_hand` does it with the model's own methods, `with_library` with hookline's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fuzz import classic
from fuzz.insides import LanguagePass, StoppedError
from fuzz.oracle import Observed
from fuzz.program import Run
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from fuzz.library import Library
    from fuzz.subject import Subject

RESULTS = ("logits", "loss", "both")
WRITING = ("generate", "stream")
NEW = 4
"""How many tokens are written."""


def by_hand(subject: Subject, run: Run, passing: LanguagePass, kwargs: dict[str, Any]) -> Any:
    """What a run returns."""
    options, module = dict(run.options), subject.module
    does = options.get("does")
    if does in WRITING:
        return _written(module, run, passing, kwargs)
    if does == "start":
        path = classic.layer_paths(subject.network, module.config)[options["layer"]]
        passing.entering = path, stream(subject, run, kwargs["input_ids"].shape)
    if does == "stop":
        passing.stops = classic.layer_paths(subject.network, module.config)[options["layer"]]
        try:
            module(**kwargs)
        except StoppedError as stopped:
            return {"stream": stopped.x}
        raise AssertionError(f"no call of {passing.stops}")
    if (
        does == "start"
    ):  # a run from a layer keeps no keys and values: they would be copied, and rounded by their strides
        kwargs["use_cache"] = False
    output = module(**kwargs)
    passing.ends()
    if does is None:
        return output
    if does == "cache":
        return None
    return (
        {"logits": output.logits, "loss": loss(output.logits, kwargs)}
        if does == "both"
        else _named(does, output, kwargs)
    )


def _named(does: str, output: Any, kwargs: dict[str, Any]) -> Any:
    return {"loss": loss(output.logits, kwargs)} if does == "loss" else {"logits": output.logits}


def loss(logits: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The mean of the cross entropy of each token of the text that follows another one."""
    ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    is_pair = (mask[:, 1:] * mask[:, :-1]).bool()
    return F.cross_entropy(logits[:, :-1][is_pair].float(), ids[:, 1:][is_pair])


def stream(subject: Subject, run: Run, shape: torch.Size) -> Tensor:
    """A residual stream at which a run starts."""
    generator = torch.Generator().manual_seed(run.seed + 1)
    x = torch.randn(*shape, subject.module.config.hidden_size, generator=generator)
    return x.to(getattr(torch, subject.network.dtype))


def _written(module: Any, run: Run, passing: LanguagePass, kwargs: dict[str, Any]) -> Any:
    ids = kwargs["input_ids"]
    given = {"attention_mask": torch.ones_like(ids), **kwargs}
    passing.prompt = given["attention_mask"]
    if run.reads and any(place.name.startswith("unembed") for place in run.reads):
        given["logits_to_keep"] = 0  # of the prompt, generate asks for the last ones only
    text = module.generate(**given, max_new_tokens=NEW, do_sample=False)
    passing.observed |= passing.joined()
    passing.ends()
    return {"new": text[:, ids.shape[1] :]}


def with_library(library: Library, run: Run, kept: Observed, kwargs: dict[str, Any]) -> Any:
    """What a run returns."""
    options, net = dict(run.options), library.net
    does = options["does"]
    if does in RESULTS:
        output = library.passed(run, kept, (), {"return_type": does, **kwargs})
        return {"logits": output[0], "loss": output[1]} if does == "both" else {does: output}
    names = [place.name for place in run.reads or ()]
    with library.hooked(run, kept):
        match does:
            case "cache":
                library.keep(run, net.cache(**kwargs, names_filter=names), kept)
                return None
            case "stop":
                return {"stream": net(**kwargs, stop_at_layer=options["layer"])}
            case "start":
                ids = kwargs.pop("input_ids")
                x = stream(library.subject, run, ids.shape)
                return {"logits": net(x, start_at_layer=options["layer"], tokens=ids, **kwargs)}
        ids = kwargs.pop("input_ids")
        length = ids.shape[1]
        if does == "stream":
            return {"new": torch.stack(list(net.stream(ids, NEW, do_sample=False, **kwargs)), 1)}
        if names:
            text, cache = net.generate_with_cache(ids, NEW, names_filter=names, do_sample=False, **kwargs)
            library.keep(run, cache, kept)
        else:
            text = net.generate(ids, NEW, do_sample=False, **kwargs)
        return {"new": text[:, length:]}
