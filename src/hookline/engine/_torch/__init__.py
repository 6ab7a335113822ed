"""What is private of torch or CPython, behind plain names: the only files of the engine that know about it.

One file is one trick. It says what the trick is for, what it needs of torch or CPython, and what happens where that
does not hold; its `probe` finds out, by trying it. `hookline doctor`, `make matrix` and a test run all of them.
Otherwise each is tried once in a process, when it is first needed: nothing is tried at import, or while a hook runs.
"""

from __future__ import annotations

from hookline.engine._torch import (
    attention_functions,
    bytecode,
    checkpoint_regions,
    compiled_calls,
    copy_on_write,
    data_parallel,
    dispatch_keys,
    eval_frames,
    fake_tensors,
    frames,
    graph_tasks,
    hooks_on_modules,
    interrupts,
    mode_stacks,
    refcounts,
    stance,
    thread_state,
    transforms,
    version_counters,
)
from hookline.engine._torch.proofs import Probe, requirement, why_broken

_TRICKS = (
    *(hooks_on_modules, compiled_calls, copy_on_write, refcounts, version_counters, graph_tasks, checkpoint_regions),
    *(thread_state, mode_stacks, dispatch_keys, transforms, stance, eval_frames, frames, bytecode, interrupts),
    *(attention_functions, fake_tensors, data_parallel),
)
PROBES: dict[str, Probe] = {trick.__name__.rpartition(".")[2]: trick.probe for trick in _TRICKS}
"""What finds out whether a trick holds, by the name of the trick."""

need_basics = requirement(
    *(
        hooks_on_modules.probe,
        graph_tasks.probe,
        thread_state.probe,
        mode_stacks.probe_functions,
        transforms.probe,
        frames.probe,
    )
)
"""Raise if one of the tricks that every hook needs does not hold."""


def tricks() -> dict[str, str]:
    """Try all that the engine needs of torch and Python beside what they document.

    Returns for each why it does not hold here; an empty text if it does.
    """
    return {name: why_broken(probe) for name, probe in PROBES.items()}
