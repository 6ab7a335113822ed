"""Attribution and looking inside, on any `nn.Module`: what a network responds to, where, and by which units.

    from hookline.experiments import networks
    networks.grad_cam(net, images, at="layer4", target=3).plot()

Every function takes a wrapper or an `nn.Module`, and the inputs that it is called with: a tensor, a tuple of arguments
or a dict of keywords. Results have one row per input. Modes, `requires_grad`, `.grad` and buffers stay as they are.
"""

from hookline.experiments.networks.image_result import ImageResult
from hookline.experiments.networks.input_gradients import guided_backprop, saliency
from hookline.experiments.networks.path_gradients import integrated_gradients
from hookline.experiments.networks.perturbation import ablate_channels, occlusion
from hookline.experiments.networks.point_gradients import grad_cam, gradient_x_activation, neuron_gradient
from hookline.experiments.networks.unit_inputs import maximize, top_inputs
from hookline.experiments.networks.unit_maps import feature_maps

__all__ = [
    "ablate_channels",
    "feature_maps",
    "grad_cam",
    "gradient_x_activation",
    "guided_backprop",
    "integrated_gradients",
    "maximize",
    "neuron_gradient",
    "occlusion",
    "saliency",
    "top_inputs",
    "ImageResult",
]


def __dir__() -> list[str]:
    return __all__
