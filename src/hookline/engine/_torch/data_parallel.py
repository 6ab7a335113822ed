"""Which DDP trains a model.

Why: a model that is run around its DDP has gradients that nobody synchronizes, and torch does not say so.
Needs: `DistributedDataParallel` keeps its parameters in a list of its own, and notes which one is running.
If it does not hold, there is no warning.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hookline.engine._torch.proofs import insist, once
from hookline.functions.signatures import code_of

running_ddp = attrgetter("_active_ddp_module")
"""The DDP whose forward pass is running; an attribute of the class."""
parameters_of_ddp = attrgetter("_module_parameters")
"""The list of all parameters that a DDP synchronizes."""
PARAMETERS = "_module_parameters"
"""The name of that list, among the attributes of a DDP."""


def probe() -> None:
    """A DDP keeps the list, and notes that it runs. Making one takes a group of processes: its code says so."""
    init: Any = DistributedDataParallel.__init__
    insist(PARAMETERS in code_of(init).co_names, "a DDP keeps a list of its parameters")
    insist(running_ddp(DistributedDataParallel) is None, "outside a pass, no DDP is running")


can_find_ddp = once(probe)
