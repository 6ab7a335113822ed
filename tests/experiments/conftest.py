"""The models that the tests of experiments run on."""

import pytest
from experiment_models import Models

import hookline


@pytest.fixture(scope="module")
def tinyworld() -> hookline.HookedModel:
    return hookline.load("tinyworld")


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()
