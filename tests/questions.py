"""What several test files of the explorer use: prompts, edits, and answers to questions."""

import base64
import contextlib
import io
import json

import numpy as np
import torch

from hookline.explore.live_edits import script
from hookline.explore.question import LiveEdit, Question
from hookline.explore.views import answer

PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"
ZERO = LiveEdit("zero", "blocks.3.attn.hook_z", head=4)
STEER = LiveEdit("steer", "blocks.2.hook_resid_post", amount=2.0, positive="Mary", negative="John")
EDITS = {
    "zero": ZERO,
    "scale": LiveEdit("scale", "blocks.3.attn.hook_z", head=4, amount=0.25, pos=-1),
    "mean": LiveEdit("mean", "blocks.3.attn.hook_z", head=4),
    "patch": LiveEdit("patch", "blocks.3.attn.hook_z", head=4),
    "patch at": LiveEdit("patch", "blocks.1.hook_resid_pre", pos=9),
    "patch last": LiveEdit("patch", "blocks.3.hook_attn_out", pos=-1),
    "neuron": LiveEdit("zero", "blocks.1.mlp.hook_post", neuron=7),
    "steer": STEER,
}


def ask(model, view, **more):
    data = answer(model, Question(view, PROMPT, **more))
    json.dumps(data, allow_nan=False)
    return data


def unpacked(data) -> torch.Tensor:
    values = np.frombuffer(base64.b64decode(data["f32"]), "<f4").reshape(data["shape"])
    return torch.from_numpy(values.copy())


def mary_john(model):
    return {"target": model.to_single_token(" Mary"), "versus": model.to_single_token(" John")}


def printed(asked) -> dict[str, float]:
    """What the script of a question prints: the likeliest tokens with their probabilities."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(script("tinyworld", asked), {})
    lines = (line.split(" ", 1) for line in out.getvalue().splitlines())
    return {eval(text): float(prob) for prob, text in lines}
