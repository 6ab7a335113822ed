"""Points by attribute: `model.blocks[5].attn.hook_z`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.errors import HooklineError, unknown_point
from hookline.transformer.bridge_modules import module_at
from hookline.weights.matrices import weight

if TYPE_CHECKING:
    from hookline.transformer.index import ModelPoints


class PointPath:
    """The points under a common prefix, such as `blocks.5.attn`. Attributes are points, or longer prefixes.

    Calling it applies the module that has these points: `model.unembed(model.ln_final(x))`.
    """

    def __init__(self, points: ModelPoints, path: str) -> None:
        self._points, self._path = points, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name.startswith(("W_", "b_")):
            return self._weight(name)
        return follow(self._points, f"{self._path}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            what = (
                "write into it, as in W[:] = …"
                if name.startswith(("W_", "b_"))
                else "use a hook to change what is there"
            )
            raise AttributeError(f"{self._path}.{name} cannot be assigned, as that would change nothing: {what}")
        super().__setattr__(name, value)

    def _weight(self, name: str) -> Tensor:
        """`model.blocks[5].attn.W_Q`: see `matrices.weight`."""
        stack, _, layer = self._path.removesuffix(".attn").removesuffix(".mlp").partition(".")
        if not layer.isdigit() or stack != self._points.anatomy.main.name:
            raise AttributeError(f"{self._path} has no weight {name!r}: use a layer, as in model.blocks[5].attn.W_Q")
        return weight(self._points, int(layer), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own module at this path returns for these arguments."""
        module = module_at(self._points.anatomy, self._path)
        if module is None:
            raise HooklineError(
                f"{self._path} cannot be called: it is not one module of {type(self._points.root).__name__}. Call "
                f"modules of model.module, or run part of the model: model(…, start_at_layer=…, stop_at_layer=…)"
            )
        return module(*args, **kwargs)

    def __getitem__(self, index: int) -> PointPath:
        if index not in range(-len(self), len(self)):
            raise IndexError(f"{self._path}[{index}] is out of range: there are {len(self)}")
        return PointPath(self._points, f"{self._path}.{index % len(self)}")

    def __len__(self) -> int:
        return sum(name.isdigit() for name in dir(self))

    def __iter__(self) -> Iterator[PointPath]:
        return (self[index] for index in range(len(self)))

    def __dir__(self) -> list[str]:
        below = [name[len(self._path) + 1 :] for name in self._points.specs if name.startswith(f"{self._path}.")]
        return sorted({name.split(".")[0] for name in below})

    def __repr__(self) -> str:
        return f"{self._path}: {', '.join(dir(self))}"


def follow(points: ModelPoints, path: str) -> Any:
    """The point with this name, or the `PointPath` of all points that start with it."""
    if path == "blocks" and not points.anatomy.is_encoder_decoder:
        path = points.anatomy.main.name
    if path in points.specs:
        return points.find(path)
    if any(name.startswith(f"{path}.") for name in points.specs):
        return PointPath(points, path)
    raise AttributeError(str(unknown_point(path, points.specs)), name=path.rpartition(".")[2])
