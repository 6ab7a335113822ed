"""Lets torchvision be imported without its compiled operators, which only some builds of torch can load.

Import this before torchvision, or before whatever imports it. Networks need `nms` alone, which is written out here.
"""

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


if not hasattr(torch.ops.torchvision, "nms"):
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.impl("nms", nms, "CPU")
    # torchvision registers shapes for this one too when it is imported.
    LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
