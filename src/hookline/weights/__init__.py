"""A model's weights in the classic layout, and what can be folded into them."""
