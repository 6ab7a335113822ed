"""ActivationCache: the activations of a run, by name."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from hookline.engine import passes
from hookline.engine._compiler.untraced import outside_compiler
from hookline.engine._memory.snapshots import address, separated
from hookline.engine._recording.deferred import mapped, memory_of, read_once, some_of, without_data
from hookline.engine._reports.grouping import grouped
from hookline.errors import (
    HooklineError,
    HooklineWarning,
    UnavailablePointError,
    UnknownPointError,
    how_many,
    unknown_point,
    users_level,
)
from hookline.files.tensorfile import read_tensors, taking_apart, write_tensors
from hookline.values.casting import check_cache_dtype, is_narrowed, overflow_problem, overflows
from hookline.values.rows import Rows, checked_rows, of_rows
from hookline.values.structures import NoTensorError

if TYPE_CHECKING:
    from hookline.engine.hooked import Hooked
    from hookline.engine.names import Points

_GRAD = "_grad"
_MANY = 20
"""Up to this many activations are printed one per line; more are grouped by kind."""


class ActivationCache(Mapping[str, Tensor]):
    """The activations of one run: a mapping from point names to tensors, in the order in which they fired.

        >>> output, cache = net.run_with_cache(x)
        >>> cache["fc1"].shape, cache["fc1.output"].shape     # two names of one point
        (torch.Size([1, 8]), torch.Size([1, 8]))

    With `incl_bwd=True` it also has `cache["fc1_grad"]`; `cache["rnn_cell#2"]` is the third call of a module that ran
    several times.

    Nothing that a hook, the model or another run does later changes it.
    """

    def __init__(self, tensors: MutableMapping[str, Tensor], points: Points, *, has_batch_dim: bool = True) -> None:
        self._tensors, self.has_batch_dim = tensors, has_batch_dim
        self.forward_pass: Any = None
        """The part of a text that the activations are from."""
        self.positions: Any = None
        """The positions that were kept; None for all."""
        self._points: Points | None = points

    @cached_property
    def _keys(self) -> dict[str, str]:
        return {self._canonical_key(key): key for key in self._tensors}

    def _canonical_key(self, key: str) -> str:
        """The one name of a key of this cache; a new name that the filter gave a point is its only one."""
        try:
            return self._canonical(key)
        except UnknownPointError:
            return key

    def _canonical(self, key: str) -> str:
        """The one name for all names of a point, or of its gradient."""
        base = key.removesuffix(_GRAD)
        return key if self._points is None else self._points.canonical_name(base) + key[len(base) :]

    def __getitem__(self, name: Any) -> Tensor:
        return self._read(self._key(name))

    @outside_compiler
    def _read(self, key: str) -> Tensor:
        """The activation with this name in this cache. It belongs to the reader, who may write to one row of it."""
        try:
            x = self._tensors[key]
        except NoTensorError as error:
            raise UnavailablePointError(f"{key!r} is not available on this model: {error}") from error
        own = separated(x)  # an expanded tensor is kept as it is until then: most are never read
        if own is not x:
            self._tensors[key] = own
        return own

    def __contains__(self, name: object) -> bool:
        try:
            self._key(name)  # nothing is computed
        except KeyError:
            return False
        return True

    def _key(self, name: Any) -> str:
        """The name under which an activation is in this cache."""
        asked = name if isinstance(name, str) or self._points is None else self._points.name_of(name)
        if asked in self._tensors:
            return asked
        try:
            canonical = self._canonical(asked)
        except UnavailablePointError:
            raise
        except UnknownPointError:
            raise unknown_point(asked, self._tensors, meant=partial(self._meant_by, asked)) from None
        for spelling in (canonical, canonical.removesuffix("#0")):  # of one call, the first is the only one
            if spelling in self._keys:
                return self._keys[spelling]
        raise UnavailablePointError(self._why_missing(asked))

    def _meant_by(self, name: str) -> list[str]:
        return [] if self._points is None else [meant for meant in self._points.meant_by(name) if meant in self]

    def _why_missing(self, name: str) -> str:
        if calls := self._calls(name):
            if len(calls) == 1:
                return f"of the calls of its module, only one has {name!r}: ask for {calls[0]!r}"
            return (
                f"{name!r} fired {len(calls)} times in this run: ask for {calls[0]!r} to {calls[-1]!r}, "
                f"or for all of them with cache.calls({name!r})"
            )
        if name.endswith(_GRAD):
            return (
                f"no gradient was cached for {name.removesuffix(_GRAD)!r}: ask with incl_bwd=True; if you did, "
                f"none reached that point"
            )
        if self._points is not None and self._points.is_on_request(name):
            return (
                f"{name!r} is recorded only when it is asked for by name, since it is large: "
                f"run_with_cache(…, names_filter=[…, {name!r}])"
            )
        return (
            f"{name!r} is a point of this model but is not in this cache: the names_filter left it out, its module "
            f"did not run, or it passed no tensor. The cache has {', '.join(map(repr, self._tensors))}"
        )

    def _calls(self, name: str) -> list[str]:
        base = name.removesuffix(_GRAD)
        of_point = re.compile(re.escape(self._canonical(base)) + r"#\d+" + name[len(base) :])
        return [key for canonical, key in self._keys.items() if of_point.fullmatch(canonical)]

    def calls(self, name: str) -> list[Tensor]:
        """Return the activation at each call of a module that runs several times in a forward pass."""
        keys = self._calls(name)
        return [self._read(key) for key in keys] if keys else [self[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def to(self, device: torch.device | torch.dtype | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return a cache with its tensors on another device, and those of floats in another dtype."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        check_cache_dtype(dtype)

        def moved(x: Tensor, name: str) -> Tensor:
            new = x.to(device=device, dtype=dtype if x.is_floating_point() else None)
            if is_narrowed(x, dtype) and not new.is_meta and bool(overflows(x, new)):
                raise HooklineError(f"{overflow_problem(name, new.dtype)}: use cache.to(torch.bfloat16)")
            return new

        # Now, on the device that it would have been computed on.
        return self.mapped(moved, is_now=True)

    def remove_batch_dim(self) -> Self:
        """Return a cache without the batch axis, for a batch of one. Tensors without that axis stay as they are."""
        if not self.has_batch_dim:
            return self
        name, first = next(((name, x) for name, x in without_data(self._tensors) if x.ndim), ("", None))
        if first is not None and first.shape[0] != 1:
            raise ValueError(f"remove_batch_dim needs a batch of one, but {name!r} has shape {tuple(first.shape)}")
        new = self.mapped(lambda x, _name: x[0] if x.ndim and x.shape[0] == 1 else x)
        new.has_batch_dim = False
        return new

    def rows(self, which: Rows) -> Self:
        """Return a cache with some rows of the batch: a slice, indices, a mask; or one row, without the batch axis.

            cache.rows(slice(0, 2))["fc1"]     # [2, 8]
            cache.rows(3)["fc1"]               # [8]

        Tensors without a batch axis stay as they are. A batch does not say which image belongs to which row, so
        activations of images are left out.
        """
        if not self.has_batch_dim:
            raise HooklineError("this cache has no batch axis: it has one row only")
        count = self._row_count()
        which = checked_rows(which, count)
        kept = self._tensors if count == 1 else self._of_text()
        new = self._with(mapped(kept, lambda x, name: of_rows(x, name, which, count)))
        new.has_batch_dim = not isinstance(which, int)
        new.forward_pass = passes.text().rows(self.forward_pass, which)
        return new

    def _of_text(self) -> MutableMapping[str, Tensor]:
        """The activations without those of images, and a warning if there are any."""
        if self.forward_pass is None or self._points is None:
            return self._tensors
        of_images = [name for name in self._tensors if self._points.find(name.removesuffix(_GRAD)).stream == "image"]
        if of_images:
            warnings.warn(
                f"{len(of_images)} activations of images (vision.…, projector.…) were left out: it is not known "
                f"which of them belong to these rows. Run the prompts one by one to get them",
                HooklineWarning,
                stacklevel=users_level(),
            )
        return some_of(self._tensors, [name for name in self._tensors if name not in of_images])

    def apply_slice_to_batch_dim(self, batch_slice: Rows) -> Self:
        """`rows`, by TransformerLens's name."""
        return self.rows(batch_slice)

    def _row_count(self) -> int:
        if self.forward_pass is not None:
            return self.forward_pass.span.rows
        return next((x.shape[0] for _, x in without_data(self._tensors) if x.ndim), 0)

    def mapped(self, change: Callable[[Tensor, str], Tensor], *, is_now: bool = False) -> Self:
        """Return a cache with `change(x, name)` of each activation; of one that is deferred when it is read."""
        return self._with(mapped(self._tensors, change, is_now=is_now))

    def _with(self, tensors: MutableMapping[str, Tensor]) -> Self:
        new = type(self).__new__(type(self))
        vars(new).update(vars(self), _tensors=tensors)
        vars(new).pop("_keys", None)
        return new

    def __getstate__(self) -> dict[str, Any]:
        # Without the model: the tensors are pickled under the names that they have here.
        kept = {"has_batch_dim": self.has_batch_dim, "positions": self.positions, "forward_pass": None}
        return {"_tensors": read_once(self._tensors), "_points": None, **kept}

    def save(self, path: str | Path) -> None:
        """Write the tensors to a safetensors file, with their names, their origin, and a checksum.

        Values that are not finite are written as they are.
        """
        write_tensors(path, "activations", read_once(self._tensors), self._about())

    def _about(self) -> dict[str, str]:
        """The metadata of the file."""
        from hookline import __version__

        positions = {} if self.positions is None else {"positions": repr(self.positions)}
        order = {"names": json.dumps(list(self._tensors))}
        return {"version": __version__, "has_batch_dim": str(self.has_batch_dim)} | order | positions

    @classmethod
    def load(cls, path: str | Path, model: Hooked | None = None) -> Self:
        """Read a file written by `save`, and check its checksum.

        With the model, activations are found by all names of their points, and the methods of its caches are available.
        """
        found, about = read_tensors(path, "activations", called="activations", writer="a cache")
        kind: Any = model._cache_class if model is not None else cls
        cache = kind.__new__(kind)
        with taking_apart(str(path)):
            names = json.loads(about["names"]) if "names" in about else list(found)
            if sorted(names) != sorted(found):
                raise ValueError("its list of names does not match its tensors")
            cache._tensors = {name: found[name] for name in names}
            cache.has_batch_dim = {"True": True, "False": False}[about.get("has_batch_dim", "True")]
        cache._points, cache.forward_pass, cache.positions = None, None, about.get("positions")
        if model is not None:
            cache._adopt(model.index, about, path)
        return cache

    def _adopt(self, points: Points, about: dict[str, str], path: str | Path) -> None:  # noqa: ARG002
        """Become a cache of a model after loading."""
        self._points = points

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code></td><td>{shape}</td><td>{dtype}</td><td>{size}</td></tr>"
            for name, shape, dtype, size in self._rows()
        )
        return f"<p>{how_many(len(self), 'activation')}, {_size(self.nbytes)}</p><table>{rows}</table>"

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        """The name, shape, dtype and size of each activation; of many, one row for the same kind in several layers."""
        every = dict(without_data(self._tensors))
        kinds = [(name, (tuple(x.shape), x.dtype)) for name, x in every.items()]
        groups = grouped(kinds) if len(kinds) > _MANY else [(name, [name]) for name, _ in kinds]
        for title, names in groups:
            first = every[names[0]]
            size = _size(first.element_size() * first.numel())
            times = f"{len(names)} × " if len(names) > 1 else ""
            yield title, str(list(first.shape)), str(first.dtype).removeprefix("torch."), times + size

    @property
    def nbytes(self) -> int:
        """The memory that the cache holds, in bytes. A tensor under two names counts once.

        It grows when an activation is read that is computed on demand.
        """
        sizes: dict[int, int] = {}
        for x in memory_of(self._tensors):
            if x.layout is torch.strided and not x.is_nested:
                start = address(x) - int(x.storage_offset()) * x.element_size()
                sizes[start] = x.untyped_storage().nbytes()  # of a view, everything that it keeps alive
            else:
                sizes[id(x)] = x.element_size() * x.numel()
        return sum(sizes.values())

    def __repr__(self) -> str:
        rows = list(self._rows())
        width = max((len(name) for name, *_ in rows), default=0)
        lines = [f"  {name:<{width}}  {shape} {dtype}, {size}" for name, shape, dtype, size in rows]
        if len(lines) > 60:
            lines[50:-5] = [f"  … {len(lines) - 55} more"]
        return "\n".join([f"ActivationCache: {how_many(len(self), 'activation')}, {_size(self.nbytes)}", *lines])


def _size(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
