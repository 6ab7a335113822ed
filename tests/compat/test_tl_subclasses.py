"""Subclasses of HookedTransformer and HookedRootModule: what they may define, and errors for what they may not."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn

from hookline.compat.transformer_lens import HookedRootModule, HookedTransformer, HookedTransformerConfig
from hookline.errors import HooklineError

T = TypeVar("T")
TOKENS = torch.arange(6)[None]
CFG = HookedTransformerConfig(n_layers=1, d_model=16, d_head=8, n_ctx=8, d_vocab=10, act_fn="relu", device="cpu")


@pytest.mark.parametrize(
    "name", ["module", "weights", "index", "anatomy", "text", "_points", "_run", "_prepared", "_hook_actions"]
)
def test_subclasses_that_define_what_the_model_needs(name) -> None:
    with pytest.raises(HooklineError, match=rf"Mine.*{name}.*HookedTransformer"):
        type("Mine", (HookedTransformer,), {name: lambda _self: 5})


def test_subclasses_that_do_not_start_as_they_must() -> None:
    lazy = type("Lazy", (HookedTransformer,), {"__init__": lambda *_, **__: None})(CFG)
    with pytest.raises(AttributeError, match=r"Lazy\.__init__ must call HookedTransformer\.__init__"):
        lazy(TOKENS)
    with pytest.raises(HooklineError, match=r"Lazy\.__init__ must call HookedTransformer\.__init__"):
        type(lazy).from_pretrained("tinyworld", device="cpu")
    model = HookedTransformer(CFG)
    with pytest.raises(HooklineError, match="replaced"):
        model.module = nn.Linear(2, 2)


def test_subclasses_may_define_their_own_names() -> None:
    class Mine(HookedTransformer):
        _mine = 5

        def _get_name(self) -> str:
            return "mine"

    assert Mine(CFG)(TOKENS).shape == HookedTransformer(CFG)(TOKENS).shape


def test_abstract_subclasses_of_a_root() -> None:
    class Kind(HookedRootModule, Generic[T], ABC):
        @abstractmethod
        def encode(self) -> None: ...

    with pytest.raises(TypeError, match="abstract"):
        Kind()
    assert isinstance(HookedTransformer(CFG), HookedRootModule)
    assert not isinstance(nn.Linear(2, 2), HookedRootModule)
