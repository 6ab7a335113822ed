"""ImageInfo: regions of an image as patches of the processed image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hookline.errors import HooklineError

Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


class RegionError(HooklineError, ValueError):
    """A region that is given twice, or not at all."""


@dataclass(frozen=True)
class CorrectedBbox:
    """A box in pixels of the processed image, and whether a part of it was cut off."""

    bbox: Box
    clipped: bool


@dataclass(frozen=True)
class CorrectedSeg:
    """A mask [height, width] of the processed image, and whether a part of it was cut off."""

    mask: NDArray[np.bool_]
    clipped: bool


@dataclass(frozen=True)
class PatchOverlap:
    """The patches that a region touches, row by row, and the fraction of each that it covers."""

    patch_indices: list[int]
    overlap_fractions: list[float]


@dataclass
class ImageInfo:
    """How an image was cropped and resized, and its grid of patches. Sizes are (width, height)."""

    image: Any
    original_size: tuple[int, int]
    processed_size: tuple[int, int]
    crop_box: tuple[int, int, int, int] | None
    patch_size: int
    spatial_merge_size: int
    grid_h: int
    grid_w: int

    @property
    def effective_patch_size(self) -> int:
        """The side of the square that one token covers, in pixels."""
        return self.patch_size * self.spatial_merge_size

    @property
    def num_patches(self) -> int:
        """The number of tokens of the image."""
        return self.grid_h * self.grid_w

    @property
    def _crop(self) -> tuple[int, int, int, int]:
        return self.crop_box if self.crop_box is not None else (0, 0, *self.original_size)

    def correct_bbox(self, bbox: Box) -> CorrectedBbox:
        """A box of the original image in the processed one; all 0 if it is outside."""
        first, last = np.array(self._crop[:2], float), np.array(self._crop[2:], float)
        low, high = np.array(bbox[:2], float), np.array(bbox[2:], float)
        clipped = bool((low < first).any() or (high > last).any())
        low, high = np.maximum(low, first), np.minimum(high, last)
        if (low >= high).any():
            return CorrectedBbox((0.0, 0.0, 0.0, 0.0), clipped=True)
        scale = np.array(self.processed_size) / (last - first)
        corners = np.concatenate([(low - first) * scale, (high - first) * scale])
        return CorrectedBbox((float(corners[0]), float(corners[1]), float(corners[2]), float(corners[3])), clipped)

    def correct_seg(self, mask: NDArray[np.bool_]) -> CorrectedSeg:
        """A mask of the original image in the processed one, by the nearest pixel."""
        left, top, right, bottom = self._crop
        part = np.asarray(mask, bool)[top:bottom, left:right]
        rows, columns = (
            np.minimum((np.arange(size) + 0.5) * length / size, length - 1).astype(int)
            for size, length in zip(self.processed_size[::-1], part.shape, strict=True)
        )
        return CorrectedSeg(part[np.ix_(rows, columns)], clipped=bool(part.sum() < np.asarray(mask, bool).sum()))

    def calc_overlay(self, *, bbox: Box | None = None, mask: NDArray[np.bool_] | None = None) -> PatchOverlap:
        """The patches that a box or a mask of the processed image touches."""
        if (bbox is None) == (mask is None):
            raise RegionError("pass either bbox or mask, not both")
        cover = self._box_cover(bbox) if bbox is not None else self._mask_cover(np.asarray(mask, bool))
        touched = cover.ravel().nonzero()[0]
        return PatchOverlap(touched.tolist(), cover.ravel()[touched].tolist())

    def _box_cover(self, bbox: Box) -> NDArray[np.float64]:
        """The fraction of each patch in a box: along one axis times along the other."""
        side = self.effective_patch_size

        def along(low: float, high: float, count: int, limit: int) -> NDArray[np.float64]:
            starts = np.arange(count) * side
            inside = np.minimum(min(high, limit), starts + side) - np.maximum(max(low, 0.0), starts)
            return np.maximum(inside, 0) / side

        width, height = self.processed_size
        return np.outer(along(bbox[1], bbox[3], self.grid_h, height), along(bbox[0], bbox[2], self.grid_w, width))

    def _mask_cover(self, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
        side = self.effective_patch_size
        part = mask[: self.grid_h * side, : self.grid_w * side]
        return part.reshape(self.grid_h, side, self.grid_w, side).mean((1, 3))
