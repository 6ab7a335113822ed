"""What the modules with names of TransformerLens are made of."""
