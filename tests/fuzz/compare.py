"""How what the library observed differs from what the oracle did."""

from __future__ import annotations

import re
from typing import Any

import devices
import torch
from fuzz import languages
from fuzz.oracle import ANYTHING, Observed
from fuzz.program import Language, Plain, Program, Run, hooks_of, runs
from torch import Tensor
from zoo.oracle import distance, same_bits

CLOSE = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 0.08}
"""How far gradients, and edits as data, may be from those by hand, relative to the largest value: both are added or
rounded in another order. Functions and what is read must have the same bits."""
INEXACT = ("gradient", *(f"output ('{name}'" for name in ("loss", "sweep", "ablate", "harvest")))
HOOKED_GRADIENT = re.compile(r"\d+ gradient \d+ \d+$")


def tolerance(program: Program) -> float:
    if any(run.autocast for run in runs(program)):
        return CLOSE["bfloat16"]
    is_in_norm = any(hook.place.inside in ("scale", "normalized") for hook in hooks_of(program))
    if is_in_norm and program.network.dtype != "bfloat16":
        return 1e-3  # an edit there is applied as a difference: what becomes 0 is 1e-8, which a second norm enlarges
    if isinstance(program.network, Language) and program.network.dtype == "float64":
        return 1e-5  # norms, softmax and rotary angles are in float32 in the code of transformers
    return CLOSE[program.network.dtype]


def is_exact(program: Program) -> bool:
    """Whether both sides compute the same operations in the same order.

    Edits as data may be written otherwise, and so may what no event of a module has. Torch has kernels for attention
    whose three arguments are one tensor, which an edit that changes no bit may leave or not.
    """
    has_fused_attention = isinstance(program.network, Plain) and any(
        "Multihead" in part or "TransformerEncoder" in part for _, part in program.network.parts
    )
    if devices.DEVICE.type != "cpu":
        return False  # a GPU's kernels are also chosen by where in memory a tensor lies
    places = [hook.place for hook in hooks_of(program)]
    places += [gradient.place for run in runs(program) for gradient in run.gradients]
    hooks = hooks_of(program)
    is_inference = isinstance(program.network, Language) and any(run.mode == "inference" for run in runs(program))
    if is_inference and any(hook.way in ("in place", "data") for hook in hooks):
        return False  # a part of a tensor is copied to memory of its own, where kernels round in other places
    is_data = any(hook.way == "edit" for hook in hooks)
    return not has_fused_attention and not is_data and not any(place.inside for place in places)


def written_out(program: Program) -> set[str]:
    """The names of what is read and is no tensor of the model's: both sides compute it, each in its own way."""
    reads = [place for run in runs(program) if isinstance(run.reads, tuple) for place in run.reads]
    return {place.name for place in reads if place.inside}


def difference(
    program: Program, expected: Observed, actual: Observed, *, exact: bool = True, extra: bool = True
) -> str | None:
    """The first thing that differs, in words; None if nothing does. `extra`: also what only hookline observed."""
    exact, derived = exact and is_exact(program), written_out(program)
    steps = [index for index, step in enumerate(program.steps) if isinstance(step, Run)]
    largest = {index: largest_gradient(expected, index) for index in steps}
    for name, wanted in expected.items():
        index, _, what = name.partition(" ")
        is_cached = what.startswith("all ") and name not in actual  # two runs by hand have the same names
        key = cached_name(actual, index, what) if is_cached else name
        if wanted is ANYTHING:
            continue
        if actual.get(key) is ANYTHING:
            continue
        if key not in actual:
            if HOOKED_GRADIENT.match(name) and is_at_a_silent_writer(program, int(index), int(what.split()[1])):
                continue
            if what.startswith("gradient") and not wanted.nan_to_num().count_nonzero():
                continue  # an edit as data has no graph where the value is constant
            return f"{name}: missing"
        is_read_close = what.startswith("read ") and what.split()[1] in derived
        is_close = not exact or what.startswith(INEXACT) or is_read_close
        if what.startswith("read ") and "scores" in what:
            wanted, actual[key] = wanted.clamp(min=-1e30), actual[key].clamp(min=-1e30)  # masked, by any number
        unlike = differs(wanted, actual[key], tolerance(program) if is_close else None, largest[int(index)])
        if unlike is not None:
            return f"{name}: {unlike}"
    if any(wanted is ANYTHING for wanted in expected.values()):  # hooks by hand cannot say which gradients there are
        actual = {name: value for name, value in actual.items() if not HOOKED_GRADIENT.match(name)}
    actual = {name: value for name, value in actual.items() if value is not ANYTHING}
    unexpected = [name for name in actual if extra and name not in expected and " cached " not in f" {name}"]
    return f"{unexpected[0]}: only with hookline" if unexpected else None


def only_text(program: Program, observed: Observed) -> Observed:
    """What was observed, with zeros at the padding of logits and of what was read."""
    kept = dict(observed)
    for name, x in observed.items():
        index, _, what = name.partition(" ")
        step = program.steps[int(index)]
        if not isinstance(step, Run) or "padding" not in dict(step.options) or not isinstance(x, Tensor):
            continue
        mask = languages.mask_of(step)
        if what.startswith(("output ('logits'", "read ")) and x.shape[:2] == mask.shape:
            kept[name] = x.masked_fill(mask.view(*mask.shape, *[1] * (x.ndim - 2)) == 0, 0)
    return kept


def is_at_a_silent_writer(program: Program, index: int, gradient: int) -> bool:
    """Whether a gradient is that of the input of a module that writes to it, and does not say so by `inplace`.

    If that input has no graph, neither has what its caller continues with: the library knows too late of the write.
    """
    step, network = program.steps[index], program.network
    if not (isinstance(step, Run) and isinstance(network, Plain)):
        return False
    place = step.gradients[gradient].place
    return place.side == "input" and dict(network.parts).get(place.module) in ("Clear()", "Scale()")


def largest_gradient(observed: Observed, index: int) -> float:
    """The largest value of all gradients of a run: those far below it are rounding."""
    gradients = [x for name, x in observed.items() if name.startswith(f"{index} gradient") and isinstance(x, Tensor)]
    sizes = [x.detach().float().abs().max().item() for x in gradients if x.layout == torch.strided and x.numel()]
    return max((size for size in sizes if size == size), default=0.0)


def differs(wanted: Any, got: Any, close: float | None, largest: float) -> str | None:
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        return None if wanted == got else f"{wanted} became {got}"
    got = got.to(wanted.device)  # the results of experiments are on the CPU, and so is what is sent to processes
    if wanted.is_nested and got.is_nested:
        pairs = list(zip(wanted.unbind(), got.unbind(), strict=False))
        parts = [differs(one, other, close, largest) for one, other in pairs]
        return next((part for part in parts if part is not None), None)
    if same_bits(wanted, got):
        return None
    if close is not None and wanted.layout == got.layout != torch.strided:
        wanted, got = wanted.to_dense(), got.to_dense()  # which values are zero may depend on rounding
    apart = distance(wanted, got)
    if close is not None and apart <= close:
        return None
    if close is not None and wanted.shape == got.shape and wanted.layout == got.layout == torch.strided:
        gap = (wanted.double() - got.double()).abs().max().item()
        if gap <= close * 1e-3:
            return None  # where all is 0 by hand, a difference of two numbers is rounding
        if gap <= close * 1e-2 * largest:
            return None
    return f"{tuple(wanted.shape) if not wanted.is_nested else 'nested'} differs by {apart:.3g}"


EVENT = re.compile(r"all (?P<module>\S*) (?P<side>input|output) (?P<call>\d+)$")


def cached_name(actual: Observed, index: str, what: str) -> str:
    """The name in a full cache of an event."""
    match = EVENT.match(what)
    assert match is not None
    module, side, call = match["module"], match["side"], match["call"]
    bases = [module] if side == "output" and module else [f"{module}.{side}" if module else side]
    bases += [f"{module}:{side}"] if module else [f":{side}"]
    names = [f"{index} cached {base}" for base in reversed(bases)]  # with a colon, if a submodule has the other name
    for name in names:
        for key in (f"{name}#{call}", name):
            if key in actual and (key != name or call == "0"):
                return key
    return names[0]
