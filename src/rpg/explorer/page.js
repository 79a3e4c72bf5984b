// The page: what is chosen, the curves of the translated loss, and the words about the ratio under the pointer.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector) => document.querySelector(selector);
const form = $("#controls");
const BESIDES = { advantage: 1, v: 1, p: 0.3, w: 1.6, zoom: 1 }; // what a preset leaves open
const FIRST = "ppo";
const state = {};
let preset = FIRST, drawn = null, note = "", last = "";

// ---- the loss

const copy = (chosen) => ({ ...chosen, options: { ...chosen.options } });
const lossOf = (s) => new PolicyLoss(named({
  divergence: s.divergence, beta: s.beta, estimator: s.estimator, level: s.level, reduction: s.reduction,
  constant: s.reduction === "constant" ? s.constant || 3000 : null, kl_in_clip: s.kl_in_clip,
  through_advantage: s.through_advantage, clip: s.clip === "none" ? null : new RULES[s.clip](named(s.options)),
}));

/** One sample at a ratio: the derivative of its loss by log π, what is left of its weight, and what the clip does. */
function at(s, loss, log_w, advantage) {
  const x = sample(new Tensor(Math.log(s.p) + log_w, 1), log_w, Math.log(s.v), advantage);
  const c = loss_of(loss, x).d + 0;
  return { input: x, c, omega: 0 - c, weight: weight_of(loss, x), fate: fate_of(loss, x) };
}

/** A choice that does not go with the others gives way where it can: KL place, Â, then the estimator. */
function accept(changed) {
  const reduction = (s) => (s.reduction === "token-mean" && s.level !== "token" ? "seq-mean-token-sum" : s.reduction);
  const tries = [{}, { kl_in_clip: null }, { kl_in_clip: null, through_advantage: false }];
  for (const estimator of ["reinforce", "differentiable"]) tries.push({ estimator }, { estimator, kl_in_clip: null, through_advantage: false });
  let refused = null;
  for (const more of tries) {
    const tried = { ...copy(changed), ...more };
    tried.reduction = reduction(tried);
    try { lossOf(tried); } catch (error) { refused = refused || error.message; continue; }
    const given = Object.keys(more).filter((name) => changed[name] !== more[name]);
    note = refused && given.length ? `${given.map((name) => `${name} = ${more[name] ?? "as published"}`).join(", ")}: ${refused}` : "";
    Object.assign(state, tried);
    return true;
  }
  note = refused;
  return false;
}

const signed = (x) => digits(x).replace("-", "−");

// ---- curves

/** How far the ratio goes on each side of 1, in logarithms: past the clip's limits, wherever they are. */
function reach(loss) {
  const limits = loss.clip ? [...loss.clip.limits()].flat().filter((x) => x > 0 && x < 1e6 && x !== 1).map(Math.log) : [];
  const past = (far) => (far ? far + Math.min(2.4 * far, 0.6) : null);
  const above = past(Math.max(0, ...limits)), below = past(Math.max(0, ...limits.map((x) => -x)));
  const wide = Math.log(loss.clip && loss.clip.looks.length ? 6 : 4);
  let high = (above ?? Math.min(below ?? wide, wide)) * state.zoom;
  const low = (below ?? Math.min(above ?? wide, wide)) * state.zoom;
  if (loss.clip && loss.clip.looks.length) high = Math.min(high, -Math.log(state.p) * 0.999999);
  return [Math.max(-low, -12), Math.min(high, 12)];
}

/** Points of a curve, with both sides of every edge where the clip begins or ends. */
function curve(loss, advantage, [low, high]) {
  const look = (x) => ({ x, ...at(state, loss, x, advantage) });
  const points = Array.from({ length: 161 }, (_, i) => look(low + ((high - low) * i) / 160));
  return points.flatMap((point, i) => {
    const next = points[i + 1];
    if (!next || next.fate === point.fate) return [point];
    let [a, b] = [point, next];
    for (let n = 0; n < 40; n++) {
      const middle = look((a.x + b.x) / 2);
      if (middle.fate === a.fate) a = middle; else b = middle;
    }
    return [point, a, { ...b, edge: true }];
  });
}

function ratioTicks([low, high]) {
  const round = high - low > 1.7 ? [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000] : ticks(Math.exp(low), Math.exp(high), 6);
  return round.filter((w) => Math.log(w) >= low && Math.log(w) <= high);
}

/** One panel: the curve, the same loss without its clip behind it, and what the clip does, shaded. */
function panel(box, kind, points, open, range) {
  const width = Math.max(box.clientWidth, 140), height = 176;
  const inner = { left: 44, right: width - 8, top: 8, bottom: height - 24 };
  const own = points.map((p) => p[kind]).filter(Number.isFinite);
  let [bottom, top] = [Math.min(0, ...own), Math.max(0, ...own)];
  const size = top - bottom || 1;
  for (const p of open) if (Number.isFinite(p[kind])) [bottom, top] = [Math.max(Math.min(bottom, p[kind]), bottom - 0.5 * size), Math.min(Math.max(top, p[kind]), top + 0.5 * size)];
  const [floor, ceiling] = [bottom - 0.06 * (top - bottom || 1), top + 0.06 * (top - bottom || 1)];
  const place = {
    x: (log_w) => inner.left + ((log_w - range[0]) / (range[1] - range[0])) * (inner.right - inner.left),
    y: (v) => inner.bottom - ((v - floor) / (ceiling - floor)) * (inner.bottom - inner.top),
  };
  const shade = svg("g", { class: "shade" });
  let start = 0;
  points.forEach((p, i) => {
    if (i + 1 < points.length && points[i + 1].fate === p.fate) return;
    if (p.fate !== "kept") {
      const [x0, x1] = [place.x(points[start].x), place.x(p.x)];
      shade.append(svg("rect", { class: p.fate, x: x0.toFixed(1), width: Math.max(x1 - x0, 1).toFixed(1), y: inner.top, height: inner.bottom - inner.top }));
    }
    start = i + 1;
  });
  const axes = svg("g", { class: "axes", "aria-hidden": "true" });
  for (const t of ticks(floor, ceiling, 4)) axes.append(svg("line", { x1: inner.left, x2: inner.right, y1: place.y(t), y2: place.y(t), class: t === 0 ? "base" : null }), svg("text", { x: inner.left - 6, y: place.y(t), dy: ".34em", "text-anchor": "end" }, signed(t)));
  let last = -Infinity;
  for (const w of ratioTicks(range)) {
    const x = place.x(Math.log(w)), text = String(Number(w.toPrecision(6)));
    axes.append(svg("line", { x1: x, x2: x, y1: inner.top, y2: inner.bottom, class: w === 1 ? "one" : null }));
    if (x - last > 7 * text.length + 6) { axes.append(svg("text", { x: Math.min(x, width - 3.5 * text.length), y: height - 7, "text-anchor": "middle" }, text)); last = x; }
  }
  const name = `clip-${box.closest("section").id}-${kind}`;
  const within = svg("clipPath", { id: name }, svg("rect", { x: inner.left, y: inner.top - 3, width: inner.right - inner.left, height: inner.bottom - inner.top + 6 }));
  const line = (ps) => ps.map((p, i) => `${i && !p.edge ? "L" : "M"}${place.x(p.x).toFixed(2)} ${place.y(p[kind]).toFixed(2)}`).join("");
  const marks = svg("g", { "clip-path": `url(#${name})` },
    svg("path", { class: "line thin", d: line(open) }),
    svg("path", { class: "edge", d: points.map((p, i) => (p.edge ? `M${place.x(p.x)} ${place.y(points[i - 1][kind])}V${place.y(p[kind])}` : "")).join("") }),
    svg("path", { class: "line", d: line(points) }));
  const cross = svg("g", { class: "cross", "aria-hidden": "true" });
  const side = box.closest("section").dataset.sign;
  const picture = svg("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "slider", "aria-label": `${kind === "omega" ? "gradient" : "weight"} over the ratio, A ${side === "+" ? "> 0" : "< 0"}`,
    "aria-valuemin": Math.exp(range[0]).toPrecision(4), "aria-valuemax": Math.exp(range[1]).toPrecision(4), "aria-valuenow": state.w,
  }, svg("defs", {}, within), shade, axes, marks, cross);
  const move = (event) => {
    const share = (event.clientX - picture.getBoundingClientRect().left - inner.left) / (inner.right - inner.left);
    point(Math.exp(range[0] + Math.min(Math.max(share, 0), 1) * (range[1] - range[0])));
  };
  picture.addEventListener("pointermove", move);
  picture.addEventListener("pointerdown", move);
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 }[event.key];
    if (!step) return;
    event.preventDefault();
    const log_w = Math.log(state.w) + (step * (range[1] - range[0])) / 100;
    point(Math.exp(Math.min(Math.max(log_w, range[0]), range[1])));
  });
  box.replaceChildren(picture);
  return (found) => {
    const x = place.x(Math.log(state.w)).toFixed(1), y = place.y(found[kind]).toFixed(1);
    picture.setAttribute("aria-valuenow", state.w);
    picture.setAttribute("aria-valuetext", `ratio ${found.w}, ${kind === "omega" ? "gradient" : "weight"} ${digits(found[kind])}`);
    cross.replaceChildren(svg("line", { x1: x, x2: x, y1: inner.top, y2: inner.bottom }));
    if (Number.isFinite(found[kind])) cross.append(svg("circle", { cx: x, cy: y, r: 4.5 }));
  };
}

// ---- words

/** The ratio that is looked at: the sentences, the numbers, the crosses. */
function point(w) {
  const log_w = Math.min(Math.max(Math.log(w), drawn.range[0]), drawn.range[1]);
  state.w = Number(Math.exp(log_w).toPrecision(drawn.range[1] - drawn.range[0] > 0.05 ? 4 : 7));
  for (const { section, advantage, crosses } of drawn.sides) {
    const found = { ...at(state, drawn.loss, Math.log(state.w), advantage), w: state.w };
    const said = sentence(drawn.loss, found.input, found.c);
    section.querySelector(".said").replaceChildren(said, make("span", { class: "exact" }, ` ω = ${signed(found.omega)}, weight ${digits(found.weight)}`));
    for (const cross of crosses) cross(found);
  }
  if (document.activeElement !== $("[name=w]")) $("[name=w]").value = state.w;
  remember();
}

function audit() {
  const box = $("#audit"), s = state;
  const smooth = data.shapes.includes(s.clip) ? s.clip : data.shapes[0];
  const key = `${s.through_advantage ? "through" : smooth} ${s.divergence} ${s.level}${s.reduction === "seq-mean-token-mean" ? " /|y|" : ""}`;
  const cells = data.numbers[s.divergence !== "none" && !s.beta ? key.replace(s.divergence, "none") : key];
  const head = ["", "bias, fixed lengths", "bias, lengths differ", "noise", "bias of the KL term", "noise of the KL term"];
  const rows = Object.entries(data.scenarios).map(([name, meaning], i) => make("tr", {}, make("th", { scope: "row" }, make("b", {}, name), make("small", {}, ` ${meaning}`)), cells[i].map((text) => make("td", { class: text === "exact" ? "exact" : text.endsWith("%") ? "off" : null }, text))));
  box.replaceChildren(
    make("p", {}, "From the audit: every response of ten small problems is enumerated and the expected gradient compared with the exact one of E[R] − β·D. A bias of 100 % is an error as large as the gradient. The clip is open here: wherever it cuts, it trades bias for less noise."),
    make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, head.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, rows))),
    make("p", { class: "small" }, "β = 0.1, policies 0.5 apart, smooth rules with their default options; noise: E|g − E g|² of one response over |∇J|², of the KL term over |β·∇D|². A k penalty is held to KL(π‖ref)."));
}

function tell() {
  const lines = formula(drawn.loss, data.formulas);
  $("#formula").replaceChildren(...lines.map((line, i) => make("p", { class: i ? null : "first" }, line)));
  $("#code").textContent = code(drawn.loss, data.texts);
  const known_ = data.presets[preset], same = differences().length === 0;
  $("#about").replaceChildren(...(known_ ? [make("b", {}, preset), same ? "" : " (changed)", make("span", {}, ` ${known_.about}`), known_.advantage ? ` Advantage: ${known_.advantage}.` : "", make("small", {}, ` ${known_.paper}`)] : []));
  for (const button of document.querySelectorAll("[data-preset]")) button.setAttribute("aria-pressed", String(button.dataset.preset === preset && same));
  $("#more").value = [...$("#more").options].some((o) => o.value === preset) ? preset : "";
  $("#letter").textContent = { token: "at ratio w", sequence: "at ratio W", "sequence-mean": "at ratio S" }[state.level];
  $("#trouble").textContent = note;
  audit();
}

// ---- controls

const show = (x) => (x === null || x === undefined ? "" : String(Number(Number(x).toPrecision(6))));
function slide(number, value) {
  const slider = number.parentElement.querySelector("[type=range]");
  if (!slider) return;
  const { low, high } = slider.dataset;
  slider.value = value > 0 ? Math.log(value / low) / Math.log(high / low) : 0;
}

/** The fields of the chosen clip: numbers, numbers that may be nothing, words. */
function ruleFields() {
  const rule = data.rules[state.clip];
  const parts = rule.options.map((o) => {
    const set = (value) => change({ options: { ...state.options, [o.name]: value } });
    if (o.words) return make("label", {}, make("span", {}, o.name), make("select", { name: `o.${o.name}`, onchange: (e) => set(e.target.value) }, o.words.map((word) => make("option", { value: word, selected: state.options[o.name] === word }, word))));
    return make("label", {}, make("span", {}, o.name + (o.none ? " (empty: none)" : "")), make("input", { type: "number", name: `o.${o.name}`, min: 0, step: "any", inputmode: "decimal", value: show(state.options[o.name]), oninput: (e) => { if (e.target.value !== "" || o.none) set(e.target.value === "" ? null : Number(e.target.value)); } }));
  });
  const open = document.activeElement && document.activeElement.name;
  if (open && open.startsWith("o.") && $("#options").dataset.clip === state.clip) return;
  $("#options").dataset.clip = state.clip;
  $("#options").replaceChildren(make("p", { class: "small" }, rule.about), ...parts);
}

function fill() {
  const active = document.activeElement;
  for (const name of ["divergence", "estimator", "clip", "level", "reduction"]) form.elements[name].value = state[name];
  form.elements.kl_in_clip.value = state.kl_in_clip === null ? "" : String(state.kl_in_clip);
  form.elements.through_advantage.checked = state.through_advantage;
  for (const name of ["beta", "v", "advantage", "p"]) {
    if (form.elements[name] !== active) form.elements[name].value = show(state[name]);
    slide(form.elements[name], state[name]);
  }
  const kl = state.divergence !== "none";
  for (const part of form.querySelectorAll(".kl")) part.hidden = !kl;
  form.elements.kl_in_clip.parentElement.hidden = form.elements.through_advantage.parentElement.hidden = !kl || state.clip === "none";
  form.querySelector(".looks").hidden = !(drawn.loss.clip && drawn.loss.clip.looks.length);
  ruleFields();
}

function draw_() {
  const loss = lossOf(state), range = reach(loss), open = lossOf({ ...state, clip: "none", kl_in_clip: null, through_advantage: false });
  const sides = [["positive", state.advantage], ["negative", -state.advantage]].map(([id, advantage]) => {
    const section = document.getElementById(id);
    const points = curve(loss, advantage, range), without = curve(open, advantage, range);
    const crosses = [...section.querySelectorAll(".plot")].map((box) => panel(box, box.dataset.plot, points, without, range));
    return { section, advantage, points, crosses };
  });
  drawn = { loss, range, sides };
  point(state.w);
}

function refresh() { draw_(); fill(); tell(); }

function change(changes) {
  const changed = { ...copy(state), ...changes };
  if (changes.clip) changed.options = Object.fromEntries(data.rules[changes.clip].options.map((o) => [o.name, o.default]));
  if (changes.divergence && changes.divergence !== "none" && !changed.beta) changed.beta = 0.1;
  if (accept(changed)) refresh();
  else $("#trouble").textContent = note;
}

function choose(name) {
  preset = name;
  Object.assign(state, BESIDES, copy(data.presets[name].state));
  note = "";
  refresh();
}

// ---- the address: a preset, and what differs from it

function differences() {
  const base = data.presets[preset].state, found = [];
  for (const name of ["divergence", "beta", "estimator", "clip", "kl_in_clip", "through_advantage", "level", "reduction"]) if (state[name] !== base[name]) found.push([name, state[name]]);
  const options = state.clip === base.clip ? base.options : Object.fromEntries(data.rules[state.clip].options.map((o) => [o.name, o.default]));
  for (const [name, value] of Object.entries(state.options)) if (value !== options[name]) found.push([`o.${name}`, value]);
  for (const name of ["advantage", "v", "p"]) if (state[name] !== BESIDES[name]) found.push([name, state[name]]);
  return found;
}

function remember() {
  const parts = [["preset", preset], ...differences()];
  for (const name of ["w", "zoom"]) if (state[name] !== BESIDES[name]) parts.push([name, state[name]]);
  const text = parts.map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(String(value))}`).join("&");
  try { history.replaceState(null, "", `#${text}`); } catch { /* too often: the next one will do */ }
}

/** Of an address, whatever it says: what is not known is left, what is refused is told. */
function read(address) {
  last = decodeURIComponent(address.replace(/^#/, ""));
  const given = new URLSearchParams(address.replace(/^#/, ""));
  preset = Object.hasOwn(data.presets, given.get("preset")) ? given.get("preset") : FIRST;
  Object.assign(state, BESIDES, copy(data.presets[preset].state));
  note = "";
  const changed = copy(state);
  const value = (text) => (text === "null" ? null : text === "true" ? true : text === "false" ? false : text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);
  if (Object.hasOwn(data.rules, given.get("clip"))) changed.options = Object.fromEntries(data.rules[given.get("clip")].options.map((o) => [o.name, o.default]));
  for (const [name, text] of given) {
    const known = name.startsWith("o.") ? changed.options : changed, own = name.replace(/^o\./, "");
    if (own === "clip" && !Object.hasOwn(data.rules, text)) continue;
    if (name !== "preset" && own !== "options" && Object.hasOwn(known, own)) known[own] = value(text);
  }
  for (const name of ["advantage", "v", "p", "w", "zoom"]) if (!(changed[name] > 0 && changed[name] < 1e6)) changed[name] = BESIDES[name];
  changed.p = Math.min(changed.p, 0.99);
  accept(changed);
  refresh();
}

for (const button of document.querySelectorAll("[data-preset]")) button.addEventListener("click", () => choose(button.dataset.preset));
$("#more").addEventListener("change", (e) => e.target.value && choose(e.target.value));
form.addEventListener("submit", (e) => e.preventDefault());
form.addEventListener("input", ({ target }) => {
  const name = target.name.replace(/-slide$/, "");
  if (name.startsWith("o.")) return;
  if (target.type === "range") {
    const { low, high } = target.dataset;
    change({ [name]: Number((low * (high / low) ** target.value).toPrecision(3)) });
  } else if (target.type === "number") {
    if (target.value !== "" && (Number(target.value) > 0 || name === "beta")) change({ [name]: name === "p" ? Math.min(Number(target.value), 0.99) : Number(target.value) });
  } else if (name === "kl_in_clip") change({ kl_in_clip: target.value === "" ? null : target.value === "true" });
  else change({ [name]: target.type === "checkbox" ? target.checked : target.value });
});
$("[name=w]").addEventListener("input", (e) => Number(e.target.value) > 0 && point(Number(e.target.value)));
$("#closer").addEventListener("click", () => { state.zoom = Math.max(state.zoom / 1.5, 1e-3); refresh(); });
$("#wider").addEventListener("click", () => { state.zoom = Math.min(state.zoom * 1.5, 1e4); refresh(); });
$("#copy").addEventListener("click", async () => {
  try { await navigator.clipboard.writeText(location.href); note = "The address of this view is copied."; } catch { note = "This view's address stands in the address bar."; }
  $("#trouble").textContent = note;
});
window.addEventListener("hashchange", () => read(location.hash));
let width = innerWidth;
window.addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw_(); } });
if (innerWidth < 700) $("details.panel").open = false;
read(location.hash);

// for tests: the loss of a setting at a ratio
globalThis.explorer = { state, choose, presets: data.presets, get address() { return last; }, at: (s, log_w, advantage) => {
  const loss = lossOf({ reduction: "token-mean", ...s, v: Math.exp(s.log_v) });
  const found = at({ ...s, v: Math.exp(s.log_v) }, loss, log_w, advantage);
  return [found.c, sentence(loss, found.input, found.c), code(loss, data.texts), formula(loss, data.formulas)];
}, curves: () => drawn.sides.map(({ advantage, points }) => [advantage, points.map((p) => [p.x, p.c])]) };
