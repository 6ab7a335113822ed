// A circuit: nodes by layer, a line for every pair of nodes that edges join, and the edges of the node that was clicked.

class CircuitPage {
  constructor(root, given) {
    this.edges = given.edges.map(([source, target, note, value]) => ({ source, target, note, value })).sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
    Object.assign(this, { root, given, clicked: null, hovered: null, count: this.edges.length });
    this.nodes = given.rows.flatMap(({ nodes }, row) => nodes.map((name) => ({ name: shown(name), row })));
  }

  start() {
    paintNowAndLater(this);
  }

  paint() {
    setTheme(this.root, this.given.theme || (this.dark.matches ? "dark" : "light"));
    const panel = (name, ...parts) => el("section", { class: "panel wide", "aria-label": name }, el("h2", {}, name), ...parts.flat());
    this.root.replaceChildren(el("main", { class: "graph" }, el("h1", { class: "wide" }, unturned(this.given.title)),
      panel("Circuit", this.controls(), this.drawing()), panel("Node", this.detail())));
  }

  changed() {
    redraw(this.root, () => this.paint());
  }

  // Steps of the slider are on a logarithmic scale: the first edges matter most.
  controls() {
    const most = Math.max(this.edges.length, 1), top = Math.log(most);
    return el("div", { class: "controls" },
      el("label", {}, "the ", el("output", {}, this.count), ` of ${this.edges.length} edges with the largest scores `, el("input", {
        type: "range", min: 0, max: 1, step: 0.005, value: top ? Math.log(Math.max(this.count, 1)) / top : 1, "aria-label": "number of edges",
        onchange: (event) => { this.count = Math.min(most, Math.round(Math.exp(Number(event.target.value) * top))); this.changed(); } })),
      el("span", { class: "hint" }, el("span", { class: "warm" }, "orange"), ` raises ${this.given.metric}, `, el("span", { class: "cold" }, "blue"), " lowers it"));
  }

  // The edges that are shown, with those that join the same two nodes as one line.
  lines() {
    const found = new Map();
    for (const { source, target, value } of this.edges.slice(0, this.count)) {
      const key = `${source} ${target}`;
      found.set(key, { source: this.nodes[source], target: this.nodes[target], weight: (found.get(key)?.weight ?? 0) + value });
    }
    return [...found.values()];
  }

  drawing() {
    const links = this.lines(), used = new Set(links.flatMap(({ source, target }) => [source, target]));
    const { given } = this, { rows } = given, left = 14 + 6.2 * Math.max(...rows.map(({ name }) => Math.min(name.length, 28))), high = 22;
    const drawn = rows.map((_, row) => this.nodes.filter((node) => node.row === row && used.has(node)));
    const wide = (node) => 7 * Math.min(node.name.length, 24) + 14, length = (row) => row.reduce((sum, node) => sum + wide(node) + 14, 0);
    const room = Math.max(Math.min(this.root.clientWidth - 80, 1100), left + 240 + Math.max(...drawn.map(length)));
    const shownRows = upTo(rows.length).filter((row) => drawn[row].length), step = shownRows.length > 24 ? 38 : 52;
    shownRows.forEach((row, nth) => {
      let x = rows[row].side ? left + 50 : left + (room - left - length(drawn[row])) / 2; // MLPs are beside the heads
      for (const node of drawn[row]) {
        Object.assign(node, { x: x + wide(node) / 2 + 7, y: 20 + (shownRows.length - 1 - nth) * step });
        x += wide(node) + 14;
      }
    });
    const focus = this.hovered ?? this.clicked, most = largest(links.map((link) => link.weight));
    const lines = links.sort((a, b) => Math.abs(a.weight) - Math.abs(b.weight)).map(({ source, target, weight }) => {
      const part = Math.abs(weight) / most, middle = (source.y + target.y) / 2, bend = source.x === target.x && source.row + 1 < target.row ? (given.rows[source.row].side ? -70 : 70) : 0;
      const isNear = !focus || source === focus || target === focus;
      return svg("path", { d: `M${source.x} ${source.y}C${source.x + bend} ${middle} ${target.x + bend} ${middle} ${target.x} ${target.y}`, class: "edge", stroke: weight < 0 ? "var(--cold)" : "var(--warm)",
        "stroke-width": (0.6 + 5 * part).toFixed(2), "stroke-opacity": (isNear ? 0.25 + 0.7 * part : 0.04).toFixed(2) });
    });
    const boxes = drawn.flat().map((node) => svg("g", {
      transform: `translate(${node.x - wide(node) / 2} ${node.y - high / 2})`, class: `unit${node === this.clicked ? " chosen" : ""}`, tabindex: 0, role: "button", "aria-label": node.name,
      onclick: () => this.click(node), onkeydown: (event) => event.key === "Enter" && this.click(node),
      onmouseenter: () => this.hover(node), onmouseleave: () => this.hover(null),
    }, svg("rect", { width: wide(node), height: high, rx: 7 }), svg("text", { x: wide(node) / 2, y: high / 2 + 4, "text-anchor": "middle" }, cutTo(node.name, 24)), svg("title", {}, node.name)));
    const names = shownRows.map((row, nth) => svg("text", { x: left - 8, y: 24 + (shownRows.length - 1 - nth) * step, class: "layer", "text-anchor": "end" }, cutTo(rows[row].name, 28)));
    this.group = svg("g", {}, lines);
    this.box = el("div", { class: "scroll" }, svg("svg", { viewBox: `0 0 ${room} ${shownRows.length * step}`, width: room, height: shownRows.length * step, class: "nodes", role: "group", "aria-label": "nodes by layer" }, this.group, boxes, names));
    return this.box;
  }

  hover(node) {
    this.hovered = node;
    const focus = node ?? this.clicked, links = this.lines(), most = largest(links.map((link) => link.weight));
    links.sort((a, b) => Math.abs(a.weight) - Math.abs(b.weight)).forEach(({ source, target, weight }, at) =>
      this.group.children[at].setAttribute("stroke-opacity", (!focus || source === focus || target === focus ? 0.25 + (0.7 * Math.abs(weight)) / most : 0.04).toFixed(2)));
  }

  click(node) {
    this.clicked = this.clicked === node ? null : node;
    this.hovered = null;
    this.changed();
  }

  detail() {
    const node = this.clicked;
    if (!node) return [el("p", { class: "hint" }, "Click a node for its edges.")];
    const some = this.edges.slice(0, this.count), at = this.nodes.indexOf(node);
    const list = (name, mine, other) => el("div", {}, el("h3", {}, name), el("ol", { class: "links scroll" }, some.filter((edge) => edge[mine] === at).map((edge) =>
      el("li", {}, el("button", { class: "small", onclick: () => this.click(this.nodes[edge[other]]) }, [this.nodes[edge[other]].name, edge.note].filter(Boolean).join(" · ")),
        el("span", { class: edge.value < 0 ? "cold" : "warm" }, number(edge.value, 3))))));
    return [el("p", { class: "text" }, el("b", {}, node.name)), el("div", { class: "sides" }, list("Inputs", "target", "source"), list("Outputs", "source", "target"))];
  }
}

const cutTo = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

new CircuitPage(document.getElementById("explorer"), JSON.parse(document.getElementById("data").textContent)).start();
