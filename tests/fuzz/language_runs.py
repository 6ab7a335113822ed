"""What is done with a language model besides a pass: texts written, runs of some layers, early ends, each in both ways.

The option `does` of a run names it. `by_hand` does it with the model's own methods, `with_library` with hookline's.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
from fuzz import classic
from fuzz.insides import LanguagePass, StoppedError
from fuzz.oracle import Acting, Observed, seen, with_part
from fuzz.program import Hook, Place, Run
from torch import Tensor
from torch.nn import functional as F

import hookline
from hookline.experiments import ablation, patching

if TYPE_CHECKING:
    from fuzz.library import Library
    from fuzz.subject import Subject

RESULTS = ("logits", "loss", "both")
WRITING = ("generate", "stream")
EXPERIMENTS = ("sweep", "ablate", "harvest")
"""What runs the model many times: by hand a loop with one pass for each cell."""
NEW = 4
"""How many tokens are written."""


def by_hand(subject: Subject, run: Run, passing: LanguagePass, kwargs: dict[str, Any]) -> Any:
    """What a run returns."""
    options, module = dict(run.options), subject.module
    does = options.get("does")
    if does in WRITING:
        return _written(module, run, passing, kwargs)
    if does in EXPERIMENTS:
        return {does: _experiment(subject, run, passing, kwargs["input_ids"])}
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


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -1, 7]


class Patch(Acting):
    """Writes a value to a part of an activation."""

    def __init__(self, place: Place, index: tuple[Any, ...], value: Tensor) -> None:
        super().__init__(Hook(place, "read"))
        self.index, self.value = index, value

    def __call__(self, x: Tensor) -> Tensor:
        new = seen(self.hook.place, x).clone()
        new[self.index] = self.value[self.index]
        return with_part(self.hook.place, x, new)


def _experiment(subject: Subject, run: Run, passing: LanguagePass, ids: Tensor) -> Tensor:
    """The numbers of a sweep, [layer, position or head], or the rows of a harvest."""
    options = dict(run.options)
    places = [
        place for place in classic.places(subject.network, subject.module.config) if is_of(place, options["points"])
    ]

    def run_once(tokens: Tensor, *patches: Acting, reads: tuple[Place, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        one = LanguagePass(subject.module, [*passing.edits, *patches], Run(reads=reads), set())
        with one.attached():
            logits = subject.module(input_ids=tokens).logits
        return logits, [one.observed[f"read {place.name} 0"] for place in reads]

    if options["does"] == "harvest":
        place = places[options["layer"]]
        rows = [run_once(row[None, : len(row) - index], reads=(place,))[1][0][0] for index, row in enumerate(ids)]
        return torch.cat(rows)
    clean, corrupted = ids[:1], ids[1:2]
    is_ablation = options["does"] == "ablate"
    values = run_once(clean, reads=tuple(places))[1]
    values = [torch.zeros_like(value) for value in values] if is_ablation else values
    cells = values[0].shape[2 if options["over"] == "head" else 1]
    slices = [(slice(None),) * (2 if options["over"] == "head" else 1) + (cell,) for cell in range(cells)]
    return torch.stack(
        [
            torch.stack(
                [
                    metric(run_once(clean if is_ablation else corrupted, Patch(place, index, value))[0])[0]
                    for index in slices
                ]
            )
            for place, value in zip(places, values, strict=True)
        ]
    ).double()


def is_of(place: Place, kind: str) -> bool:
    """Whether a place is a point of a kind, in some layer, under its classic name."""
    return place.name.startswith("blocks.") and place.name.endswith(f".hook_{kind}")


def _experiment_with_library(library: Library, run: Run, ids: Tensor) -> Tensor:
    options, net = dict(run.options), library.net
    points, does = options["points"], options["does"]
    if does == "harvest":
        rows = [row[: len(row) - index].tolist() for index, row in enumerate(ids)]
        name = f"blocks.{options['layer']}.{'attn.' if points in 'qkvz' else ''}hook_{points}"
        with tempfile.TemporaryDirectory() as folder:
            store = hookline.harvest(net, rows, name, f"{folder}/store", progress=False)
            found: Tensor = store.rows(0, len(store), name)[name]
            return found.clone()
    over = ("layer", options["over"])
    if does == "ablate":
        result = ablation.ablate(net, ids[:1], metric, points=points, over=over, progress=False)
    else:
        result = patching.sweep(net, ids[:1], ids[1:2], metric, points=points, over=over, progress=False)
    return torch.as_tensor(result.values).double()


def with_library(library: Library, run: Run, kept: Observed, kwargs: dict[str, Any]) -> Any:
    """What a run returns."""
    options, net = dict(run.options), library.net
    does = options["does"]
    if does in EXPERIMENTS:
        with library.hooked(run, kept):
            return {does: _experiment_with_library(library, run, kwargs["input_ids"])}
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
