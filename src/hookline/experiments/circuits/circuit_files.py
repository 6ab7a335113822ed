"""Files of circuits: JSON as the MIB benchmark writes it, with the names of edges translated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from hookline.errors import HooklineError
from hookline.experiments.circuits.circuit_edges import Circuit, group_size, nodes_of
from hookline.experiments.edges import EdgeScores
from hookline.files.tensorfile import read_json, write_bytes
from hookline.model import HookedModel


def save_circuit(found: Circuit | EdgeScores, path: str | Path, model: HookedModel) -> Path:
    """Write the scores of all edges, and which are in the circuit, as the JSON file of MIB; positions are added up.

        >>> path = circuits.save(edges.edge_scores(model, clean, corrupted, metric), "circuit.json", model)
        >>> len(circuits.load(path, model).scores)
        1519

    Heads that share keys and values get equal parts of the score. Features of autoencoders, which MIB does not have,
    keep their labels.
    """
    scores = found.scores if isinstance(found, Circuit) else found
    inside = found.included.tolist() if isinstance(found, Circuit) else [True] * len(scores)
    group = group_size(scores.senders, scores.receivers)
    edges: dict[str, dict[str, Any]] = {}
    rows = zip(scores.senders, scores.receivers, scores.values.tolist(), inside, strict=True)
    for sender, receiver, value, is_in in rows:
        ends = nodes_of(receiver, group) if re.search(r"\.[kv]$", receiver) else nodes_of(receiver, 1)
        for node in ends:
            kind = f"<{receiver[-1]}>" if receiver[-2:-1] == "." else ""
            entry = edges.setdefault(f"{_to_mib(sender)}->{_to_mib(node)}{kind}", {"score": 0.0, "in_graph": False})
            entry["score"] += value / len(ends)
            entry["in_graph"] |= is_in
    used = set(Circuit(scores, torch.tensor(inside)).nodes)
    names = [*dict.fromkeys(scores.senders), "logits"]
    parallel = ("L0H0", "mlp0") not in set(zip(scores.senders, scores.receivers, strict=True))
    cfg = model.cfg
    head: dict[str, Any] = {
        "n_layers": cfg.n_layers,
        "n_heads": cfg.n_heads,
        "parallel_attn_mlp": parallel,
        "d_model": cfg.d_model,
    }
    head |= {"n_key_value_heads": cfg.n_kv_heads, "model_name": cfg.model_name}
    content = {"cfg": head, "nodes": {_to_mib(node): {"in_graph": node in used} for node in names}, "edges": edges}
    write_bytes(Path(path), json.dumps(content).encode(), "the circuit")
    return Path(path)


def load_circuit(path: str | Path, model: HookedModel | None = None) -> Circuit:
    """Read a circuit from a JSON file of MIB, or of `circuits.save`; raises if it is of another shape than `model`."""
    try:
        content = read_json(Path(path))
        cfg, edges = content["cfg"], content["edges"]
        rows = [(name, float(edge["score"]), bool(edge["in_graph"])) for name, edge in edges.items()]
        features = {name for name in content.get("nodes", ()) if "/" in name}
        shape = {key: int(cfg[key]) for key in ("n_layers", "n_heads", "d_model")}
        shape["n_kv_heads"] = int(cfg.get("n_key_value_heads") or shape["n_heads"])
    except (FileNotFoundError, NotADirectoryError):
        raise HooklineError(f"there is no circuit at {path}") from None
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise HooklineError(
            f"{path} is not a circuit file: it needs cfg, nodes and edges, as MIB writes them"
        ) from error
    wrong_row = next((name for name, score, _ in rows if not abs(score) <= torch.finfo(torch.float32).max), None)
    if not rows or wrong_row is not None:
        raise HooklineError(f"{path} has no edges" if not rows else f"{path} has no finite score for {wrong_row!r}")
    if shape["n_kv_heads"] < 1 or shape["n_heads"] % shape["n_kv_heads"]:
        raise HooklineError(f"{path} has {shape['n_heads']} heads, and {shape['n_kv_heads']} with keys and values")
    has_kv = "n_key_value_heads" in cfg  # MIB leaves it out
    for key, value in shape.items():
        if model is not None and getattr(model.cfg, key) != value and (key != "n_kv_heads" or has_kv):
            raise HooklineError(
                f"{path} is a circuit of another model: its {key} is {value}, not {getattr(model.cfg, key)}"
            )
    n_kv = model.cfg.n_kv_heads if model is not None else shape["n_kv_heads"]
    merged_edges: dict[tuple[str, str], list[float]] = {}
    for name, score, is_in in rows:
        ends = _between_features(name, features) or _from_mib(name, shape, n_kv, path)
        entry = merged_edges.setdefault(ends, [0.0, 0.0])
        entry[0] += score
        entry[1] = max(entry[1], float(is_in))
    values = torch.tensor([score for score, _ in merged_edges.values()])
    scores = EdgeScores(
        values, [u for u, _ in merged_edges], [v for _, v in merged_edges], "score", {"file": Path(path).name}
    )
    return Circuit(scores, torch.tensor([is_in > 0 for _, is_in in merged_edges.values()]))


def _to_mib(node: str) -> str:
    if node == "embed" or "/" in node:
        return node if "/" in node else "input"
    return re.sub(r"L(\d+)H(\d+)", r"a\1.h\2", node).replace("mlp", "m")


def _between_features(name: str, features: set[str]) -> tuple[str, str] | None:
    """The sender and the receiver of an edge between features; the token in a label may have an arrow, too."""
    parts = name.split("->")
    pairs = [("->".join(parts[:at]), "->".join(parts[at:])) for at in range(1, len(parts))]
    return next((pair for pair in pairs if pair[0] in features and pair[1] in features | {"logits"}), None)


def _check_ends(sender: str, end: str, name: str, shape: dict[str, int], path: str | Path) -> None:
    """Raise unless both nodes exist, and the second comes after the first."""
    turns = []
    for node in (sender, end):
        numbers = [int(digits) for digits in re.findall(r"\d+", node)]
        if numbers and (numbers[0] >= shape["n_layers"] or (len(numbers) > 1 and numbers[1] >= shape["n_heads"])):
            raise HooklineError(
                f"{path} has the edge {name!r}, but only {shape['n_layers']} layers of {shape['n_heads']} heads"
            )
        ends = {"input": (-1, 0), "logits": (shape["n_layers"], 0)}
        turns.append(ends.get(node) or (numbers[0], int(node[0] == "m")))
    if turns[0] >= turns[1]:
        raise HooklineError(f"{path} has the edge {name!r}, whose receiver comes before its sender")


def _from_mib(name: str, shape: dict[str, int], n_kv: int, path: str | Path) -> tuple[str, str]:
    """The sender and the receiver of an edge by its name, `input->a0.h1<q>`."""
    group = shape["n_heads"] // n_kv
    node = r"input|m\d+|a\d+\.h\d+|logits"
    match = re.fullmatch(rf"({node})->({node})(?:<([qkv])>)?", name)
    if match is None or (match[3] is None) != (match[2][0] != "a"):
        raise HooklineError(f"{path} has an edge {name!r}: edges are named as in 'input->a0.h1<q>' or 'm0->logits'")
    _check_ends(match[1], match[2], name, shape, path)
    sender, end = ({"input": "embed"}.get(x) or re.sub(r"a(\d+)\.h(\d+)", r"L\1H\2", x) for x in match.group(1, 2))
    sender, end = (re.sub(r"^m(\d+)$", r"mlp\1", x) for x in (sender, end))
    if match[3] in ("k", "v") and group > 1:
        layer, _, head = end.partition("H")
        end = f"{layer}KV{int(head) // group}"
    return sender, end if match[3] is None else f"{end}.{match[3]}"
