"""Models that are sharded over processes: which values are parts, and what the processes do together.

`complete` tells the engine how to make the whole activation of what this process has; `refuse` and `refuse_items` are
for modules where that is not known. Whoever finds out which model is sharded how adds itself to `preparations`, and
puts what the processes do together into `processes`, by model, and into `sharing`, by layer.
"""

from hookline.engine._sharding.own_parts import Spans, own_site
from hookline.engine._sharding.split_values import (
    changed_in_any,
    check_not_sharded,
    complete,
    completing,
    preparations,
    processes,
    refuse,
    refuse_items,
    sharing,
)

__all__ = (
    "Spans",
    "changed_in_any",
    "check_not_sharded",
    "complete",
    "completing",
    "own_site",
    "preparations",
    "processes",
    "refuse",
    "refuse_items",
    "sharing",
)
