"""Lets torchvision be imported without its compiled operators, which only some builds of torch can load.

Import this before torchvision, or before whatever imports it. Networks need `nms` alone, which is written out here.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """The boxes that stay when each removes those with lower scores that overlap it."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    waiting, chosen = scores.argsort(descending=True, stable=True), []
    while len(waiting):
        best, waiting = waiting[0], waiting[1:]
        chosen.append(best)
        low = torch.maximum(boxes[best, :2], boxes[waiting, :2])
        high = torch.minimum(boxes[best, 2:], boxes[waiting, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        waiting = waiting[shared / (areas[best] + areas[waiting] - shared) <= threshold]
    return torch.stack(chosen) if chosen else scores.new_zeros(0, dtype=torch.long)


def has_compiled_operators() -> bool:
    """Whether this build of torchvision fits torch: its operators are then loaded, and cannot be written out again."""
    spec = find_spec("torchvision")
    compiled = [] if spec is None or spec.origin is None else [*Path(spec.origin).parent.glob("_C*.so")]
    try:
        for path in compiled:
            torch.ops.load_library(path)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")


if not has_compiled_operators():
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.impl("nms", nms, "CPU")
    # torchvision registers shapes for this one too when it is imported.
    LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
