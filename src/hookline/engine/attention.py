"""Points inside attention: what a module is expected to compute, and the names of what is found there.

A module for which nothing is expected has such points too, if it turns out to compute attention when it runs.
"""

from hookline.engine._inner.attention_steps import FusedCall, expect
from hookline.engine._inner.plain_attention import NAMES

__all__ = ("NAMES", "FusedCall", "expect")
