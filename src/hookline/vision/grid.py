"""ImageGrid: maps token positions of a prompt to regions of an image, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, as fractions of the image's width and height."""
_DIVIDE = "divide x by the image's width in pixels, and y by its height"


@dataclass(frozen=True, eq=False)
class ImageGrid:
    """The token positions of one image, and the region of the image (a box) that each position covers.

        grid = model.image_grid(inputs)[0][0]      # first prompt, first image
        grid.box(grid.positions[0])                # (0.0, 0.0, 0.25, 0.25)
        grid.position(0.1, 0.9)                    # the position whose box contains that point

    A box is (left, top, right, bottom), as fractions of the width and height of the original image. A position that
    covers no region, such as a newline token, has a box of NaN. If a model receives an image twice, as a whole and in
    tiles, boxes overlap, and the finer grid is the main grid.
    """

    positions: Int[Tensor, " token"]
    """Columns of `input_ids`, padding included."""
    boxes: Float[Tensor, "token 4"]
    main: Int[Tensor, "rows cols"]
    """For each cell of the main grid, the index of its token."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the main grid."""
        return self.main.shape[0], self.main.shape[1]

    @property
    def extent(self) -> Box:
        """The region of the image that the main grid covers; smaller than the image if it was cropped."""
        boxes = self.boxes[self.main.flatten()]
        boxes = boxes[~boxes.isnan().any(1)]
        return (*boxes[:, :2].amin(0).tolist(), *boxes[:, 2:].amax(0).tolist())

    def box(self, position: int | Tensor) -> Box:
        """The box of a position; NaN if the position covers no region."""
        indices = (self.positions == int(position)).nonzero().flatten()
        if not len(indices):
            first, last = int(self.positions[0]), int(self.positions[-1])
            raise HooklineError(
                f"position {int(position)} is not part of this image: its positions are {first} to {last}"
            )
        left, top, right, bottom = self.boxes[indices[0]].tolist()
        return left, top, right, bottom

    def position(self, x: float, y: float) -> int:
        """The position of the main grid whose box contains a point; x and y are fractions from the top left corner."""
        if not (0 <= x <= 1 and 0 <= y <= 1):
            raise HooklineError(f"x and y must be fractions of the image, from 0 to 1, not {x}, {y}: {_DIVIDE}")
        tokens = self.main.flatten()
        left, top, right, bottom = self.boxes[tokens].unbind(1)
        inside = (left <= x) & (x < right) & (top <= y) & (y < bottom)
        if not bool(inside.any()):  # on the far edge
            inside = (left <= x) & (x <= right) & (top <= y) & (y <= bottom)
        if not bool(inside.any()):
            raise HooklineError(
                f"no position covers {x}, {y}: the model receives {tuple(round(e, 3) for e in self.extent)}"
            )
        return int(self.positions[tokens[inside.nonzero()[-1, 0]]])

    def positions_in(self, box: Box) -> list[int]:
        """All positions whose boxes overlap a box, in the main grid and in any other."""
        x0, y0, x1, y1 = _checked(box)
        left, top, right, bottom = self.boxes.unbind(1)
        overlaps = (left < x1) & (right > x0) & (top < y1) & (bottom > y0)  # False for NaN
        return self.positions[overlaps].tolist()

    def as_map(self, values: Any, size: tuple[int, int] | None = None) -> Float[Tensor, "rows cols"]:
        """One value per token as a map over the main grid; with `size` (height, width), as an image of that size.

        `values` has one number per position. Pixels that the main grid does not cover are NaN.
        """
        values = torch.as_tensor(values).detach().float().cpu()
        if values.shape != self.positions.shape:
            raise HooklineError(
                f"expected one value for each of the image's {len(self.positions)} tokens, got shape "
                f"{list(values.shape)}: index values for the whole prompt as values[grid.positions]"
            )
        cells = values[self.main]
        if size is None:
            return cells
        height, width = size
        painted = torch.full((height, width), torch.nan)
        scale = torch.tensor([width, height, width, height])
        for token, value in zip(self.main.flatten().tolist(), cells.flatten().tolist(), strict=True):
            if bool(self.boxes[token].isnan().any()):
                continue
            x0, y0, x1, y1 = (self.boxes[token] * scale).round().int().tolist()
            painted[y0:y1, x0:x1] = value
        return painted

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        rows, cols = self.shape
        first, last = int(self.positions[0]), int(self.positions[-1])
        return f"ImageGrid({rows} × {cols}, {len(self)} tokens from {first} to {last})"


def _checked(box: Any) -> Box:
    """The box as floats; raises if it is not one. Tolerates rounding at the edges of the image."""
    if len(box) == 4:
        x0, y0, x1, y1 = (float(side) for side in box)
        if -1e-6 <= x0 < x1 <= 1 + 1e-6 and -1e-6 <= y0 < y1 <= 1 + 1e-6:
            return x0, y0, x1, y1
    raise HooklineError(
        "a box is (left, top, right, bottom), as fractions of the image from 0 to 1, with left < right and top < "
        f"bottom, not {box}. For pixels, {_DIVIDE}"
    )
