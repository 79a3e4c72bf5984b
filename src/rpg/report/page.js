// The curves of all runs: which are shown, over which axis, how smooth, and one crosshair for all of them.

const data = JSON.parse(document.getElementById("data").textContent);
const many = data.runs.length > 1;
const AXES = { step: "steps", tokens: "tokens", time: "time" };
const longest = Math.max(0, ...data.runs.map((run) => run.x.step.length));
const state = { axis: "step", smooth: longest > 150 ? 0.9 : many && longest > 20 ? 0.6 : 0, hidden: new Set(), seeds: false, training: !many, at: null };
const tasks = [...new Set(data.runs.flatMap((run) => Object.keys(run.evals)))];
const colour = (k) => `c${k % 10}`;

// ---- from columns to lines

/** One curve of one run on the axis in use. */
function column(run, source, name, low, high) {
  const columns = source && source.columns;
  if (!columns || !columns[name]) return null;
  return { run, x: source.x[state.axis], step: source.x.step, y: columns[name], low: low || null, high: high || null };
}

/** A group's curve: its run, or the mean of its runs where all have a value, and what one run has beyond that alone. */
function joined(curves, style, weight) {
  if (!curves.length) return [];
  if (curves.length === 1) {
    const [c] = curves;
    const line = { ...style, x: c.x, step: c.step, y: smoothed(c.y, weight), raw: weight ? c.y : null };
    if (c.low) Object.assign(line, { low: c.low, high: c.high });
    return [line];
  }
  const rows = new Map();
  curves.forEach((c) => c.step.forEach((step, i) => {
    if (c.y[i] === null || c.y[i] === undefined) return;
    if (!rows.has(step)) rows.set(step, []);
    rows.get(step).push({ c, i });
  }));
  const shared = [...rows].filter(([, found]) => found.length === curves.length).sort((a, b) => a[0] - b[0]);
  const over = (take, how) => shared.map(([, found]) => how(...found.map(({ c, i }) => take(c)[i])));
  const mean = (...v) => v.reduce((a, b) => a + b, 0) / v.length;
  const y = over((c) => c.y, mean);
  const lines = [{
    ...style, x: over((c) => c.x, mean), step: shared.map(([step]) => step), y: smoothed(y, weight), raw: weight ? y : null,
    low: smoothed(over((c) => c.y, Math.min), weight), high: smoothed(over((c) => c.y, Math.max), weight), seeds: curves.length,
  }];
  const last = shared.length ? shared[shared.length - 1][0] : -Infinity;
  for (const c of curves) {
    const tail = smoothed(c.y, weight).map((v, i) => (state.seeds || c.step[i] >= last ? v : null));
    if (known(tail).length > 1) lines.push({ ...style, x: c.x, step: c.step, y: tail, thin: true, quiet: true, points: false });
  }
  return lines;
}

const shown = (group) => group.runs.filter((r) => !state.hidden.has(r)).map((r) => data.runs[r]);

function trainingLines(chart) {
  const names = Object.keys(chart.series).filter((name) => chart.on.has(name));
  const lines = [];
  if (!many) {
    const [run] = data.runs;
    Object.keys(chart.series).forEach((name, k) => {
      const c = names.includes(name) && column(run, run, name, run.lowest[name], run.highest[name]);
      if (c) lines.push(...joined([c], { name: chart.series[name], colour: colour(k) }, state.smooth));
    });
    return lines;
  }
  data.groups.forEach((group) => {
    const curves = names.flatMap((name) => shown(group).map((run) => column(run, run, name, run.lowest[name], run.highest[name])));
    lines.push(...joined(curves.filter((c) => c), { name: group.label, colour: group.swatch, dash: group.dash }, state.smooth));
  });
  return lines;
}

function accuracyLines(chart) {
  const lines = [];
  data.groups.forEach((group) => {
    const style = many ? { name: group.label, colour: group.swatch, dash: group.dash } : { name: "held out", colour: "c0" };
    const curves = shown(group).map((run) => {
      const source = run.evals[chart.task];
      const own = source && source.columns;
      return column(run, source, chart.metric, own && own[chart.metric + "_low"], own && own[chart.metric + "_high"]);
    }).filter((c) => c);
    const evals = joined(curves, style, 0);
    if (evals.length && evals[0].x.length <= 60) evals[0].points = true;
    lines.push(...evals);
    if (state.training && chart.metric.startsWith("mean@")) {
      const trained = shown(group).map((run) => column(run, run, data.training)).filter((c) => c);
      const name = many ? `${group.label}, training` : "training";
      lines.push(...joined(trained, { name, colour: many ? group.swatch : "c1", dash: many ? "2 3" : null, thin: true }, state.smooth)
        .map((l) => ({ ...l, low: null, high: null, quiet: many || l.quiet })));
    }
  });
  return lines;
}

// ---- charts on the page

const metrics = (task) => {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys((run.evals[task] || { columns: {} }).columns)))];
  const kinds = ["mean@", "pass@", "level"];
  const order = (name) => kinds.indexOf(name.slice(0, 5)) * 1e6 + Number(name.slice(5));
  return names.filter((n) => /^(mean@|pass@|level)\d+$/.test(n) && n !== "pass@1").sort((a, b) => order(a) - order(b));
};
const charts = data.charts.map((chart) => {
  if (many && chart.whole) chart.series = { [chart.whole]: "all", ...chart.series };
  const names = Object.keys(chart.series);
  const loud = names.filter((name) => !chart.quiet.includes(name));
  return { ...chart, on: new Set(many ? [(loud[0] || names[0])] : loud.length ? loud : names), lines: trainingLines, log: false };
});
const accuracy = { key: "accuracy", title: "Accuracy", unit: "share", task: tasks[0], metric: tasks.length ? metrics(tasks[0])[0] : null, lines: accuracyLines };
if (accuracy.metric) charts.unshift(accuracy);
else document.getElementById("chart-accuracy").remove();

function button(text, pressed, act, kind = "tab") {
  return make("button", { type: "button", class: kind, "aria-pressed": String(pressed), onclick: act }, text);
}

function tabs(chart) {
  const found = [];
  if (chart === accuracy) {
    if (tasks.length > 1)
      for (const task of tasks) found.push(button(task, chart.task === task, () => { chart.task = task; chart.metric = metrics(task).includes(chart.metric) ? chart.metric : metrics(task)[0]; refresh(); }));
    metrics(chart.task).forEach((metric, k) => found.push(button(metric.replace("level", "level "), chart.metric === metric, () => { chart.metric = metric; refresh(); }, metric !== "level1" && (k || !found.length) ? "tab" : "tab apart")));
    if (data.runs.some((run) => run.columns[data.training]) && chart.metric.startsWith("mean@"))
      found.push(button([!many && make("i", { class: "swatch c1" }), "training"].filter(Boolean), state.training, () => { state.training = !state.training; refresh(); }, "tab apart"));
    return found;
  }
  const names = Object.keys(chart.series);
  if (names.length > 1) names.forEach((name, k) => {
    const swatch = many ? [] : [make("i", { class: `swatch ${colour(k)}` })];
    found.push(button([...swatch, chart.series[name]], chart.on.has(name), () => {
      if (many) chart.on = new Set([name]);
      else if (!chart.on.delete(name)) chart.on.add(name);
      else if (!chart.on.size) chart.on.add(name);
      refresh();
    }));
  });
  if (!chart.stacked || many) found.push(button("log", chart.log, () => { chart.log = !chart.log; refresh(); }, "tab log"));
  return found;
}

function domain() {
  const visible = data.runs.filter((_, r) => !state.hidden.has(r));
  let low = Infinity, high = -Infinity;
  for (const run of visible)
    for (const xs of [run.x[state.axis], ...Object.values(run.evals).map((e) => e.x[state.axis])])
      for (const x of xs) { low = Math.min(low, x); high = Math.max(high, x); }
  return low <= high ? [low, high > low ? high : low + 1] : [0, 1];
}

function words(x, step) {
  if (state.axis === "time") return `${clock(x)}`;
  if (state.axis === "tokens") return `${digits(x)} tokens`;
  const end = step === null ? Math.round(x) : step;
  return data.stride > 1 ? `steps to ${end}` : `step ${end}`;
}

function readout(chart) {
  const found = chart.drawn.at(state.at);
  const box = chart.figure.querySelector(".readout");
  box.replaceChildren();
  if (!found.length) return;
  const nearestOne = found.reduce((a, b) => (state.at !== null && Math.abs(b.x - state.at) < Math.abs(a.x - state.at) ? b : a));
  const spots = [...new Set(found.map((f) => words(f.x, f.step)))];
  const together = spots.length === 1;
  box.append(make("span", { class: "at" }, state.at === null ? "last" : together ? spots[0] : words(nearestOne.x, nearestOne.step)));
  for (const f of found) {
    const named = chart === accuracy;
    const range = named && f.low !== null && f.low !== undefined ? ` ${(100 * f.low).toFixed(1)}–${(100 * f.high).toFixed(1)}` : "";
    const where = !together && state.at !== null && chart === accuracy ? ` (${words(f.x, f.step)})` : "";
    const name = make("span", { class: named ? "name" : "hidden-text" }, `${f.line.name} `);
    box.append(make("span", { class: "value", title: f.line.name }, make("i", { class: `swatch ${f.line.colour}` }), name, make("b", {}, WORDS[chart.unit](f.y)), make("small", {}, range + where)));
  }
}

function lost(chart) {
  const names = chart === accuracy ? [] : Object.keys(chart.series);
  const told = data.runs.flatMap((run) => names.filter((n) => run.lost[n]).map((n) => `${many ? run.name + ": " : ""}${n} was not a finite number at ${run.lost[n]} step${run.lost[n] > 1 ? "s" : ""}`));
  return told.length ? `${told.slice(0, 3).join("; ")}${told.length > 3 ? ` and ${told.length - 3} more` : ""}.` : "";
}

function render(chart, range) {
  const figure = (chart.figure = chart.figure || document.getElementById(`chart-${chart.key}`));
  const lines = chart.lines(chart);
  const large = figure.classList.contains("large");
  const read = lines.filter((l) => !l.quiet);
  const label = `${chart.title}. ` + read.map((l) => { const v = known(l.raw || l.y); return v.length ? `${l.name}: from ${WORDS[chart.unit](v[0])} to ${WORDS[chart.unit](v[v.length - 1])}` : ""; }).filter(Boolean).join("; ");
  chart.drawn = draw(figure.querySelector(".plot"), lines, {
    height: large ? (window.innerWidth < 700 ? 260 : 380) : 190, unit: chart.unit, axis: state.axis, domain: range,
    log: chart.log, stacked: chart.stacked && !many, label, lights: many ? [] : data.runs[0].lights.map((at) => at[state.axis]),
  });
  const focused = document.activeElement && figure.contains(document.activeElement) ? document.activeElement.textContent : null;
  const strip = figure.querySelector(".tabs");
  strip.replaceChildren(...tabs(chart));
  if (focused) for (const b of strip.children) if (b.textContent === focused) b.focus();
  if (chart.warning === undefined) {
    chart.warning = lost(chart);
    if (chart.warning) figure.querySelector("figcaption").append(make("span", { class: "lost" }, " " + chart.warning));
  }
  const { picture, stops, toX } = chart.drawn;
  const move = (x) => { state.at = x; charts.forEach(readout); };
  const snap = (event) => stops.length && move(nearest(stops, toX(event)));
  picture.addEventListener("pointermove", snap);
  picture.addEventListener("pointerdown", snap);
  picture.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") move(null); });
  picture.addEventListener("blur", () => move(null));
  picture.addEventListener("keydown", (event) => {
    const here = state.at === null ? stops.length : stops.indexOf(nearest(stops, state.at));
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: stops.length - 1 }[event.key];
    if (event.key === "Escape") move(null);
    if (to === undefined || !stops.length) return;
    event.preventDefault();
    figure.querySelector(".readout").setAttribute("aria-live", "polite");
    move(stops[Math.min(Math.max(to, 0), stops.length - 1)]);
  });
}

function refresh() {
  state.at = null;
  const range = domain();
  for (const chart of charts) render(chart, range);
  charts.forEach(readout);
  legend();
}

// ---- the toolbar

function toggle(runs) {
  const all = runs.every((r) => state.hidden.has(r));
  runs.forEach((r) => (all ? state.hidden.delete(r) : state.hidden.add(r)));
  refresh();
}

const legends = make("div", { class: "legend", role: "group", "aria-label": "Runs" });
function legend() {
  if (!many) return;
  const focused = legends.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  legends.replaceChildren(...data.groups.map((group) => {
    const on = group.runs.some((r) => !state.hidden.has(r));
    const name = button([make("i", { class: `swatch ${group.swatch}` }), group.label], on, () => toggle(group.runs), "chip");
    name.setAttribute("aria-label", group.label);
    const seeds = group.runs.length > 1 ? group.runs.map((r) => {
      const one = button(data.runs[r].seed, !state.hidden.has(r), () => toggle([r]), "seed");
      one.setAttribute("aria-label", `${group.label}, seed ${data.runs[r].seed}`);
      one.title = data.runs[r].name;
      return one;
    }) : [];
    return make("div", { class: `entry ${group.swatch}` }, name, ...seeds);
  }));
  if (focused) for (const b of legends.querySelectorAll("button")) if (b.getAttribute("aria-label") === focused) b.focus();
}

function toolbar() {
  const axes = make("div", { class: "choice", role: "group", "aria-label": "Horizontal axis" });
  const choose = () => axes.replaceChildren(...Object.entries(AXES).map(([axis, name]) => button(name, state.axis === axis, () => {
    state.axis = axis; choose(); refresh(); axes.querySelector("[aria-pressed=true]").focus();
  })));
  choose();
  const value = make("output", {}, state.smooth.toFixed(2));
  const slider = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth, "aria-label": "Smoothing", oninput: (event) => {
    state.smooth = Number(event.target.value); value.textContent = state.smooth.toFixed(2); refresh();
  } });
  const parts = [axes, make("label", { class: "slider" }, "smoothing ", slider, value)];
  if (data.groups.some((group) => group.runs.length > 1))
    parts.push(make("label", { class: "check" }, make("input", { type: "checkbox", onchange: (event) => { state.seeds = event.target.checked; refresh(); } }), " each seed"));
  document.getElementById("toolbar").append(make("div", { class: "controls" }, parts), legends);
}

if (charts.length) {
  toolbar();
  refresh();
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; refresh(); } });
  window.addEventListener("beforeprint", refresh);
}
if (document.getElementById("browser")) browse(document.getElementById("browser"), data);
