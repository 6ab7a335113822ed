"""The engine: hook points on any `nn.Module`. Imports torch, and of this package only `errors` and `files`."""


def tricks() -> dict[str, str]:
    """Try all that the engine needs of torch and Python beside what they document.

    Returns for each why it does not hold here; an empty text if it does.
    """
    from hookline.engine._torch import PROBES
    from hookline.engine._torch.proofs import why_broken

    return {name: why_broken(probe) for name, probe in PROBES.items()}
