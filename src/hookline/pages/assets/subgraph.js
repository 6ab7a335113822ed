// The nodes that are pinned, alone or in groups, and the edges between them.

class Subgraph {
  constructor(page) {
    Object.assign(this, { page, pinned: [], groups: [], chosen: new Set() });
  }

  set(ids, groups) {
    const known = (id) => this.page.graph.byId.get(id), list = (given) => (Array.isArray(given) ? given : []); // an address can say anything
    this.groups = list(groups).filter(Array.isArray).map(([name, ...members]) => [String(name), ...members.filter(known)]).filter((group) => group.length > 1);
    this.pinned = [...new Set([...list(ids), ...this.groups.flatMap(([, ...members]) => members)])].map(known).filter(Boolean);
  }

  has(node) { return this.pinned.includes(node); }

  add(nodes) {
    this.pinned = [...new Set([...this.pinned, ...nodes])];
    this.page.changed();
  }

  toggle(node) {
    if (!this.has(node)) { this.add([node]); return; }
    this.pinned = this.pinned.filter((each) => each !== node);
    this.groups = this.groups.map(([name, ...members]) => [name, ...members.filter((id) => id !== node.id)]).filter((group) => group.length > 1);
    this.page.changed();
  }

  group() {
    const name = this.name.value.trim(), members = [...this.chosen].flatMap((unit) => unit.members.map((node) => node.id));
    if (!name || !members.length) return;
    const others = this.groups.map(([label, ...ids]) => [label, ...ids.filter((id) => !members.includes(id))]).filter((group) => group.length > 1 && group[0] !== name);
    this.groups = [...others, [name, ...members]];
    this.chosen.clear();
    this.page.changed();
  }

  ungroup(name) {
    this.groups = this.groups.filter(([label]) => label !== name);
    this.chosen.clear();
    this.page.changed();
  }

  // What is drawn: a group, or a node on its own.
  units() {
    const grouped = new Set(this.groups.flatMap(([, ...members]) => members)), { byId } = this.page.graph;
    const alone = this.pinned.filter((node) => !grouped.has(node.id)).map((node) => ({ name: node.name, members: [node], isGroup: false }));
    return [...this.groups.map(([name, ...members]) => ({ name, members: members.map((id) => byId.get(id)), isGroup: true })), ...alone];
  }

  // The sum of the edges between two units, over all pairs of their nodes.
  links(units) {
    const owner = new Map(units.flatMap((unit) => unit.members.map((node) => [node, unit]))), sums = new Map();
    for (const unit of units) for (const node of unit.members) for (const { source, weight } of node.inputs) {
      const from = owner.get(source);
      if (!from || from === unit) continue;
      const inner = sums.get(unit) ?? sums.set(unit, new Map()).get(unit);
      inner.set(from, (inner.get(from) ?? 0) + weight);
    }
    return [...sums].flatMap(([target, inner]) => [...inner].map(([source, weight]) => ({ source, target, weight })));
  }

  view() {
    const save = el("button", { onclick: () => this.page.save() }, "Save JSON");
    if (!this.pinned.length) return [el("p", { class: "hint" }, "Pinned nodes appear here, with the edges between them. Select some to make a group."), el("div", { class: "controls" }, save)];
    const units = this.units();
    this.chosen = new Set(units.filter((unit) => [...this.chosen].some((old) => old.name === unit.name && old.isGroup === unit.isGroup && old.members[0] === unit.members[0])));
    this.name = el("input", { class: "name", placeholder: "name of the group", "aria-label": "name of the group", onkeydown: (event) => event.key === "Enter" && this.group() });
    const whole = [...this.chosen].filter((unit) => unit.isGroup);
    return [
      el("div", { class: "controls" }, this.name, el("button", { onclick: () => this.group() }, "Group selected"),
        whole.map((unit) => el("button", { onclick: () => this.ungroup(unit.name) }, `Ungroup ${cut(unit.name, 16)}`)),
        el("button", { onclick: () => { this.set([], []); this.page.changed(); } }, "Unpin all"), save),
      this.drawing(units),
    ];
  }

  drawing(units) {
    const level = (unit) => Math.max(...unit.members.map((node) => this.page.graph.layers.indexOf(node.layer)));
    const place = (unit) => unit.members.reduce((sum, node) => sum + node.pos, 0) / unit.members.length;
    const levels = [...new Set(units.map(level))].sort((a, b) => b - a), wide = 150, high = 30;
    const rows = levels.map((at) => units.filter((unit) => level(unit) === at).sort((a, b) => place(a) - place(b)));
    const room = Math.max(...rows.map((row) => row.length)) * (wide + 14) + 60;
    rows.forEach((row, nth) => row.forEach((unit, at) => Object.assign(unit, { x: (room / row.length) * (at + 0.5), y: 22 + nth * 66 })));
    const links = this.links(units), most = largest(links.map((link) => link.weight));
    const lines = links.map(({ source, target, weight }) => {
      const part = Math.abs(weight) / most, [from, to] = [source.y - high / 2, target.y + high / 2], bend = source.y === target.y ? -40 : (from - to) / 2;
      const aside = source.x === target.x && source.y - target.y > 66 ? 150 : 0; // around the boxes between them
      return svg("path", { d: `M${source.x} ${from}C${source.x + aside} ${from - bend} ${target.x + aside} ${to + bend} ${target.x} ${to}`, class: "edge", stroke: linkColor(weight),
        "stroke-width": (0.6 + 5 * part).toFixed(2), "stroke-opacity": (0.25 + 0.7 * part).toFixed(2) }, svg("title", {}, `${source.name} → ${target.name}: ${number(weight, 4)}`));
    });
    const boxes = units.map((unit) => svg("g", {
      transform: `translate(${unit.x - wide / 2} ${unit.y - high / 2})`, class: `unit ${unit.isGroup ? "group" : unit.members[0].kind}${this.chosen.has(unit) ? " chosen" : ""}`,
      tabindex: 0, role: "checkbox", "aria-checked": String(this.chosen.has(unit)), "aria-label": unit.name,
      onclick: () => this.choose(unit), onkeydown: (event) => event.key === "Enter" && this.choose(unit),
      ondblclick: () => unit.isGroup || this.page.click(unit.members[0]),
    }, svg("rect", { width: wide, height: high, rx: 8 }), svg("text", { x: wide / 2, y: high / 2 + 4, "text-anchor": "middle" }, cut(unit.isGroup ? `${unit.name} (${unit.members.length})` : unit.name, 22)),
    svg("title", {}, unit.members.map((node) => node.name).join("\n"))));
    const drawn = svg("svg", { viewBox: `0 0 ${room} ${rows.length * 66}`, width: room, height: rows.length * 66, class: "subgraph", role: "group", "aria-label": "pinned nodes" }, lines, boxes);
    return el("div", { class: "scroll" }, drawn);
  }

  choose(unit) {
    if (!this.chosen.delete(unit)) this.chosen.add(unit);
    redraw(this.page.root, () => this.page.paint());
  }
}

new GraphPage(document.getElementById("explorer"), JSON.parse(document.getElementById("data").textContent)).start();
