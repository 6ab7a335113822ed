// Features: those of the autoencoders that the explorer was given, one of them in detail, and what can be done to it.

const FEATURE_SLOTS = ["features", "feature", "contexts"];

const saeOf = (app) => app.model.saes.find((sae) => sae.name === app.state.sae) ?? app.model.saes[0];
const layerOf = (point) => Number(/^blocks\.(\d+)\./.exec(point)?.[1] ?? -1);

// The place of a feature; edits are made at `pos`, or at all positions.
function featurePlace(app, feature, pos = null) {
  const { name, point } = saeOf(app), { selected } = app.link, layer = layerOf(point);
  const same = selected?.feature === feature && selected?.sae === name;
  return { point, sae: name, feature, ...(layer < 0 ? {} : { layer }), pos: pos ?? (same ? selected.pos : app.position()) };
}

function pin(app, feature, pos = null) {
  app.select(featurePlace(app, feature, pos));
  if (feature === app.state.feature) return;
  const known = app.answer("features");
  const isShown = known?.features.includes(feature) && (Object.keys(known.labels).length || !app.model.store);
  app.change({ feature }, isShown ? FEATURE_SLOTS.slice(1) : FEATURE_SLOTS);
  if (isShown) app.paintPanel(app.panels.find((panel) => panel.slot === "features"));
}

// Tokens in the color of their values; the one at `at` is framed.
function coloredText(texts, values, most, app, { at = -1, linked = false, what = "", scale = "one" } = {}) {
  return el("p", { class: "text tokens" }, texts.map((text, nth) => {
    const share = values[nth] / most;
    const node = el("span", {
      class: nth === at ? "token here" : "token",
      onmouseenter: (event) => { tip.show([`“${shown(text)}”: ${what}${number(values[nth], 4)}`], event.clientX, event.clientY, event.target); if (linked) app.link.hover({ pos: nth }); },
      onmouseleave: () => { tip.hide(); if (linked) app.link.hover(null); },
    }, shown(text, true) === text.slice(1) ? text : shown(text));
    if (share > 0 || scale === "zero") {
      const { back, ink } = cellColors(share, scale);
      Object.assign(node.style, { background: back, color: ink });
    }
    return node;
  }));
}

const featureName = (data, feature) => (feature in (data.labels ?? {}) ? `${feature} ${shown(data.labels[feature], true)}` : String(feature));

function featuresPanel(app) {
  if (!app.model.saes.length) return null;
  return {
    slot: "features", title: "Features", wide: true,
    hint: () => `${saeOf(app).about}; active at “${words(app)[app.position()] ?? ""}”${app.hasEdits() ? " (gray: without your edits)" : ""}, and by position. Click one to pin it.`,
    controls: (state) => (app.model.saes.length < 2 ? [] : [chooser("autoencoder", Object.fromEntries(app.model.saes.map((sae) => [sae.name, sae.name])), saeOf(app).name,
      (sae) => { app.link.selected = null; app.change({ sae, feature: null }, FEATURE_SLOTS); app.edits.draw(); })]),
    question: (state) => ({ view: "features", sae: state.sae, feature: state.feature }),
    draw(data) {
      const texts = words(app), out = new Set(data.outlying.positions);
      return [featureBars(app, data), featureMap(app, data, texts, out), ...featureFacts(app, data, texts, out)];
    },
  };
}

function featureBars(app, data) {
  const before = tensor(data.here.before).values, after = tensor(data.here.after).values;
  if (!data.here.features.length) return el("p", { class: "hint" }, "no feature is active at this token");
  const order = upTo(after.length).sort((a, b) => after[b] - after[a]);
  return bars(order.map((at) => {
    const feature = data.here.features[at];
    return {
      label: featureName(data, feature), place: { feature }, pick: () => pin(app, feature, data.pos),
      values: [
        ...(app.hasEdits() ? [{ value: before[at], kind: "old", text: number(before[at]) }] : []),
        { value: after[at], kind: feature === app.state.feature ? "new target" : "new", text: number(after[at]) },
      ],
    };
  }), app.link, { most: Math.max(largest(before), largest(after)), labelWidth: 116 });
}

function featureMap(app, data, texts, out) {
  if (!data.features.length) return null;
  const before = tensor(data.before), after = tensor(data.after);
  const ordinary = (values) => values.values.filter((_, at) => !out.has(at % values.shape[1]));
  return new Grid("Features by positions", {
    rows: data.features.map((feature) => featureName(data, feature)), columns: texts, scale: "one",
    most: Math.max(largest(ordinary(before)), largest(ordinary(after))), value: after.at,
    lines: (row, column) => [el("b", {}, `feature ${data.features[row]} at “${texts[column]}”`),
      app.hasEdits() ? `${number(before.at(row, column), 4)} → ${number(after.at(row, column), 4)}` : number(after.at(row, column), 4),
      ...(data.features[row] in data.labels ? [`most active in the store at “${shown(data.labels[data.features[row]])}”`] : [])],
    axes: [["feature", data.features], ["pos", upTo(texts.length)]],
    pick: (row, column) => pin(app, data.features[row], column),
  }, app.link);
}

// How good the autoencoder is on this prompt.
function featureFacts(app, data, texts, out) {
  const { quality, spliced } = data, error = tensor(data.relative_error).values;
  const said = [];
  if (quality) {
    const all = out.size ? ` (${percent(quality.explained_variance_of_all)} with the outlying)` : "";
    said.push(`On this prompt: ${number(quality.l0)} features are active per token; the reconstruction explains ${percent(quality.explained_variance)} of the variance${all}.`);
    if (quality.loss !== null) said.push(`Loss: ${number(quality.loss, 4)}; with the reconstruction ${number(quality.loss_spliced, 4)}, with zeros ${number(quality.loss_zeroed, 4)}: ${percent(quality.loss_recovered)} recovered.`);
  }
  const choice = spliced.choice === spliced.text ? "" : ` (the first choice is then “${shown(spliced.choice)}”)`;
  said.push(`After “${texts[data.pos] ?? ""}”: “${shown(spliced.text)}” ${percent(spliced.before)}, with the reconstruction ${percent(spliced.after)}${choice}, KL divergence ${number(spliced.kl)}.`);
  if (out.size) said.push(`Outlying tokens keep their activation, and do not decide which features are listed: ${data.outlying.text}.`);
  return [
    el("p", { class: "sum" }, `${said.join(" ")} Edits of features keep the error: without edits, nothing changes.`),
    el("p", { class: "sum" }, "Error of the reconstruction, relative to the activation:"),
    coloredText(app.tokens?.tokens.texts ?? [], error, 1, app, { linked: true, what: "error " }),
  ];
}

function featurePanel(app) {
  if (!app.model.saes.length) return null;
  return {
    slot: "feature", title: "One feature",
    hint: (state) => (state.feature === null ? "" : `feature ${state.feature} of ${saeOf(app).name}, by token`),
    empty: "Click a feature to pin it.",
    question: (state) => (state.feature === null ? null : { view: "feature", sae: state.sae, feature: state.feature }),
    draw(data) {
      const values = tensor(data.after).values, texts = app.tokens?.tokens.texts ?? [];
      return [
        coloredText(texts, values, Math.max(largest(values), largest(tensor(data.before).values)), app, { at: data.pos, linked: true }),
        app.isLive ? featureActions(app.edits, featurePlace(app, data.feature)) : null,
        ...featureLogits(app, data),
      ];
    },
  };
}

function featureLogits(app, data) {
  if (!data.logits) return [el("p", { class: "hint" }, data.why)];
  const { texts } = data.logits, { values } = tensor(data.logits.values);
  const rows = upTo(values.length).map((at) => ({
    label: shown(texts[at]), values: [{ value: values[at], kind: values[at] < 0 ? "cold" : "warm", text: number(values[at]) }],
  }));
  return [
    el("p", { class: "hint" }, "What one unit of it at the marked token adds to logits, on the direct path: the most raised and the most lowered."),
    bars(rows, app.link, { most: 1.4 * largest(values), signed: true }), // with room for the numbers
  ];
}

function contextsPanel(app) {
  if (!app.model.saes.length) return null;
  return {
    slot: "contexts", title: "Top contexts", cost: 3,
    hint: (state) => (state.feature === null || !app.model.store ? "" : `where feature ${state.feature} is most active in ${app.model.store}`),
    empty: app.model.store ? "Click a feature to pin it. The first time, the whole store is read." : "There is no store: start with --store PATH to see where features are most active.",
    question: (state) => (state.feature === null || !app.model.store ? null : { view: "contexts", sae: state.sae, feature: state.feature }),
    draw(data) {
      if (!data.contexts.length) return [el("p", { class: "hint" }, `feature ${data.feature} is active at none of ${data.rows.toLocaleString("en")} tokens`)];
      const most = Math.max(...data.contexts.map((each) => each.activation));
      return [
        el("p", { class: "sum" }, `feature ${data.feature} is active at ${percent(data.density)} of ${data.rows.toLocaleString("en")} tokens`),
        ...data.contexts.map((each) => el("div", { class: "context" }, el("span", { class: "value", title: `example ${each.example}, position ${each.position}` }, number(each.activation)),
          coloredText(each.texts, tensor(each.values).values, most, app, { at: each.at }))),
      ];
    },
  };
}

// What can be done to a feature, as buttons.
function featureActions(edits, place) {
  const amount = el("input", { type: "number", step: "any", value: 2, "aria-label": "factor or value" });
  const button = (text, act) => el("button", { class: "do", onclick: act }, text);
  return el("div", { class: "selection" },
    el("p", {}, `feature ${place.feature} at `, el("code", {}, place.point)),
    edits.whereBox(place),
    el("div", { class: "controls" }, button("Disable", () => edits.add("zero", {}, place)),
      button("Scale by", () => edits.addBy(amount, "scale", {}, place)), button("Set to", () => edits.addBy(amount, "set", {}, place)), amount));
}

PANELS.splice(PANELS.indexOf(patchingPanel), 0, featuresPanel, featurePanel, contextsPanel);
