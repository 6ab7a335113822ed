"""Every model that diffusers' own tests build, from the folder that `DIFFUSERS_TESTS` names."""

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.utils import import_utils  # noqa: F401 (before a stand-in for anything is there)
from torch import nn
from zoo.foreign_tests import failing, folder_of, imported
from zoo.network import Built, Network


def build(config: Any) -> Built:
    """The model as its tests build it, with the inputs that they give it."""
    torch.use_deterministic_algorithms(False)
    module: nn.Module = config.model_class(**config.get_init_dict())
    inputs = config.get_dummy_inputs()
    return module, (), inputs


def networks() -> Iterator[Network]:
    """One row per class of model, and per class of its tests where these differ in its options."""
    folder = folder_of("DIFFUSERS_TESTS", "models/transformers")
    for file in sorted(folder.glob("models/*/test_models_*.py")):
        try:
            module = imported(f"{folder.name}.models.{file.parent.name}.{file.stem}")
        except Exception as error:
            yield Network(file.stem, failing(error))
            continue
        for config in vars(module).values():
            is_config = isinstance(config, type) and config.__module__ == module.__name__
            if is_config and config.__name__.endswith("TesterConfig"):
                yield Network(config.__name__.removesuffix("TesterConfig"), lambda config=config: build(config()))
