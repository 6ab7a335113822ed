// The point map: draws the points of an architecture from the data of tools/make_point_map.py.
(() => {
  const { rows, texts, parts, architectures } = POINT_MAP;
  const root = document.getElementById("pm");
  const state = { kind: "llama", group: "", stack: "blocks", point: "attn.hook_z", layer: 0 };

  const PANELS = [
    ["cross", /^(cross_attn\.|ln_cross|hook_cross_attn)/, "cross-attention"],
    ["attention", /^(attn\.|ln1|hook_attn|hook_[qkv]_input)/, "attention"],
    ["mlp", /^(mlp\.|ln2|hook_mlp)/, "MLP"],
    ["stream", /^hook_(resid|embed|pos_embed|tokens)/, ""],
    ["norm", /^(ln_final|ln_pre)/, "final norm"],
    ["unembed", /^(unembed)/, "unembedding"],
  ];
  // What the model does to get from the row above to this one.
  const STEPS = [
    [/hook_attn_in$/, "a copy of the stream for each head"],
    [/hook_q_input$/, "copies for queries, keys and values"],
    [/hook_mlp_in$/, "a copy of the stream for the MLP"],
    [/ln.*hook_scale$/, "norm: (x − mean) ÷ scale = normalized, × weight + bias"],
    [/(attn|mlp)\.hook_in$/, "the input of the module"],
    [/attn\.hook_q$/, "projections"],
    [/hook_rot_q$/, "rotary, if the model has it"],
    [/hook_attn_scores$/, "query · key, scaled, masked"],
    [/hook_pattern$/, "softmax"],
    [/hook_z$/, "pattern · values"],
    [/hook_result$/, "output projection of each head"],
    [/hook_(cross_)?attn_out$/, "sum over heads; added to the stream"],
    [/mlp\.hook_pre$/, "up projection, or gate and up"],
    [/mlp\.hook_post$/, "activation (× linear part)"],
    [/mlp\.hook_router$/, "router"],
    [/expert_weights$/, "top K of the experts"],
    [/hook_mlp_out$/, "down projection; added to the stream"],
    [/unembed\.hook_out$/, "logits"],
  ];
  // Points in one row with the point before them.
  const BESIDE = /(hook_[kv]_input|hook_normalized|attn\.hook_[kv]|hook_rot_k|hook_pre_linear|expert_indices|hook_embed|hook_pos_embed|ln_final\.hook_out|unembed\.hook_out)$/;

  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const panelOf = (name) => PANELS.find(([, pattern]) => pattern.test(name))?.[0] ?? "stream";
  const local = (name) => name.replace(/^(encoder|decoder)\./, "");
  const rowOf = (name) => rows[local(name)] ?? {};
  // Some kinds are in two groups: BERT is an encoder, and can be a decoder.
  const current = () => architectures.find((each) => each.kind === state.kind && (!state.group || each.group === state.group));
  const stacksOf = (each) => Object.keys(each.stacks).filter(Boolean);
  const part = (each, stack) => parts[each.stacks[stack]];
  const prefix = () => (isLayer(state.point) ? `${state.stack}.${state.layer}.` : "");
  const isLayer = (name) => name in (part(current(), state.stack)?.points ?? {});

  function shape(name) {
    const { sizes } = current();
    return "[" + (rowOf(name).axes ?? "").split(" ").map((axis) => sizes[axis] ?? axis).join(", ") + "]";
  }

  function pill(name, some) {
    const row = rowOf(name);
    const button = make("button", { type: "button", className: `pm-pill pm-${/hook_(scale|normalized)$/.test(name) ? "norm" : panelOf(local(name))}` },
      make("b", { textContent: name }), make("small", { textContent: shape(name) }));
    if (row.request) button.classList.add("pm-request");
    if (some) button.append(make("i", { textContent: "some layers" }));
    button.setAttribute("aria-pressed", name === state.point);
    button.addEventListener("click", () => { state.point = name; draw(); });
    return button;
  }

  function rowsOf(names, some) {
    const found = [];
    for (const name of names) {
      if (BESIDE.test(name) && found.length) found.at(-1).push(name);
      else found.push([name]);
    }
    return found.map((row) => {
      const step = STEPS.find(([pattern]) => pattern.test(row[0]))?.[1];
      return make("div", { className: "pm-row" }, ...(step ? [make("span", { className: "pm-step", textContent: step })] : []),
        make("div", { className: "pm-pills" }, ...row.map((name) => pill(name, some.includes(name)))));
    });
  }

  function panel(kind, names, some) {
    const title = PANELS.find(([each]) => each === kind)[2];
    const label = kind === "mlp" && names.some((name) => name.includes("router")) ? "mixture of experts" : title;
    return make("section", { className: `pm-panel pm-of-${kind}` }, make("h4", { textContent: label }), ...rowsOf(names, some));
  }

  const onStream = (names, some) => make("div", { className: "pm-node" }, ...names.map((name) => pill(name, some.includes(name))));

  function block(stack) {
    const { points, some } = part(current(), stack);
    const names = Object.keys(points);
    const parallel = !("hook_resid_mid" in points) && "hook_attn_out" in points && "hook_mlp_out" in points;
    const groups = [];
    for (const name of names) {
      const kind = panelOf(name);
      const existing = parallel && groups.find((group) => group.kind === kind && kind !== "stream");
      if (existing) existing.names.push(name);
      else if (groups.at(-1)?.kind === kind && kind !== "stream") groups.at(-1).names.push(name);
      else groups.push({ kind, names: [name] });
    }
    const drawn = groups.map(({ kind, names: own }) => (kind === "stream" ? onStream(own, some) : panel(kind, own, some)));
    const body = make("div", { className: "pm-flow" });
    if (parallel) {
      const inside = drawn.filter((each) => each.tagName === "SECTION");
      const side = make("div", { className: "pm-parallel" }, ...inside);
      const nodes = drawn.filter((each) => each.tagName !== "SECTION");
      body.append(nodes[0], side, ...nodes.slice(1));
    } else body.append(...drawn);
    return body;
  }

  function outside(stack, first) {
    const each = current();
    const all = part(each, "");
    const names = Object.keys(all?.points ?? {}).filter((name) => !/^(vision|projector)\./.test(name)).filter((name) => !stack || !/^(encoder|decoder)\./.test(name) || name.startsWith(`${stack}.`));
    const entry = names.filter((name) => /hook_(tokens|embed|pos_embed)$/.test(name));
    const exit = names.filter((name) => !entry.includes(name) && !(stack === "encoder" && stacksOf(each).length > 1 && name.startsWith("unembed")));
    return make("div", { className: "pm-flow" }, ...(first ? [make("div", { className: "pm-node" }, ...entry.map((name) => pill(name, false)))]
      : exit.length ? [make("section", { className: "pm-panel pm-of-norm" }, make("h4", { textContent: "after the last layer" }), ...rowsOf(exit, []))] : []));
  }

  function details() {
    const name = state.point;
    const each = current();
    const row = rowOf(name);
    const inLayer = isLayer(name);
    const where = texts[(inLayer ? part(each, state.stack) : part(each, "")).points[name]].replace(/\bL\b/, state.layer);
    const full = prefix() + name;
    const item = (term, ...value) => [make("dt", { textContent: term }), make("dd", {}, ...value)];
    const code = (text) => make("code", { textContent: text });
    const others = [];
    const single = stacksOf(each).length === 1; // shorthands and names outside layers do not say which stack they mean
    if (single && row.short && !/^(cross_|ln)/.test(name)) others.push(inLayer ? `("${row.short}", ${state.layer})` : `"${row.short}"`);
    if (row.bridge && (single || inLayer)) others.push(prefix() + row.bridge);
    if (row.role && inLayer && state.stack === "blocks") others.push(`("lm.${row.role}", ${state.layer})`);
    return make("aside", { className: "pm-details" },
      make("h3", {}, code(full)), make("p", { textContent: row.what || "" }),
      make("dl", {},
        ...item("shape", code(shape(name)), ` ${row.axes}`),
        ...item("where", code(where)),
        ...(others.length ? item("also named", ...others.flatMap((other, i) => [i ? ", " : "", code(other)])) : []),
        ...item("read", code(`model.cache(prompt, names_filter="${full}")["${full}"]`)),
        ...(row.request ? item("note", "recorded only if you request it by name") : [])));
  }

  function missing() {
    const each = current();
    const found = [...Object.entries(part(each, state.stack)?.missing ?? {}), ...Object.entries(part(each, "")?.missing ?? {})];
    return make("details", { className: "pm-missing" }, make("summary", { textContent: `${found.length} points that ${state.kind} does not have` }),
      make("ul", {}, ...found.map(([name, why]) => make("li", {}, make("code", { textContent: name }), ` ${texts[why]}`))));
  }

  function controls() {
    const select = make("select", { id: "pm-kind" });
    for (const group of new Set(architectures.map((each) => each.group))) {
      select.append(make("optgroup", { label: group }, ...architectures.filter((each) => each.group === group)
        .map((each) => make("option", { value: `${each.group}/${each.kind}`, textContent: stacksOf(each).length ? each.kind : `${each.kind} (native points only)`, selected: each === current() }))));
    }
    select.addEventListener("change", () => { [state.group, state.kind] = select.value.split("/"); state.layer = 0; draw(); });
    const each = current();
    const names = stacksOf(each);
    const stack = make("select", { id: "pm-stack" }, ...names.map((name) => make("option", { value: name, textContent: name, selected: name === state.stack })));
    stack.addEventListener("change", () => { state.stack = stack.value; draw(); });
    const count = each.sizes.layers?.[state.stack];
    const layer = make("input", { id: "pm-layer", type: "number", min: 0, max: count ? count - 1 : 99, value: state.layer });
    layer.addEventListener("change", () => { state.layer = Math.max(0, Math.min(Number(layer.max), Math.round(layer.value) || 0)); draw(); });
    const field = (text, control) => make("label", {}, `${text} `, control);
    return make("div", { className: "pm-controls" }, field("architecture", select), ...(names.length > 1 ? [field("stack", stack)] : []),
      ...(names.length ? [field("layer", layer), make("span", { textContent: count ? `of ${count}` : "" })] : []));
  }

  function draw() {
    const each = current();
    const names = stacksOf(each);
    if (!names.includes(state.stack)) state.stack = names.at(-1);
    history.replaceState(null, "", `#${new URLSearchParams(state)}`);
    if (!names.length) {
      root.replaceChildren(controls(), make("p", { textContent: "This architecture has the inputs and outputs of its modules as points, by their paths." }));
      return;
    }
    const known = { ...part(each, "")?.points, ...part(each, state.stack).points };
    if (!(state.point in known)) state.point = "hook_resid_pre" in known ? "hook_resid_pre" : Object.keys(known)[0];
    const several = names.length > 1 ? state.stack : "";
    root.replaceChildren(controls(), make("div", { className: "pm-body" },
      make("div", { className: "pm-drawing" }, outside(several, true), make("div", { className: "pm-block" },
        make("h3", { textContent: `${state.stack}.${state.layer}` }), block(state.stack)), outside(several, false)), details()), missing());
  }

  const asked = new URLSearchParams(location.hash.slice(1));
  for (const key of Object.keys(state)) if (asked.has(key)) state[key] = key === "layer" ? Number(asked.get(key)) || 0 : asked.get(key);
  if (!current()) Object.assign(state, { kind: "llama", group: "" });
  draw();
})();
