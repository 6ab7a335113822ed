// Panels: what each view asks, and how its answer is drawn. A panel is {slot, title, hint, question, controls, draw}.

const MEASURES = {
  attribution: "adds to the answer", ablation: "ablation changes the answer by", attention: "attends to the marked token",
  previous_token: "attends to the previous token", duplicate_token: "attends to the same token", induction: "induction",
};
const SWEEPS = { stream: "residual stream before each layer", attention: "attention outputs", mlp: "MLP outputs", heads: "heads" };
const STREAMS = { stream: "hook_resid_pre", attention: "hook_attn_out", mlp: "hook_mlp_out" };

const headPoint = (layer) => `blocks.${layer}.attn.hook_z`;

function chooser(label, options, value, change) {
  const items = Object.entries(options).map(([key, text]) => el("option", { value: key, selected: key === String(value) }, text));
  return el("label", {}, `${label} `, el("select", { onchange: (event) => change(event.target.value) }, items));
}

function integer(label, value, most, change) {
  const input = el("input", {
    type: "number", min: 0, max: most, value, onchange: (event) => {
      const asked = Math.max(0, Math.min(most, Math.round(Number(event.target.value)) || 0));
      event.target.value = asked;
      change(asked);
    },
  });
  return el("label", {}, `${label} `, input);
}

const words = (app) => tokenLabels(app.tokens?.tokens);
const versusText = (app) => `“${shown(app.answer("next")?.target.text ?? "")}” over “${shown(app.answer("next")?.versus.text ?? "")}”`;

function nextPanel(app) {
  return {
    slot: "next", title: "Next token",
    hint: () => (app.hasEdits() ? "gray: unedited, color: with the edits" : app.isLive ? "click a token to follow it" : "the likeliest, with their probabilities"),
    question: (state) => ({ view: "next", target: state.target, versus: state.versus }),
    draw(data) {
      const before = tensor(data.before).values, after = tensor(data.after).values;
      const third = [...before].sort((a, b) => b - a)[2] ?? 0; // the likeliest without the edits stay in sight
      const order = data.ids.map((_, at) => at).sort((a, b) => after[b] - after[a]).filter((at, nth) => nth < 10 || before[at] >= third);
      const most = Math.max(...before, ...after);
      const rows = order.map((at) => ({
        label: shown(data.texts[at]),
        pick: () => app.follow(data.ids[at]),
        values: [
          ...(app.hasEdits() ? [{ value: before[at], kind: "old", text: percent(before[at]) }] : []),
          { value: after[at], kind: data.ids[at] === data.target.id ? "new target" : "new", text: percent(after[at]) },
        ],
      }));
      return [bars(rows, app.link, { most })];
    },
  };
}

function lensPanel(app) {
  return {
    slot: "lens", title: "What each layer would say", wide: true,
    hint: () => "the stream after each layer, read as if it were the last; color: probability",
    question: (state) => ({ view: "lens", ...(state.from === null ? {} : { start: state.from }) }),
    draw(data) {
      const texts = words(app).slice(data.start), positions = upTo(data.probs.shape[1]).map((at) => at + data.start);
      const probs = tensor(data.probs);
      const [rows, columns, top] = probs.shape;
      const layerOf = (row) => rows - 1 - row; // the last layer on top
      const prob = (row, column, nth) => probs.values[(layerOf(row) * columns + column) * top + nth];
      const word = (row, column, nth) => data.words[data.cells[layerOf(row)][column][nth]];
      const names = data.layers.map((layer) => (layer === "embed" ? "embed" : `layer ${layer}`)).reverse();
      const counts = (row, all) => counted(all.map((at) => word(row, at - data.start, 0)));
      return [lensWindow(app, data), new Grid("Logit lens: layers by positions", folded(app, {
        rows: names, columns: texts.slice(0, columns), scale: "one", most: 1, first: [0, Math.max(0, Math.min(columns - 1, app.position() - data.start))],
        value: (row, column) => prob(row, column, 0),
        text: (row, column) => shown(word(row, column, 0), true),
        lines: (row, column) => [
          el("b", {}, `${names[row]}, after “${texts[column]}”`),
          ...upTo(top).map((nth) => el("div", { class: "pair" }, el("span", {}, shown(word(row, column, nth))), percent(prob(row, column, nth)))),
        ],
        axes: [["layer", names.map((_, row) => (layerOf(row) ? layerOf(row) - 1 : undefined))], ["pos", positions]],
        pick: (row, column) => app.select(layerOf(row)
          ? { point: `blocks.${layerOf(row) - 1}.hook_resid_post`, layer: layerOf(row) - 1, pos: positions[column] ?? column }
          : { point: "hook_embed", pos: positions[column] ?? column }),
      }, { columns: "mean" }, {
        text: (row, all) => shown(counts(row, all)[0][0], true),
        lines: (row, all) => [el("b", {}, `${names[row]}, at ${all.length} image tokens`), ...counts(row, all).slice(0, 8).map(([text, times]) =>
          el("div", { class: "pair" }, el("span", {}, shown(text)), `× ${times}`))],
      }), app.link)];
    },
  };
}

// Of a long prompt, the lens reads as many positions at a time as one look takes.
function lensWindow(app, { start, length, probs }) {
  const count = probs.shape[1], button = (text, label, from, isOff) => el("button", {
    class: "small", "aria-label": label, disabled: isOff || !app.isLive, onclick: () => app.change({ from: Math.max(0, Math.min(length - count, from)) }, ["lens"]),
  }, text);
  return count === length ? null : el("div", { class: "controls" }, button("◀", "earlier positions", start - count, start === 0),
    `positions ${start} to ${start + count - 1} of ${length}`, button("▶", "later positions", start + count, start + count >= length));
}

function headsPanel(app) {
  return {
    slot: "heads", title: "Heads",
    hint: (state) => (["attribution", "ablation"].includes(state.measure) ? `logit of ${versusText(app)}` : state.measure === "attention"
      ? `from “${words(app)[app.position()] ?? ""}” to “${words(app)[state.src] ?? ""}” (click in the attention map to mark another)` : "on random repeated tokens"),
    controls: (state) => [chooser("each head", MEASURES, state.measure, (measure) => app.change({ measure }, ["heads"]))],
    question: (state) => ({ view: "heads", measure: state.measure, ...(state.measure === "attention" ? { src: state.src } : {}) }),
    draw(data) {
      const values = tensor(data.values);
      const isSigned = ["attribution", "ablation"].includes(data.measure);
      return [new Grid("Heads: layers by heads", {
        rows: upTo(values.shape[0]).map((layer) => `layer ${layer}`), columns: upTo(values.shape[1]),
        scale: isSigned ? "zero" : "one", most: isSigned ? largest(values.values) : 1,
        value: values.at, text: (layer, head) => brief(values.at(layer, head), largest(values.values)),
        lines: (layer, head) => [el("b", {}, `head ${layer}.${head}`), `${MEASURES[data.measure]}: ${number(values.at(layer, head), 4)}`],
        axes: [["layer", upTo(values.shape[0])], ["head", upTo(values.shape[1])]],
        pick: (layer, head) => app.select({ point: headPoint(layer), layer, head }),
      }, app.link), isSigned ? legend(largest(values.values)) : null,
      typeof data.edits === "number" ? el("p", { class: "sum" }, `heads as before the edits of attention outputs, which add ${number(data.edits)}`) : null];
    },
  };
}

function attentionPanel(app) {
  return {
    slot: "attention", title: "Attention",
    hint: () => "rows look at columns",
    controls: (state) => [
      integer("layer", state.layer, app.model.layers - 1, (layer) => app.change({ layer }, ["attention"])),
      integer("head", state.head, app.model.heads - 1, (head) => app.change({ head }, ["attention"])),
      app.isLive ? el("button", { onclick: () => app.select({ point: headPoint(app.state.layer), layer: app.state.layer, head: app.state.head }) }, "Select this head") : null,
    ],
    question: (state) => ({ view: "attention", layer: state.layer, head: state.head }),
    draw(data, state) {
      const values = tensor(data.values), texts = words(app);
      return [new Grid(`Attention of head ${state.layer}.${state.head}: queries by keys`, folded(app, {
        rows: texts, columns: texts, scale: "one", most: 1, value: values.at, first: [app.position(), app.position()],
        lines: (row, column) => [`“${texts[row]}” looks at “${texts[column]}”: ${percent(values.at(row, column))}`],
        axes: [["pos", upTo(texts.length)], ["src", upTo(texts.length)]],
        pick: (row, column) => app.change({ pos: [row].flat()[0], src: [column].flat()[0] }),
      }, { rows: "mean", columns: "sum" }), app.link)];
    },
  };
}

function attributionPanel(app) {
  return {
    slot: "attribution", title: "The stream, taken apart",
    hint: () => `what each part adds to the logit of ${versusText(app)}`,
    question: () => ({ view: "attribution" }),
    draw(data) {
      const values = tensor(data.values).values;
      const rows = data.components.map((name, at) => {
        const found = /^(\d+)_(attn|mlp)_out$/.exec(name);
        const layer = found ? Number(found[1]) : 0, part = found ? found[2] : name;
        return {
          label: found ? `${layer} ${part === "attn" ? "attention" : "MLP"}` : name.replace("_", " "),
          values: [{ value: values[at], kind: values[at] < 0 ? "cold" : "warm", text: number(values[at]) }],
          place: found ? { layer, part } : {},
          pick: found ? () => app.select({ point: `blocks.${layer}.hook_${part}_out`, layer, part })
            : `hook_${name}` in app.model.points ? () => app.select({ point: `hook_${name}` }) : null,
        };
      });
      return [bars(rows, app.link, { most: largest(values), signed: true }),
        el("p", { class: "sum" }, `sum ${number(data.logit - data.bias)}, bias ${number(data.bias)}: logit difference ${number(data.logit)}`)];
    },
  };
}

function patchingPanel(app) {
  return {
    slot: "patching", title: "Patching from the first prompt into the second", wide: true, cost: 2,
    hint: () => `share of the logit difference ${versusText(app)} that each cell brings back`,
    controls: (state) => [chooser("by", SWEEPS, state.sweep, (sweep) => app.change({ sweep }, ["patching"]))],
    question: (state) => (state.other ? { view: "patching", measure: state.sweep } : null),
    empty: "Write a second prompt, with as many tokens as the first, to patch between them.",
    draw(data) {
      const values = tensor(data.values), isHeads = data.over[1] === "head";
      const columns = isHeads ? upTo(values.shape[1]) : words(app);
      const layers = data.layers.map(Number);
      return [new Grid("Patching: layers by positions or heads", folded(app, {
        rows: layers.map((layer) => `layer ${layer}`), columns, scale: "zero", most: Math.max(1, largest(values.values)), first: [0, isHeads ? 0 : app.position()],
        value: values.at, text: (row, column) => brief(values.at(row, column), 1),
        lines: (row, column) => [el("b", {}, `layer ${layers[row]}, ${isHeads ? "head" : ""} ${columns[column]}`), `brings back ${percent(values.at(row, column))}`],
        axes: [["layer", layers], [isHeads ? "head" : "pos", upTo(values.shape[1])]],
        pick: (row, column) => app.select(isHeads ? { point: headPoint(layers[row]), layer: layers[row], head: column }
          : { point: `blocks.${layers[row]}.${STREAMS[data.measure]}`, layer: layers[row], pos: column }),
      }, isHeads ? {} : { columns: "largest" }, { text: (row, column, value) => brief(value, 1) }), app.link), legend(Math.max(1, largest(values.values))),
      el("p", { class: "sum" }, `logit difference: ${number(data.clean)} in the first prompt, ${number(data.corrupted)} in the second`)];
    },
  };
}

function pointPanel(app) {
  return {
    slot: "point", title: "Any point", wide: true,
    hint: (state) => `the activation itself: rows are ${isTower(state.point) ? "patches of the vision tower" : "positions"}`,
    controls: (state) => {
      const names = el("datalist", { id: "points" }, Object.keys(app.model.points).map((name) => el("option", { value: name })));
      const input = el("input", { list: "points", value: state.point, spellcheck: "false", class: "name", onchange: (event) => app.change({ point: event.target.value.trim(), pointRow: 0 }, ["point"]) });
      const hasHeads = /\b[hg]\b/.test(app.model.points[state.point] ?? "");
      return [el("label", {}, "point ", input), names,
        hasHeads ? integer("head", state.pointHead, app.model.heads - 1, (pointHead) => app.change({ pointHead }, ["point"])) : null,
        app.answer("point")?.rows > 1 ? integer("image or tile", state.pointRow, app.answer("point").rows - 1, (pointRow) => app.change({ pointRow }, ["point", "image"])) : null];
    },
    question: (state) => ({ view: "point", point: state.point, head: state.pointHead, row: state.pointRow }),
    draw(data, state) {
      const values = tensor(data.values), texts = words(app);
      const isTokens = data.stream !== "image" && values.shape[0] === texts.length, isKeys = data.axes[1] === "k";
      const place = data.stream === "image" ? "patch" : "pos";
      const layer = Number(/^blocks\.(\d+)\./.exec(data.point)?.[1] ?? -1);
      return [new Grid(`The activation at ${data.point}`, folded(app, {
        rows: isTokens ? texts : upTo(values.shape[0]), columns: upTo(values.shape[1]),
        scale: "zero", most: largest(values.values), value: values.at, first: [Math.min(values.shape[0] - 1, app.position()), 0],
        lines: (row, column) => [el("b", {}, `${isTokens ? `“${texts[row]}”` : `${place} ${row}`}, ${column}`), number(values.at(row, column), 5)],
        axes: [[place, upTo(values.shape[0])], [isKeys && isTokens ? "src" : "unit", upTo(values.shape[1])]],
        pick: (row, column) => app.select({
          point: data.point, pos: row, ...(isKeys ? {} : /\b[hg]\b/.test(app.model.points[data.point]) ? { head: state.pointHead } : { neuron: column }),
          ...(layer < 0 ? {} : { layer }),
        }),
      }, isTokens ? { rows: "mean", ...(isKeys ? { columns: "sum" } : {}) } : {}), app.link), legend(largest(values.values))];
    },
  };
}

function scoresPanel(app) {
  if (!app.model.probe) return null;
  const { points, first } = app.model.probe;
  return {
    slot: "scores", title: "Scores of the probe", wide: true,
    hint: () => "the score of each token; the probe decides for its class above 0",
    controls: (state) => (points.length < 2 ? [] : [chooser("at", Object.fromEntries(points.map((name) => [name, name])), state.probePoint || first,
      (probePoint) => app.change({ probePoint }, ["scores"]))]),
    question: (state) => ({ view: "scores", point: state.probePoint || first }),
    draw(data) {
      const { values } = tensor(data.values), most = largest(values);
      return [coloredText(app.tokens?.tokens.texts ?? [], values, most, app, { at: app.position(), linked: true, what: "score ", scale: "zero" }), legend(most)];
    },
  };
}

function textPanel(app) {
  return {
    slot: "generate", title: "Generated text", cost: 1,
    hint: () => (app.hasEdits()
      ? "the likeliest token each time. Edits of all positions also act on the new tokens; patches and edits of one position act on the prompt only." : "the likeliest token each time"),
    controls: (state) => [integer("tokens", state.count, 200, (count) => app.change({ count: Math.max(1, count) }, ["generate"]))],
    question: (state) => ({ view: "generate", count: state.count }),
    draw(data) {
      const line = (name, tokens, other) => el("p", { class: "text" }, el("b", {}, name),
        tokens.map((token, at) => el("span", { class: other && other[at] !== token ? "changed" : null }, token)));
      return app.hasEdits() ? [line("without edits", data.before), line("with edits", data.after, data.before)] : [line("", data.before)];
    },
  };
}

const PANELS = [nextPanel, textPanel, lensPanel, headsPanel, attributionPanel, attentionPanel, patchingPanel, scoresPanel, pointPanel];
