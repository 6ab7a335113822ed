// An attribution graph: nodes by token and layer, the edges of the one that was clicked, and its inputs and outputs as lists.
// What is pinned is in subgraph.js.

const KINDS = { feature: "feature", mlp: "MLP", error: "error", token: "token", logit: "logit" };
const KIND_OF = { "cross layer transcoder": "feature", "mlp": "mlp", "mlp reconstruction error": "error", "embedding": "token", "logit": "logit" };

// The nodes and edges of the file, with what is drawn of them.
function readGraph(given) {
  const { nodes, qParams } = given.file, links = tensor(given.links), count = links.shape[1];
  const found = nodes.map((each, at) => {
    const kind = KIND_OF[each.feature_type] ?? "feature", word = shown(given.tokens[each.ctx_idx], true);
    const layer = kind === "token" ? -1 : kind === "logit" ? Infinity : Number(each.layer);
    const name = kind === "logit" ? each.clerp.replace(/^Output "([^]*)" \(p=(.*)\)$/, (_, text, p) => `${shown(text)} ${percent(Number(p))}`)
      : kind === "token" ? word : kind === "mlp" ? `MLP ${each.layer} · ${word}` : kind === "error" ? `error ${each.layer} · ${word}` : `L${each.layer} F${each.node_id.split("_")[1]} · ${word}`;
    return { at, id: each.node_id, kind, layer, pos: each.ctx_idx, name, raw: each, inputs: [], outputs: [] };
  });
  for (let at = 0; at < count; at += 1) {
    const link = { source: found[links.at(0, at)], target: found[links.at(1, at)], weight: links.at(2, at) };
    link.target.inputs.push(link);
    link.source.outputs.push(link);
  }
  const layers = [...new Set(found.map((node) => node.layer))].sort((a, b) => a - b);
  return { nodes: found, byId: new Map(found.map((node) => [node.id, node])), layers, qParams };
}

// Red, green and blue are those of every page: orange adds to the target, blue takes away.
const linkColor = (weight) => (weight < 0 ? "var(--cold)" : "var(--warm)");

function mark(node, size) {
  if (node.kind === "token" || node.kind === "logit") return svg("rect", { x: -size, y: -size, width: 2 * size, height: 2 * size });
  if (node.kind === "error") return svg("path", { d: `M0 ${-size - 1}L${size + 1} 0L0 ${size + 1}L${-size - 1} 0Z` });
  if (node.kind === "mlp") return svg("path", { d: `M${-size} ${-size}H${size}L${size + 2} 0L${size} ${size}H${-size}L${-size - 2} 0Z` });
  return svg("circle", { r: size });
}

class GraphPage {
  constructor(root, given) {
    Object.assign(this, { root, given, graph: readGraph(given), clicked: null, hovered: null, share: 1 });
    this.subgraph = new Subgraph(this);
    this.restore();
  }

  start() {
    paintNowAndLater(this);
  }

  // The state is in the address, so that a link shows the same; in a frame without an address, it is in the page only.
  restore() {
    let kept = {};
    try { kept = JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}"); } catch { kept = {}; }
    const { pinnedIds = [], supernodes = [], clickedId = "" } = this.graph.qParams;
    this.subgraph.set(kept.pinned ?? pinnedIds, kept.groups ?? supernodes);
    this.clicked = this.graph.byId.get(kept.clicked ?? clickedId) ?? null;
    this.share = typeof kept.share === "number" ? kept.share : 1;
  }

  remember() {
    const { pinned, groups } = this.subgraph;
    const state = { pinned: pinned.map((node) => node.id), groups, clicked: this.clicked?.id ?? "", share: this.share };
    try { history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(state))}`); } catch { /* a frame has none */ }
  }

  changed() {
    this.remember();
    redraw(this.root, () => this.paint());
  }

  shown() {
    const pinned = new Set(this.subgraph.pinned);
    return this.graph.nodes.filter((node) => ["token", "logit"].includes(node.kind) || node === this.clicked || pinned.has(node) || node.raw.influence <= this.share + 1e-9);
  }

  paint() {
    setTheme(this.root, this.given.theme || (this.dark.matches ? "dark" : "light"));
    const facts = Object.entries(this.given.scores).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    const panel = (name, wide, ...parts) => el("section", { class: wide ? "panel wide" : "panel", "aria-label": name }, el("h2", {}, name), ...parts.flat());
    this.root.replaceChildren(el("main", { class: "graph" },
      el("h1", { class: "wide" }, unturned(this.given.title)),
      panel("Graph", true, this.controls(facts), this.drawing()),
      panel("Node", false, this.detail()),
      panel("Subgraph", false, this.subgraph.view())));
  }

  controls(facts) {
    const keys = [...new Set(this.graph.nodes.map((node) => node.kind))].map((kind) =>
      el("span", {}, svg("svg", { viewBox: "-7 -7 14 14", width: 13, height: 13, class: `node ${kind}` }, mark({ kind }, 4)), ` ${KINDS[kind]}`));
    return el("div", { class: "controls" },
      el("label", {}, "nodes with ", el("output", {}, percent(this.share)), " of the influence ", el("input", {
        type: "range", min: 0, max: 1, step: 0.01, value: this.share, "aria-label": "share of the influence that is shown",
        onchange: (event) => { this.share = Number(event.target.value); this.changed(); } })),
      el("span", { class: "hint legend keys" }, keys, facts ? el("span", {}, facts) : null));
  }

  drawing() {
    const nodes = this.shown(), { layers } = this.graph, tokens = this.given.tokens, cells = new Map();
    for (const node of nodes) {
      const key = `${node.layer} ${node.pos}`;
      cells.set(key, [...(cells.get(key) ?? []), node]);
    }
    const most = (pos) => Math.max(1, ...layers.map((layer) => cells.get(`${layer} ${pos}`)?.length ?? 0));
    const least = tokens.map((text, pos) => Math.max(14 * Math.min(most(pos), 24) + 18, 8 * Math.min(12, shown(text).length) + 18));
    const left = 52, total = least.reduce((a, b) => a + b, 0), spread = Math.max(1, Math.min(2.5, (this.root.clientWidth - left - 90) / total));
    const wide = least.map((each) => each * spread), starts = wide.map((_, pos) => left + wide.slice(0, pos).reduce((a, b) => a + b, 0));
    const room = Math.max(starts[starts.length - 1] + wide[wide.length - 1], 320), step = layers.length > 20 ? 22 : 34;
    const y = (layer) => 18 + (layers.length - 1 - layers.indexOf(layer)) * step, high = y(layers[0]) + 30;
    for (const [key, some] of cells) {
      const pos = some[0].pos, gap = Math.min(20, (wide[pos] - 10) / some.length);
      some.sort((a, b) => (a.raw.influence ?? 0) - (b.raw.influence ?? 0));
      some.forEach((node, nth) => { node.x = starts[pos] + wide[pos] / 2 + (nth - (some.length - 1) / 2) * gap; node.y = y(node.layer); });
      cells.set(key, some);
    }
    this.lines = svg("g", {});
    this.marks = new Map(nodes.map((node) => [node, this.nodeMark(node)]));
    const names = layers.map((layer) => svg("text", { x: left - 10, y: y(layer) + 4, class: "layer", "text-anchor": "end" }, layer === -1 ? "tokens" : layer === Infinity ? "logits" : `L${layer}`));
    const words = tokens.map((text, pos) => svg("text", { x: starts[pos] + wide[pos] / 2, y: high - 6, class: "word", "text-anchor": "middle" }, cut(shown(text), 12)));
    const bands = tokens.map((_, pos) => (pos % 2 ? null : svg("rect", { x: starts[pos], y: 0, width: wide[pos], height: high, class: "band" })));
    const drawing = svg("svg", { viewBox: `0 0 ${room} ${high}`, width: room, height: high, class: "nodes", role: "group", "aria-label": "nodes by token and layer" },
      bands, this.lines, [...this.marks.values()], names, words);
    this.drawn = nodes;
    this.drawLines();
    return el("div", { class: "scroll" }, drawing);
  }

  nodeMark(node) {
    const isPinned = this.subgraph.has(node), show = (event) => {
      this.hovered = node;
      this.drawLines();
      const box = event.currentTarget.getBoundingClientRect();
      tip.show(this.said(node), box.left, box.bottom - 10, this.root);
    };
    const hide = () => { this.hovered = null; this.drawLines(); tip.hide(); };
    return svg("g", {
      transform: `translate(${node.x.toFixed(1)} ${node.y})`, class: `node ${node.kind}${isPinned ? " pinned" : ""}${node === this.clicked ? " clicked" : ""}`,
      tabindex: 0, role: "button", "data-id": node.id, "aria-label": node.name, "aria-pressed": String(isPinned),
      onmouseenter: show, onmouseleave: hide, onfocus: show, onblur: hide,
      onclick: (event) => (event.shiftKey ? this.subgraph.toggle(node) : this.click(node)),
      onkeydown: (event) => { if (event.key === "Enter") this.click(node); if (event.key === "p") this.subgraph.toggle(node); },
    }, svg("circle", { r: 8, class: "back" }), mark(node, 4));
  }

  said(node) {
    const { activation, pre_activation: pre, influence } = node.raw;
    return [el("b", {}, node.name), node.id, ...(activation ? [`activation ${number(activation, 4)}`] : []), ...(pre === undefined || pre === null ? [] : [`pre-activation ${number(pre, 4)}`]),
      ...(influence === undefined || influence === null || node.kind === "logit" ? [] : [`within the first ${percent(influence)} of the influence`])];
  }

  click(node) {
    this.clicked = this.clicked === node ? null : node;
    tip.hide();
    this.changed();
  }

  // Of the node under the pointer or the clicked one all edges; of none, the largest.
  drawLines() {
    const node = this.hovered ?? this.clicked, visible = new Set(this.drawn);
    const every = node ? [...node.inputs, ...node.outputs] : this.drawn.flatMap((each) => each.inputs);
    const some = every.filter((link) => visible.has(link.source) && visible.has(link.target));
    const kept = [...some].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).slice(0, node ? 400 : 150).reverse();
    const most = largest(kept.map((link) => link.weight));
    this.lines.replaceChildren(...kept.map(({ source, target, weight }) => {
      const part = Math.abs(weight) / most, middle = (source.y + target.y) / 2;
      return svg("path", { d: `M${source.x.toFixed(1)} ${source.y}C${source.x.toFixed(1)} ${middle} ${target.x.toFixed(1)} ${middle} ${target.x.toFixed(1)} ${target.y}`,
        class: "edge", stroke: linkColor(weight), "stroke-width": (0.4 + 3.2 * part).toFixed(2), "stroke-opacity": (node ? 0.25 + 0.7 * part : 0.08 + 0.6 * part).toFixed(2) });
    }));
  }

  detail() {
    const node = this.clicked;
    if (!node) return [el("p", { class: "hint" }, "Click a node for its inputs and outputs; shift-click or the key p pins it to the subgraph.")];
    const list = (name, links, end) => [el("h3", {}, name), links.length ? el("ol", { class: "links scroll" }, [...links].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).slice(0, 60).map((link) => {
      const other = link[end];
      return el("li", {}, el("button", { class: "small", onclick: () => this.click(other) }, other.name), el("span", { class: link.weight < 0 ? "cold" : "warm" }, number(link.weight, 3)));
    })) : el("p", { class: "hint" }, "none")];
    return [
      el("p", { class: "text" }, this.said(node).map((line) => el("span", { class: "line" }, line))),
      el("div", { class: "controls" }, el("button", { class: "do", onclick: () => this.subgraph.toggle(node) }, this.subgraph.has(node) ? "Unpin" : "Pin"),
        el("button", { onclick: () => this.pinTop(node) }, "Pin its 5 largest inputs")),
      el("div", { class: "sides" }, el("div", {}, list("Inputs", node.inputs, "source")), el("div", {}, list("Outputs", node.outputs, "target"))),
    ];
  }

  pinTop(node) {
    const top = [...node.inputs].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).slice(0, 5).map((link) => link.source);
    this.subgraph.add([node, ...top]);
  }

  // The file as Neuronpedia and circuit-tracer read it, with what is pinned and grouped here.
  save() {
    const { pinned, groups } = this.subgraph, links = tensor(this.given.links), { nodes } = this.graph;
    const file = { ...this.given.file, qParams: { ...this.given.file.qParams, pinnedIds: pinned.map((node) => node.id), supernodes: groups, clickedId: this.clicked?.id ?? "" },
      links: upTo(links.shape[1]).map((at) => ({ source: nodes[links.at(0, at)].id, target: nodes[links.at(1, at)].id, weight: links.at(2, at) })) };
    const address = URL.createObjectURL(new Blob([JSON.stringify(file)], { type: "application/json" }));
    el("a", { href: address, download: "graph.json" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
