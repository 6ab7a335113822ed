"""MLPs at the module path of TransformerLens."""
