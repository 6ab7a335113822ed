"""Every network that torchvision registers; its operators (deformable convolutions, RoI pooling) are not there."""

from collections.abc import Iterator

import torch
import torchvision
from zoo.network import Built, Network, image, images, runs, smallest

torchvision.ops.boxes._assert_has_ops = lambda: None  # `torchvision_ops` has the one that is asked for


def build(name: str) -> Built:
    """The network without weights, on images or, for detection, a list of them."""
    plain = {"weights": None}
    detects = any(word in name for word in ("rcnn", "retinanet", "fcos", "ssd"))
    segments = any(word in name for word in ("deeplab", "fcn_", "lraspp"))
    if detects or segments:
        plain |= {"weights_backbone": None}

    def make(**options):
        return torchvision.models.get_model(name, **plain, **options)

    module = smallest(
        make,
        {"num_classes": 10},
        {"hidden_dim": 64, "mlp_dim": 128, "num_heads": 4, "num_layers": 2}
        if name.startswith("vit")
        else {"depths": [1, 1, 1, 1]},
        {"image_size": 64, "num_layers": 2},
        {"depths": [1, 1, 1, 1], "num_classes": 10},
        {"width_per_group": 16, "num_classes": 10},
        {"block_setting": []},
    )
    if detects:
        return runs(module, (([torch.rand(3, 96, 96)],), {}), (([torch.rand(3, 320, 320)],), {}))
    if name == "raft_large" or name == "raft_small":
        return runs(module, ((image(128), image(128)), {"num_flow_updates": 2}))
    video = ((torch.randn(1, 3, 8, 64, 64),), {}), ((torch.randn(1, 3, 16, 224, 224),), {})
    return runs(module, *images(64, 96, 128, 224, 256), *video)


def networks() -> Iterator[Network]:
    """One row per registered name."""
    for name in torchvision.models.list_models():
        yield Network(name, lambda name=name: build(name))
