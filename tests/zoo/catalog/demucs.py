"""The separation networks of demucs, with few channels."""

from collections.abc import Iterator
from typing import Any

import torch
from demucs.demucs import Demucs
from demucs.hdemucs import HDemucs
from demucs.htdemucs import HTDemucs
from zoo.network import Built, Network


def build(cls: Any, **options: Any) -> Built:
    """The network on a moment of sound."""
    module = cls(sources=["voice", "rest"], audio_channels=1, channels=8, **options)
    return module, (torch.randn(1, 1, 8192),), {}


def networks() -> Iterator[Network]:
    """One row per network and kind of inner layers."""
    hybrid: dict[str, Any] = {"nfft": 1024, "depth": 4}
    transformer = hybrid | {
        "t_layers": 2,
        "t_heads": 2,
        "bottom_channels": 32,
        "segment": 1,
        "samplerate": 8192,
        "use_train_segment": False,
    }
    yield Network("Demucs", lambda: build(Demucs, depth=3, lstm_layers=1, resample=False))
    yield Network("Demucs with DConv", lambda: build(Demucs, depth=3, dconv_mode=3, resample=False))
    yield Network("HDemucs", lambda: build(HDemucs, **hybrid))
    yield Network("HDemucs hybrid of spectra", lambda: build(HDemucs, hybrid=False, **hybrid))
    yield Network("HDemucs with LSTM", lambda: build(HDemucs, dconv_lstm=1, dconv_attn=1, **hybrid))
    yield Network("HTDemucs", lambda: build(HTDemucs, **transformer))
    yield Network("HTDemucs sparse", lambda: build(HTDemucs, t_cross_first=True, t_norm_first=False, **transformer))
