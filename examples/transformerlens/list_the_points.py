"""List the points of a model in the order in which they fire."""

from __future__ import annotations

import hookline


def main() -> list[str]:
    """Print the points of one block, with their axes; return the names of all points."""
    model = hookline.load("tinyworld")
    for name, point in model.hook_dict.items():
        if not name.startswith("blocks.") or name.startswith("blocks.0."):
            print(f"{name:32} {point.axes}")
    print(f"… and the same for each of {model.cfg.n_layers} blocks: {len(model.hook_dict)} points")
    return list(model.hook_dict)


if __name__ == "__main__":
    main()
