"""The engine: hook points on any `nn.Module`. Imports torch and `hookline.errors`, nothing else of this package."""
