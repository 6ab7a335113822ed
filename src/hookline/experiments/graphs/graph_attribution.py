"""The attribution graph of a prompt: the logits that are its targets, its nodes and its edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import about
from hookline.experiments.core.prompts import Prompt, Prompts, check_weights_stay, prompts_of, warn_of_dropout
from hookline.experiments.graphs.graph_edges import WHOLE, Computed, Edges, GraphNode, LocalModel
from hookline.experiments.graphs.node_graph import AttributionGraph
from hookline.model import HookedModel
from hookline.sae.transcoders import Transcoders

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""How far sums may be off, relative to what is summed; in other dtypes 0.1."""


def attribution_graph(
    model: HookedModel,
    prompt: Prompt,
    transcoders: Transcoders | str | Path | None = None,
    target: str | int | Sequence[str] | Sequence[int] | Tensor | None = None,
    *,
    max_features: int | None = None,
    errors_only: Sequence[int] | None = None,
    max_logits: int = 10,
    logit_share: float = 0.95,
    progress: bool = True,
) -> AttributionGraph:
    """Find what each feature and logit of a prompt reads from every earlier one, with attention and norms frozen.

        >>> graph = graphs.attribution_graph(model, "The capital of Italy is", target=" Rome")
        >>> graph.top(2)
        target   source   value
        mlp_3_2  mlp_2_2  10.56
        mlp_3_0  mlp_2_0  8.174
        >>> path = graph.prune().plot_html().save("graph.html")

    Nodes are the active features of `transcoders` (see `sae.Transcoders`; a path loads them) with an error for each of
    their MLPs, tokens, and logits at the last position. Layers without a transcoder have their MLP as one node for each
    position. An edge is what its source writes to the stream, carried by frozen attention patterns and norm
    denominators past all other MLPs, times what its target reads. Edges into a node sum, with its bias, to its
    pre-activation.

    `target` are the tokens whose logits are nodes, by default the most likely ones: as many as have `logit_share` of
    the probability together, up to `max_logits`. `max_features` keeps the features and MLPs that influence them most,
    which are found on the way. Positions in `errors_only`, by default a first token that begins texts (BOS), have no
    features, as transcoders do not reconstruct them. A model whose parts between the MLPs are not linear once attention
    and norms are frozen is refused.
    """
    if not isinstance(transcoders, Transcoders | str | Path | None):
        raise HooklineError(f"transcoders are Transcoders, or the path of a folder with them, got {transcoders!r}")
    if max_features is not None and (type(max_features) is not int or max_features < 1):
        raise HooklineError(f"max_features must be a positive integer or None, got {max_features!r}")
    text = _one_prompt(model, prompt)
    if isinstance(transcoders, str | Path):
        transcoders = Transcoders.load(transcoders, device=model.cfg.device)
    if transcoders is not None:
        transcoders.check_fit(model)
    warn_of_dropout(model)
    local = LocalModel(model, text.call(model), transcoders, _without_features(model, text, errors_only))
    ids = _targets(model, local.run.probabilities, target, max_logits, logit_share)
    probabilities = local.run.probabilities[ids]
    edges = Edges(local, _demeaned(ids, len(local.run.logits)), probabilities)
    computed = edges.compute(max_features, progress)
    graph = _graph(model, text, edges, computed, ids.tolist(), probabilities.tolist())
    _refuse_unless_linear(model, graph)
    return graph


def _one_prompt(model: HookedModel, prompt: Prompt) -> Prompts:
    if not isinstance(model, HookedModel):
        raise HooklineError(f"graphs are of language models with a known anatomy, not of {type(model).__name__}")
    check_weights_stay(model, "an attribution graph")
    devices = sorted({str(weight.device) for weight in model.module.parameters()})
    if len(devices) > 1:
        raise HooklineError(
            f"an attribution graph needs a model on one device, but its weights are on {', '.join(devices)}: load it "
            f"without device_map, in a smaller dtype if it does not fit"
        )
    text = prompts_of(model, prompt)
    if len(text) != 1:
        raise HooklineError(f"a graph is of one prompt, got {len(text)}: make one graph for each")
    return text


def _without_features(model: HookedModel, text: Prompts, errors_only: Sequence[int] | None) -> list[int]:
    """The positions that have an error only."""
    if errors_only is None:
        first = getattr(model.tokenizer, "bos_token_id", None)
        return [0] if first is not None and int(text.tokens[0, 0]) == first else []
    if isinstance(errors_only, str | int):
        raise HooklineError(f"errors_only is a list of positions, as in [0], got {errors_only!r}")
    for pos in errors_only:
        if isinstance(pos, bool) or not isinstance(pos, int) or pos not in range(-text.width, text.width):
            raise HooklineError(f"errors_only has the position {pos!r}, but the prompt has {text.width} tokens")
    return sorted({pos % text.width for pos in errors_only})


def _targets(model: HookedModel, probabilities: Tensor, target: Any, most: int, share: float) -> Tensor:
    """The token ids of the logits."""
    if target is None:
        is_share = isinstance(share, int | float) and 0 < share <= 1
        if type(most) is not int or most < 1 or not is_share:
            raise HooklineError(f"max_logits is at least 1 and logit_share at most 1, got {most!r} and {share!r}")
        values, ids = probabilities.topk(min(most, len(probabilities)))
        return ids[: int((values.cumsum(0) < share).sum()) + 1]
    ids = torch.as_tensor(model.token_ids(target)).reshape(-1).to(probabilities.device)
    if not len(ids) or len(ids.unique()) != len(ids):
        raise HooklineError(f"target has no tokens, or the same one twice: {target!r}")
    return ids


def _demeaned(ids: Tensor, n_vocab: int) -> Float[Tensor, "target vocab"]:
    """The weights of each logit minus the mean of all logits, which does not change probabilities."""
    weights = torch.full((len(ids), n_vocab), -1.0 / n_vocab, device=ids.device)
    weights[torch.arange(len(ids)), ids] += 1.0
    return weights


def _word(model: HookedModel, token: int) -> str:
    return f"<{token}>" if model.tokenizer is None else model.tokenizer.decode([token])


def _graph(
    model: HookedModel, text: Prompts, edges: Edges, computed: Computed, ids: list[int], probabilities: list[float]
) -> AttributionGraph:
    """The graph of the rows that were computed."""
    texts, words = ([_word(model, token) for token in tokens] for tokens in (text.tokens[0].tolist(), ids))
    nodes = _nodes(model, text, edges, texts, list(zip(ids, words, probabilities, strict=True)))
    edges.ids = [node.id for node in nodes]
    is_kept = torch.zeros(edges.n_nodes, dtype=torch.bool)
    is_kept[edges.n_units :] = True
    is_kept[computed.into] = True
    full = torch.zeros(edges.n_nodes, edges.n_nodes)
    full[computed.into] = computed.rows
    pre, bias, rest = torch.zeros(3, edges.n_nodes, dtype=torch.float64)
    pre[computed.into], bias[computed.into] = computed.pre, computed.bias
    rest[computed.into] = computed.rows[:, ~is_kept].double().sum(1)
    sums = [
        replace(node, pre_activation=float(x)) if node.is_target else node for node, x in zip(nodes, pre, strict=True)
    ]
    explained = edges.local.explained()
    info = about(model, "attribution graph") | ({"explained": explained} if explained else {})
    return AttributionGraph(
        tuple(node for node, is_included in zip(sums, is_kept.tolist(), strict=True) if is_included),
        full[is_kept][:, is_kept],
        bias[is_kept],
        rest[is_kept],
        tuple(texts),
        info,
        local=edges,
    )


def _nodes(
    model: HookedModel, text: Prompts, edges: Edges, texts: Sequence[str], logits: Sequence[tuple[int, str, float]]
) -> list[GraphNode]:
    """All nodes, in the order of columns."""
    nodes = []
    for (layer, pos, feature), value in zip(edges.units, edges.activations, strict=True):
        if feature == WHOLE:
            nodes.append(GraphNode(f"mlp_{layer}_{pos}", "mlp", pos, layer, None, texts[pos], value))
        else:
            nodes.append(GraphNode(f"{layer}_{feature}_{pos}", "feature", pos, layer, feature, texts[pos], value))
    for layer in edges.error_layers:
        nodes += [GraphNode(f"error_{layer}_{p}", "error", p, layer, None, texts[p]) for p in range(edges.n_pos)]
    for pos, token in enumerate(text.tokens[0].tolist()):
        nodes.append(GraphNode(f"E_{token}_{pos}", "token", pos, None, token, texts[pos]))
    top, last = model.cfg.n_layers + 1, edges.n_pos - 1
    return nodes + [
        GraphNode(f"{top}_{token}_{last}", "logit", last, None, token, word, None, None, p) for token, word, p in logits
    ]


def _refuse_unless_linear(model: HookedModel, graph: AttributionGraph) -> None:
    """Raise if edges do not sum to pre-activations."""
    worst = graph.check().top(1, by="value")[0]
    limit = _TOLERANCE.get(model.cfg.dtype, 0.1)
    if worst.value <= limit:
        return
    whole = range(model.cfg.n_layers)
    missing = [at for at in whole if f"{model.index.layer(at)}.attn.hook_pattern" not in model.hook_dict]
    why = f"layers {missing} have no attention pattern to freeze" if missing else (
        "its layers compute something else that is not linear, such as norms or gates inside attention, or a layer "
        "that is not a sum of attention and MLP"
    )  # fmt: skip
    raise HooklineError(
        f"{model.cfg.architecture} is not linear between its MLPs when attention patterns and norm denominators are "
        f"frozen: the edges into {worst.labels['node']} miss its pre-activation by {worst.value:.2g} of their sum "
        f"(at most {limit:g} is rounding). Probably {why}"
    )
