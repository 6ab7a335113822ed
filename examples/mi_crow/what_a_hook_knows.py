"""What a hook has access to: its point, its layer, the step and positions, and a dict for its own data."""

from __future__ import annotations

from torch import Tensor

import hookline

POINTS = ["blocks.0.hook_resid_post", "blocks.3.hook_resid_post"]


def note(resid: Tensor, hook: hookline.HookPoint) -> None:
    """Record how far the residual stream moved at the newest position since the last step."""
    moved = (resid[0, -1] - hook.ctx.get("before", 0)).norm().item()
    hook.ctx["before"] = resid[0, -1]
    hook.ctx.setdefault("notes", []).append((hook.layer(), hook.step, hook.positions, moved))


def main() -> list[tuple[int, int, range, float]]:
    """Print and return the records of both points: layer, generation step, positions, and the distance."""
    model = hookline.load("tinyworld")
    with model.hooks(fwd_hooks=[(POINTS, note)]):
        print(model.generate("The capital of France is", max_new_tokens=3, do_sample=False))
    notes = [note for name in POINTS for note in model.hook_dict[name].ctx["notes"]]
    for layer, step, positions, moved in notes:
        seen = f"{positions[0]} to {positions[-1]}" if len(positions) > 1 else f"{positions[0]}"
        print(f"  layer {layer}, step {step}: position {seen:6} moved by {moved:.1f}")
    model.clear_contexts()
    return notes


if __name__ == "__main__":
    main()
