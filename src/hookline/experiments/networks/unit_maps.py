"""Feature maps: the activation at a point, drawn as one image with all channels."""

from __future__ import annotations

from typing import Any

import torch

from hookline.experiments.networks.image_result import ImageResult, axes_of, network_result
from hookline.experiments.networks.network_inputs import NetworkInputs
from hookline.experiments.networks.network_runs import attributing, point_at, run_noting, wrapped


def feature_maps(net: Any, inputs: Any, at: Any) -> ImageResult:
    """The activation at a point; `.plot()` draws all channels of [batch, channel, height, width] side by side.

    >>> networks.feature_maps(net, x, at="fc1").values.shape
    torch.Size([1, 8])
    """
    wrapper, batch = wrapped(net), NetworkInputs.of(inputs)
    point = point_at(wrapper, at)
    with attributing(wrapper, with_grad=False), torch.no_grad():
        activation = run_noting(wrapper, batch, point)[1]
    info = {"about": "feature maps", "at": point.name}
    return network_result(activation, "activation", info, axes=axes_of(point, activation))
