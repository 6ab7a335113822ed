"""What torch's compiler may see of hookline, and whether passes run in graphs.

A compiled graph has no hooks but those that it was compiled with. So while hooks are attached, compiled code runs
uncompiled, and our own code is never traced. An executor that compiles hooks into its graphs says so with
`hooks_in_graph`, and asks `why_not_here` and `why_replaced` whether its graphs still do what a call would do.
"""

from hookline.engine._compiler.hindrances import is_compiled, why_not_here, why_replaced
from hookline.engine._compiler.pausing import hooks_in_graph, left_out, tracing_lock, why_left_out
from hookline.engine._compiler.untraced import outside_compiler, untraced, verbs

__all__ = (
    "hooks_in_graph",
    "is_compiled",
    "left_out",
    "outside_compiler",
    "tracing_lock",
    "untraced",
    "verbs",
    "why_left_out",
    "why_not_here",
    "why_replaced",
)
