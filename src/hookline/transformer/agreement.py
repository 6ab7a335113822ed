"""What the processes of a sharded model compare, so that they do not compute different things unnoticed.

At the beginning of a forward pass with hooks they compare the hooks and the inputs, and at its end, before anybody can
compute gradients, what each hook made of its activation. Each is one small collective, in a group of its own that has a
time limit. Values are compared by sketches, so nothing large is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from hashlib import sha256
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hookline.engine import HookAction, PointAction, StopForward
from hookline.errors import HooklineError, how_many
from hookline.transformer import shard_lenses
from hookline.values.structures import tensors_in

if TYPE_CHECKING:
    from hookline.engine import Action

SKETCH = 16
"""How many numbers a tensor is compared by."""
SAME = 1e-5
"""How much values may differ, relative to their norm: sums of floats in another order."""
AMPLIFIED = 100
"""How much more a hook's result may differ than what it was given: some GPU kernels round differently each time."""
APART = 0.05
"""How much what a hook is given may differ: more is not rounding."""
_PRIME, _FACTOR = 16777213, 10368889
"""The largest prime below 2 ** 24, up to which float32 has every integer, and about 0.618 times as many."""
_CPU = torch.device("cpu")
ALIKE = "on a sharded model every process must run the same hooks in the same order, on the same inputs"


@lru_cache(64)
def _weights(length: int, axis: int, device: torch.device) -> Tensor:
    """The same random weights in every process: `SKETCH` rows for an axis of up to `length` entries.

    Normally distributed, so that no sum of them is 0, as sums of signs often are; and others for each axis, so that a
    matrix and its transpose have different sums.
    """
    generator = torch.Generator().manual_seed(2 * length.bit_length() + axis)
    return torch.randn(SKETCH, length, generator=generator, device=_CPU, dtype=torch.float32).to(device)


def _weights_for(x: Tensor, axis: int) -> Tensor:
    """The weights for one axis of a matrix. They are made for powers of two: lengths change with every text."""
    n = x.shape[axis]
    return _weights(1 << n.bit_length(), axis, x.device)[:, :n]


@torch.no_grad()
def sketch(x: Tensor) -> Tensor:
    """Return a few numbers for a tensor, so that those of two tensors differ by about as much as the tensors do.

    They are sums with random weights for each row and each column.
    """
    x = _as_floats(x.detach())
    if not x.numel():
        return x.new_zeros(SKETCH)
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    with torch.autocast(rows.device.type, enabled=False):
        return ((_weights_for(rows, 0) @ rows) * _weights_for(rows, 1)).sum(1)


def _as_floats(x: Tensor) -> Tensor:
    """The tensor in float32, in which all that differs still differs, and no number is far larger than all others.

    Integers are labels (tokens, experts): each becomes another number between -1 and 1. What is not finite, and masked
    scores, which are the lowest number of their dtype, count as much as the typical number.
    """
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if not x.is_floating_point():
        return (x.long() * _FACTOR).remainder(_PRIME).float() / _PRIME * 2 - 1
    limit = 3e4 if x.dtype is torch.float16 else 1e30
    x = x.float()
    is_large = ~(x.abs() < limit)
    if x.device.type == "cpu" and not is_large.any():  # on a GPU, to ask is to wait for it
        return x
    rest = torch.where(is_large, 0.0, x)
    typical = rest.norm() / x.numel() ** 0.5
    marks = (x.clamp(-1, 1) + x.sign() * x.isinf()).nan_to_num(3.0)
    return torch.where(is_large, marks * torch.where(typical > 0, typical, 1.0), rest)


@lru_cache(8)
def _rotation(device: torch.device) -> Tensor:
    """The same random rotation of sketches in every process."""
    return torch.linalg.qr(_weights(SKETCH, 0, _CPU))[0].to(device)


class HookLog:
    """What the hooks of this process did since the processes last compared it, in order."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, Tensor, Tensor]] = []

    def watching(self, action: HookAction) -> Callable[..., Any]:
        """Return what calls a hook, and notes what the hook makes of what it is given."""
        invoke, name = action.invoke, action.point.name

        def call(activation: Any, point: Any) -> Any:
            before = _of_all(activation)
            result = invoke(activation, point)
            self._calls.append((name, before, _of_all(activation if result is None else result)))
            return result

        call.is_watching = True  # type: ignore[attr-defined]
        return call

    @property
    def has_calls(self) -> bool:
        """Whether there is something to compare."""
        return bool(self._calls)

    def clear(self) -> None:
        """Forget everything."""
        self._calls = []

    def taken(self) -> list[HookCall]:
        """Return everything as numbers, and forget it."""
        calls, self._calls = self._calls, []
        return [HookCall(name, before.tolist(), after.tolist()) for name, before, after in calls]


class HookCall(NamedTuple):
    """One call of a hook: the point, and the sketches of what it was given and of what it made of that."""

    name: str
    given: list[float]
    made: list[float]


def _of_all(value: Any) -> Tensor:
    """The sketches of all tensors in a value, as one."""
    sketches = [sketch(x) for x in tensors_in(value)] or [torch.zeros(SKETCH, device=_CPU, dtype=torch.float32)]
    return reduce(_followed_by, sketches)


def _followed_by(earlier: Tensor, later: Tensor) -> Tensor:
    """The sum of sketches; the earlier ones are rotated, so that two cannot cancel, and their order counts."""
    return later + (earlier @ _rotation(earlier.device)).to(later.device)


def _difference(one: Sequence[float], other: Sequence[float]) -> float:
    """How much two sketches differ, relative to the larger one."""
    a, b = (torch.tensor(numbers, dtype=torch.float64, device=_CPU) for numbers in (one, other))
    return float((a - b).norm() / max(a.norm(), b.norm(), 1e-30))


class Agreement:
    """What the processes of one sharded model do together: see `engine/_sharding/split_values.py`."""

    def __init__(self, group: Any) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        timeout = shard_lenses.TIMEOUT
        self._group = dist.new_group(self._ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
        self._log = HookLog()

    def watch(self, actions: Sequence[Action]) -> None:
        """Note what these hooks make of their activations."""
        for action in actions:
            if isinstance(action, HookAction) and not hasattr(action.invoke, "is_watching"):
                action.invoke = self._log.watching(action)

    def begin(self, actions: Sequence[Action]) -> None:
        """Raise if the hooks of another process differ, or if it does not arrive within a minute."""
        mine = _hooks(actions)
        self._compare_hooks(self._exchange("begins to hook it", _checksum(mine)), mine)

    def enter(self, actions: Sequence[Action], given: Mapping[str, Any]) -> None:
        """Raise if the hooks or the inputs of another process differ, or if it does not arrive within a minute."""
        hooks = _hooks(actions)
        told = self._exchange("begins a forward pass", (_checksum(hooks), _inputs(given)))
        self._compare_hooks([checksum for checksum, _ in told], hooks)
        mine = told[self._rank][1]
        for rank, (_, inputs) in enumerate(told):
            names = [name for name in {**mine, **inputs} if _differs(inputs.get(name), mine.get(name))]
            if names:
                raise HooklineError(
                    f"the inputs of process {self._ranks[rank]} differ from those of this process in "
                    f"{', '.join(names)}: {ALIKE}. If the tokens were sampled, seed all processes alike"
                )

    def end(self, actions: Sequence[Action], error: BaseException | None = None) -> None:
        """Raise if a hook did something else in another process. After an error, explain it if processes are lost."""
        if error is not None and not isinstance(error, StopForward):
            self._log.clear()
            why = explanation(error)
            if why is not None:
                raise HooklineError(why) from error
        elif self._log.has_calls or any(isinstance(action, HookAction) for action in actions):
            told = self._exchange("ends a run", self._log.taken())
            for rank, calls in enumerate(told):
                self._compare_calls(self._ranks[rank], calls, told[self._rank])

    def explain(self, error: BaseException) -> None:
        """After an error in a forward pass: forget what hooks did, and add to the error what it means."""
        if not isinstance(error, StopForward):  # after which the run that stops it compares
            self._log.clear()
            why = explanation(error)
            if why is not None:
                error.add_note(why)

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self._ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the first process."""
        return self._rank == 0

    def told(self, value: Any) -> list[Any]:
        """Return the values that the processes of a harvest pass."""
        return self._exchange("continues a harvest", value)

    def least(self, number: int) -> int:
        """Return the smallest of the numbers that the processes pass."""
        return min(self._exchange("plans its batches", number))

    def union(self, heads: Sequence[int]) -> list[int]:
        """Return the heads that any of the processes passes, in order."""
        return sorted({head for passed in self._exchange("edits heads", heads) for head in passed})

    @property
    def _rank(self) -> int:
        return int(dist.get_rank(self._group))

    def _exchange(self, doing: str, payload: Any) -> list[Any]:
        """What each process passes; all must do the same thing."""
        told: list[Any] = [None] * len(self._ranks)
        try:
            dist.all_gather_object(told, (doing, payload), group=self._group)
        except RuntimeError as error:
            raise HooklineError(
                f"this process {doing}, but another one has ended, or did not do the same within "
                f"{shard_lenses.TIMEOUT.seconds} s: {ALIKE}"
            ) from error
        for rank, (other, _) in zip(self._ranks, told, strict=True):
            if other != doing:
                raise HooklineError(
                    f"process {rank} {other}, while this one {doing}; perhaps its last run failed: {ALIKE}"
                )
        return [answer for _, answer in told]

    def _compare_hooks(self, checksums: list[str], mine: list[str]) -> None:
        if len(set(checksums)) == 1:
            return
        for rank, names in zip(self._ranks, self._exchange("compares its hooks", mine), strict=True):
            if names != mine:
                same = next(
                    (i for i, (a, b) in enumerate(zip(names, mine, strict=False)) if a != b), min(len(names), len(mine))
                )
                theirs, ours = (_some(hook_names[same:]) for hook_names in (names, mine))
                first = f" after {how_many(same, 'hook')} that both have" if same else ""
                raise HooklineError(f"process {rank} hooks {theirs}, and this one {ours}{first}: {ALIKE}")

    def _compare_calls(self, rank: int, theirs: list[HookCall], ours: list[HookCall]) -> None:
        """Raise at the first call that differs: what comes after it differs too."""
        for their, our in zip_longest(theirs, ours):
            if their is None or our is None or their.name != our.name:
                call, where = (our, f"process {rank}") if our is not None else (their, "this process")
                raise HooklineError(f"a hook at {call.name!r} was not called in {where}, but in another one: {ALIKE}")
            input_difference, made = _difference(their.given, our.given), _difference(their.made, our.made)
            if input_difference > APART:
                raise HooklineError(
                    f"what a hook at {our.name!r} was given in process {rank} differs from what it was given in this "
                    "one, so the output of this run is wrong: something other than hooks (weights, dropout) differs"
                )
            if made > SAME + AMPLIFIED * input_difference:
                raise HooklineError(
                    f"a hook at {our.name!r} made something else of the same activation in process {rank} than in this "
                    "one, so the output of this run is wrong. What a hook computes must not depend on the process: "
                    "seed random numbers alike in all of them"
                )


def _hooks(actions: Sequence[Action]) -> list[str]:
    """The hooks of a run, in words."""
    point_actions = [action for action in actions if isinstance(action, PointAction)]
    point_actions = [
        action for action in point_actions if not isinstance(action, HookAction) or action.registration.is_enabled()
    ]
    return [f"{action.point.name} ({type(action).__name__}, {action.dir})" for action in point_actions]


def _checksum(hooks: list[str]) -> str:
    return sha256("\n".join(hooks).encode()).hexdigest()


def _some(hooks: list[str]) -> str:
    """The first few hooks."""
    return ", ".join([*hooks[:5], *["…"] * (len(hooks) > 5)]) or "nothing"


def _inputs(inputs: Mapping[str, Any]) -> dict[str, tuple[str, list[float]]]:
    """For each tensor among the inputs of a model: its shape, with a checksum of integers, and a sketch of floats."""
    summaries: dict[str, tuple[str, list[float]]] = {}
    for name, x in inputs.items():
        if isinstance(x, Tensor):
            about, is_exact = f"{x.dtype} {list(x.shape)}", not (x.is_floating_point() or x.is_complex())
            checksum = sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest() if is_exact else ""
            summaries[name] = about + checksum, [] if is_exact else sketch(x).tolist()
    return summaries


def _differs(one: tuple[str, list[float]] | None, other: tuple[str, list[float]] | None) -> bool:
    """Whether two inputs differ; None for one that was not given."""
    if one is None or other is None or one[0] != other[0]:
        return one is not other
    return _difference(one[1], other[1]) > SAME


def explanation(error: BaseException) -> str | None:
    """What an error of a sharded model means that says nothing about processes; None for any other error."""
    said = str(error) if isinstance(error, RuntimeError) else ""
    if isinstance(error, dist.DistError) or any(word in said for word in ("gloo", "Connection closed", "imed out")):
        return f"another process has ended, or did not come to the same layer in time: {ALIKE}"
    if "_ToTorchTensor" in said:  # of DTensor
        return (
            "this model writes in place to the output of a layer that is split, and then torch can compute no "
            "gradients; without hooks it fails too. Run it under torch.no_grad(), or in one process"
        )
    return None
