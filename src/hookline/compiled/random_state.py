"""The state of torch's own random numbers: what is computed only to be compared must not draw from them."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """The state of the random numbers that are drawn next on a device."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def return_to(state: Tensor, device: torch.device) -> None:
    """Draw the same random numbers again from now on."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class RandomStates:
    """The states on the CPU and on the device of a model, at one moment."""

    def __init__(self, device: torch.device) -> None:
        self._states = {state_device: random_state(state_device) for state_device in {torch.device("cpu"), device}}

    def are_left(self) -> bool:
        """Whether random numbers have been drawn since then; if so, the states are restored."""
        drawn = {
            device: state for device, state in self._states.items() if not torch.equal(state, random_state(device))
        }
        for device, state in drawn.items():
            return_to(state, device)
        return bool(drawn)
