"""Every model class that transformers' own tests build, from the folder that `TRANSFORMERS_TESTS` names.

The tests may be of another version than the library: classes that it lacks are left out.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils import import_utils
from zoo.foreign_tests import failing, folder_of, imported
from zoo.network import Built, Network

IGNORED = dict.fromkeys(("FuyuModel", "FuyuForCausalLM"), ("image_patches",))
"""Arguments of the tests that models of this version ignore: hookline raises an error that says so."""


def build(case: type[unittest.TestCase], cls: type[nn.Module]) -> Built:
    """The model as the tests build it, with the inputs that they give it."""
    test = made(case)
    config, inputs = test.model_tester.prepare_config_and_inputs_for_common()
    if hasattr(test, "_prepare_for_class"):  # tests of backbones have none
        inputs = test._prepare_for_class(inputs, cls)
    torch.manual_seed(0)
    ignored = IGNORED.get(cls.__name__, ())
    return cls(config), (), {name: value for name, value in inputs.items() if value is not None and name not in ignored}


def made(case: type[unittest.TestCase]) -> Any:
    """The test case, set up."""
    test: Any = case(next(name for name in dir(case) if name.startswith("test_")))
    test.setUp()
    return test


def networks() -> Iterator[Network]:
    """One row per class of model that a test case lists."""
    folder = folder_of("TRANSFORMERS_TESTS", "models/bert")
    import_utils.is_datasets_available()  # before a stand-in for it is there
    # They import the library from the sources beside them; the installed one is what is checked.
    transformers.utils.direct_transformers_import = lambda _: transformers
    names = set()
    for file in sorted(folder.glob("models/*/test_modeling_*.py")):
        try:
            module = imported(f"{folder.name}.models.{file.parent.name}.{file.stem}")
        except Exception as error:
            yield Network(f"{file.stem}", failing(error))
            continue
        for case in vars(module).values():
            is_case = isinstance(case, type) and issubclass(case, unittest.TestCase)
            if not is_case or case.__module__ != module.__name__ or not hasattr(case, "all_model_classes"):
                continue
            try:
                classes = made(case).all_model_classes
            except Exception as error:
                yield Network(f"{file.stem}.{case.__name__}", failing(error))
                continue
            for cls in classes:
                if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__name__ not in names:
                    names.add(cls.__name__)
                    yield Network(cls.__name__, lambda case=case, cls=cls: build(case, cls))
