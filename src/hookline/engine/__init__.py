"""The engine: hook points on any `nn.Module`. Imports torch, and of this package only `errors` and `files`."""
