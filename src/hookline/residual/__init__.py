"""What the residual stream is made of, from a cache: its parts, and what each adds to a logit.

All of it holds as it stands, with the norm's weight and bias where they are: nothing need be folded first. Where the
parts do not add up to the whole (a model that norms the stream itself, a readout that is not linear), it is refused.
"""

from hookline.residual.model_cache import ModelCache

__all__ = ["ModelCache"]
