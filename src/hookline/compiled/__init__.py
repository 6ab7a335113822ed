"""Compiled runs: the hooks of a run become tables, buffers and traced functions inside compiled graphs.

A compiled run is another executor of the plan that the engine makes: the same actions, points and lenses, in the same
order. `classify.py` decides for every hook whether it can be in a graph. What cannot raises `NotCompiled`, with the
reason, and the run is uncompiled.
"""
