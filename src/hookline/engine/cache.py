"""ActivationCache: what a run recorded, by name."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from hookline.engine import passes
from hookline.engine.batch_index import Rows, checked_rows, of_rows
from hookline.engine.grouping import grouped
from hookline.engine.snapshots import address
from hookline.engine.tensorfile import parsed_json, read_tensors, write_tensors
from hookline.errors import (
    HooklineError,
    HooklineWarning,
    UnavailablePointError,
    UnknownPointError,
    unknown_point,
    users_level,
)

if TYPE_CHECKING:
    from hookline.engine.hooked import Hooked
    from hookline.engine.names import Points

_GRAD = "_grad"
_MANY = 20
"""As many activations are printed each in a line; of more, one line for each kind."""


class ActivationCache(Mapping[str, Tensor]):
    """The activations of one run: a mapping from point names to tensors, in the order in which they fired.

        output, cache = net.run_with_cache(x)
        cache["fc1"]            # also under any other name of that point: cache["fc1.output"]
        cache["fc1_grad"]       # with incl_bwd=True
        cache["rnn_cell#2"]     # the third call of a module that ran several times

    Nothing that is done later, by a hook, the model or another run, changes what is in it.
    """

    def __init__(self, tensors: dict[str, Tensor], points: Points, *, has_batch_dim: bool = True) -> None:
        self._tensors, self.has_batch_dim = tensors, has_batch_dim
        self.forward_pass: Any = None  # which part of a text it is of
        self.positions: Any = None  # which positions of that were kept; None for all
        self._points: Points | None = points

    @cached_property
    def _keys(self) -> dict[str, str]:
        return {self._canonical(key): key for key in self._tensors}

    def _canonical(self, key: str) -> str:
        """One spelling for all names of a point."""
        base, grad = (key.removesuffix(_GRAD), _GRAD) if key.endswith(_GRAD) else (key, "")
        return (self._points.canonical_name(base) if self._points is not None else base) + grad

    def __getitem__(self, name: Any) -> Tensor:
        asked = name if isinstance(name, str) or self._points is None else self._points.name_of(name)
        if asked in self._tensors:
            return self._tensors[asked]
        try:
            canonical = self._canonical(asked)
        except UnavailablePointError:
            raise
        except UnknownPointError:
            raise unknown_point(asked, self._tensors) from None
        for spelling in (canonical, canonical.removesuffix("#0")):  # the only call is the first
            if spelling in self._keys:
                return self._tensors[self._keys[spelling]]
        raise UnavailablePointError(self._why_missing(asked))

    def _why_missing(self, name: str) -> str:
        if calls := self._calls(name):
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
        base, grad = (name.removesuffix(_GRAD), _GRAD) if name.endswith(_GRAD) else (name, "")
        of_point = re.compile(re.escape(self._canonical(base)) + r"#\d+" + grad)
        return [key for canonical, key in self._keys.items() if of_point.fullmatch(canonical)]

    def calls(self, name: str) -> list[Tensor]:
        """The activation at each call of a module that runs several times in a forward pass."""
        keys = self._calls(name)
        return [self._tensors[key] for key in keys] if keys else [self[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def to(self, device: torch.device | torch.dtype | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """A cache whose tensors are on another device, or, those of floats, of another dtype."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        tensors = {
            name: x.to(device=device, dtype=dtype if x.is_floating_point() else None)
            for name, x in self._tensors.items()
        }
        return self._with(tensors)

    def remove_batch_dim(self) -> Self:
        """A cache without the first axis, of a batch of one. Tensors that have no such axis stay as they are."""
        if not self.has_batch_dim:
            return self
        name, first = next(((name, x) for name, x in self._tensors.items() if x.ndim), ("", None))
        if first is not None and first.shape[0] != 1:
            raise ValueError(f"remove_batch_dim needs a batch of one, but {name!r} has shape {tuple(first.shape)}")
        new = self._with({name: x[0] if x.ndim and x.shape[0] == 1 else x for name, x in self._tensors.items()})
        new.has_batch_dim = False
        return new

    def rows(self, which: Rows) -> Self:
        """A cache of some rows of the batch only: a slice, several indices, a mask; or one, without that axis.

            cache.rows(slice(0, 2))["fc1"]     # [2, 8]
            cache.rows(3)["fc1"]               # [8]

        Tensors without a batch axis stay as they are. Whose pictures are whose is not known of a batch, so what a
        vision tower made of them is left out.
        """
        if not self.has_batch_dim:
            raise HooklineError("this cache has no batch axis: it is of one row already")
        count = self._row_count()
        which = checked_rows(which, count)
        kept = self._tensors if count == 1 else self._of_text()
        new = self._with({name: of_rows(x, name, which, count) for name, x in kept.items()})
        new.has_batch_dim = not isinstance(which, int)
        new.forward_pass = passes.text().rows(self.forward_pass, which)
        return new

    def _is_of_images(self, name: str) -> bool:
        base = name.removesuffix("_grad")
        return self._points is not None and self._points.find(base).stream == "image"

    def _of_text(self) -> dict[str, Tensor]:
        """Without what is made of pictures, which need not be one for each row; says so, if there is some."""
        kept = {
            name: x for name, x in self._tensors.items() if self.forward_pass is None or not self._is_of_images(name)
        }
        if len(kept) < len(self._tensors):
            warnings.warn(
                f"{len(self._tensors) - len(kept)} activations of pictures (vision.…, projector.…) are left out: which "
                f"of them belong to these rows is not known. Run the prompts one by one to have them",
                HooklineWarning,
                stacklevel=users_level(),
            )
        return kept

    def apply_slice_to_batch_dim(self, batch_slice: Rows) -> Self:
        """The same as `rows`, by its older name."""
        return self.rows(batch_slice)

    def _row_count(self) -> int:
        if self.forward_pass is not None:
            return self.forward_pass.span.rows
        return next((x.shape[0] for x in self._tensors.values() if x.ndim), 0)

    def _with(self, tensors: dict[str, Tensor]) -> Self:
        new = type(self).__new__(type(self))
        new._tensors, new._points, new.has_batch_dim = tensors, self._points, self.has_batch_dim
        new.forward_pass, new.positions = self.forward_pass, self.positions
        return new

    def __getstate__(self) -> dict[str, Any]:
        # Without the model: what is pickled is the tensors, under the names they have here.
        kept = {"has_batch_dim": self.has_batch_dim, "positions": self.positions, "forward_pass": None}
        return {"_tensors": self._tensors, "_points": None, **kept}

    def save(self, path: str | Path) -> None:
        """Write the tensors to a safetensors file, with their names, what is known of where they are from, and a sum.

        Values that are not finite are written as they are.
        """
        write_tensors(path, "activations", self._tensors, self._about())

    def _about(self) -> dict[str, str]:
        """What a file says beside the tensors."""
        positions = {} if self.positions is None else {"positions": repr(self.positions)}
        order = {"names": json.dumps(list(self._tensors))}
        return {"version": _version(), "has_batch_dim": str(self.has_batch_dim)} | order | positions

    @classmethod
    def load(cls, path: str | Path, model: Hooked | None = None) -> Self:
        """Read what `save` wrote, if its checksum is right.

        With the model, the points go by all their names again, and its methods are there.
        """
        found, about = read_tensors(path, "activations", called="activations", writer="a cache")
        kind: Any = model._cache_class if model is not None else cls
        cache = kind.__new__(kind)
        cache._tensors, cache._points = _in_order(found, about.get("names"), path), None
        cache.has_batch_dim = _truth(about.get("has_batch_dim", "True"), path)
        cache.forward_pass, cache.positions = None, about.get("positions")
        if model is not None:
            cache._adopt(model._points, about, path)
        return cache

    def _adopt(self, points: Points, about: dict[str, str], path: str | Path) -> None:  # noqa: ARG002
        """Belong to a model, after being read from a file."""
        self._points = points

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code></td><td>{shape}</td><td>{dtype}</td><td>{size}</td></tr>"
            for name, shape, dtype, size in self._rows()
        )
        return f"<p>{len(self)} activations, {_size(self.nbytes)}</p><table>{rows}</table>"

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """Name, shape, dtype and size of each; of many, one row for each kind with the layers that have it."""
        kinds = [(name, (tuple(x.shape), x.dtype)) for name, x in self._tensors.items()]
        groups = [(name, [name]) for name, _ in kinds] if len(kinds) <= _MANY else grouped(kinds)
        return [(title, *self._cells(members)) for title, members in groups]

    def _cells(self, names: list[str]) -> tuple[str, str, str]:
        first = self._tensors[names[0]]
        times = f"{len(names)} × " if len(names) > 1 else ""
        return str(list(first.shape)), str(first.dtype).removeprefix("torch."), times + _size(_bytes(first))

    @property
    def nbytes(self) -> int:
        """The memory the cache holds. A tensor under two names counts once."""
        sizes: dict[int, int] = {}
        for x in self._tensors.values():
            if x.layout is torch.strided and not x.is_nested:
                start = address(x) - int(x.storage_offset()) * x.element_size()
                sizes[start] = x.untyped_storage().nbytes()  # of a view, all that it keeps alive
            else:
                sizes[id(x)] = _bytes(x)
        return sum(sizes.values())

    def __repr__(self) -> str:
        rows = self._rows()
        width = max((len(name) for name, *_ in rows), default=0)
        lines = [f"  {name:<{width}}  {shape} {dtype}, {size}" for name, shape, dtype, size in rows]
        if len(lines) > 60:
            lines[50:-5] = [f"  … {len(lines) - 55} more"]
        return "\n".join([f"ActivationCache: {len(self)} activations, {_size(self.nbytes)}", *lines])


def _in_order(found: dict[str, Tensor], order: str | None, path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file in the order in which they fired."""
    if order is None:
        return found
    names = parsed_json(order, f"the list of names in {path}")
    if (
        not isinstance(names, list)
        or not all(isinstance(each, str) for each in names)
        or sorted(names) != sorted(found)
    ):
        raise HooklineError(f"{path} is damaged: its list of names is not that of its tensors, {', '.join(found)}")
    return {name: found[name] for name in names}


def _truth(given: str, path: str | Path) -> bool:
    if given not in ("True", "False"):
        raise HooklineError(f"{path} is damaged: has_batch_dim is True or False, not {given!r}")
    return given == "True"


def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:  # used from its sources
        return "unknown"


def _bytes(x: Tensor) -> int:
    return x.element_size() * x.numel()


def _size(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
