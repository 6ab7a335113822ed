"""ImageGrid: which place in a picture a position of the prompt stands for, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, as fractions of the picture's width and height."""
_DIVIDE = "divide x by the picture's width in pixels, and y by its height"


@dataclass(frozen=True, eq=False)
class ImageGrid:
    """The positions that one picture takes, and the box of the picture that each of them looks at.

        grid = model.image_grid(inputs)[0][0]      # of the first prompt's first picture
        grid.box(grid.positions[0])                # (0.0, 0.0, 0.25, 0.25)
        grid.position(0.1, 0.9)                    # the position whose box has that point in it

    Boxes are parts of the picture as it was given, as fractions of its width and height: left, top, right, bottom. A
    position that stands for no place (the end of a row of tiles) has NaN for a box. A model that looks at a picture
    twice, as a whole and in tiles, has boxes that overlap; its finer look is the main grid.
    """

    positions: Int[Tensor, " token"]
    """Columns of the inputs: as the row is padded, if it is."""
    boxes: Float[Tensor, "token 4"]
    main: Int[Tensor, "rows cols"]
    """For each cell of the main grid, which of the tokens it is."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the main grid."""
        return self.main.shape[0], self.main.shape[1]

    @property
    def extent(self) -> Box:
        """The part of the picture that the main grid covers: less than all of it where the picture was cropped."""
        boxes = self.boxes[self.main.flatten()]
        boxes = boxes[~boxes.isnan().any(1)]
        return (*boxes[:, :2].amin(0).tolist(), *boxes[:, 2:].amax(0).tolist())

    def box(self, position: int | Tensor) -> Box:
        """The box of a position, with NaN in it if the position stands for no place."""
        found = (self.positions == int(position)).nonzero().flatten()
        if not len(found):
            first, last = int(self.positions[0]), int(self.positions[-1])
            raise HooklineError(f"position {int(position)} is none of this picture's, which are from {first} to {last}")
        left, top, right, bottom = self.boxes[found[0]].tolist()
        return left, top, right, bottom

    def position(self, x: float, y: float) -> int:
        """The position of the main grid whose box has that point in it; x and y go from 0 to 1, from the top left."""
        if not (0 <= x <= 1 and 0 <= y <= 1):
            raise HooklineError(f"x and y are fractions of the picture, from 0 to 1, not {x}, {y}: {_DIVIDE}")
        tokens = self.main.flatten()
        left, top, right, bottom = self.boxes[tokens].unbind(1)
        inside = (left <= x) & (x < right) & (top <= y) & (y < bottom)
        if not bool(inside.any()):  # on the far edge
            inside = (left <= x) & (x <= right) & (top <= y) & (y <= bottom)
        if not bool(inside.any()):
            raise HooklineError(
                f"the model does not see {x}, {y}: of this picture it sees {tuple(round(e, 3) for e in self.extent)}"
            )
        return int(self.positions[tokens[inside.nonzero()[-1, 0]]])

    def positions_in(self, box: Box) -> list[int]:
        """All positions whose boxes share some area with that box, of every look at the picture."""
        x0, y0, x1, y1 = _checked(box)
        left, top, right, bottom = self.boxes.unbind(1)
        overlaps = (left < x1) & (right > x0) & (top < y1) & (bottom > y0)  # false of NaN
        return self.positions[overlaps].tolist()

    def as_map(self, values: Any, size: tuple[int, int] | None = None) -> Float[Tensor, "rows cols"]:
        """Values of this picture's tokens, as the main grid; with `size`, height × width, as a picture of that size.

        `values` has one number for each of `positions`. What the main grid does not cover is NaN in the picture.
        """
        values = torch.as_tensor(values).detach().float().cpu()
        if values.shape != self.positions.shape:
            raise HooklineError(
                f"this picture has {len(self.positions)} tokens, and needs as many values, not {list(values.shape)}: "
                "of values for the whole prompt take values[grid.positions]"
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
    """A box, if it is one: what was divided to make fractions may be a rounding beside the picture."""
    if len(box) == 4:
        x0, y0, x1, y1 = (float(side) for side in box)
        if -1e-6 <= x0 < x1 <= 1 + 1e-6 and -1e-6 <= y0 < y1 <= 1 + 1e-6:
            return x0, y0, x1, y1
    raise HooklineError(
        "a box is left, top, right, bottom, as fractions of the picture from 0 to 1, left < right and top < bottom; "
        f"not {box}. Of pixels, {_DIVIDE}"
    )
