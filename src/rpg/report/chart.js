// One chart as SVG: lines with bands, or stacked areas; a crosshair that reads the points.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; text becomes text nodes, so nothing in it is ever read as HTML. */
function make(name, attributes = {}, ...children) {
  const node = attributes.xmlns === SVG ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false && key !== "xmlns") node.setAttribute(key, value === true ? "" : value);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const svg = (name, attributes, ...children) => make(name, { xmlns: SVG, ...attributes }, ...children);

// ---- numbers in words

const digits = (x) => {
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e9) return trim(x / 1e9) + "B";
  if (size >= 1e6) return trim(x / 1e6) + "M";
  if (size >= 1e4) return trim(x / 1e3) + "k";
  if (size < 1e-3) return x.toExponential(1).replace("e-", "e−");
  if (size < 1e-2) return String(Number(x.toPrecision(2)));
  return trim(x);
};
const trim = (x) => String(Number(x.toPrecision(3)));
const clock = (s) => s < 120 ? `${trim(s)} s` : s < 7200 ? `${trim(s / 60)} min` : `${trim(s / 3600)} h`;
const WORDS = {
  number: digits,
  share: (x) => (x !== 0 && Math.abs(x) < 0.001 ? `${digits(100 * x)} %` : `${(100 * x).toFixed(1)} %`),
  seconds: clock,
};
const TICKS = { number: digits, share: (x) => `${trim(100 * x)} %`, seconds: clock };

// ---- scales

/** Round numbers that cover a range: about `count` of them. */
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999) || rough;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

/** Powers of ten; in a narrow range also twice and five times these, or else any round numbers. */
function decades(low, high) {
  const span = Math.log10(high / low), every = Math.max(1, Math.ceil(span / 5));
  const found = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.log10(high); k += every)
    for (const m of span < 2 ? [1, 2, 5] : [1]) found.push(Number(`${m}e${k}`));
  const inside = found.filter((t) => t >= low * 0.999 && t <= high * 1.001);
  return inside.length > 2 ? inside : ticks(low, high, 5);
}

/** Time runs in units of 60. */
function axisTicks(axis, low, high, count) {
  if (axis === "step") return ticks(low, high, count).filter(Number.isInteger);
  if (axis === "tokens") return ticks(low, high, count);
  const unit = high < 120 ? 1 : high < 7200 ? 60 : 3600;
  return ticks(low / unit, high / unit, count).map((t) => t * unit);
}

// ---- drawing

/** Moving average with the bias of its start removed. */
function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, mass = 0;
  return values.map((v) => {
    if (v === null || v === undefined) return null;
    mean = weight * mean + (1 - weight) * v;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

/** Where a chart has nothing, its line has a gap. */
function path(xs, ys, place) {
  let text = "", pen = false;
  xs.forEach((x, i) => {
    const y = ys[i];
    if (y === null || y === undefined) { pen = false; return; }
    text += `${pen ? "L" : "M"}${place.x(x).toFixed(1)} ${place.y(y).toFixed(1)}`;
    pen = true;
  });
  return text;
}

function ribbon(xs, low, high, place) {
  let text = "", run = [];
  const close = () => {
    const at = run.length === 1 ? place.x(xs[run[0]]) : 0;
    if (run.length === 1) text += `M${at - 2} ${place.y(low[run[0]])}h4V${place.y(high[run[0]])}h-4Z`; // alone, it is an error bar
    if (run.length > 1)
      text += "M" + run.map((i) => `${place.x(xs[i]).toFixed(1)} ${place.y(high[i]).toFixed(1)}`).join("L") +
        "L" + run.reverse().map((i) => `${place.x(xs[i]).toFixed(1)} ${place.y(low[i]).toFixed(1)}`).join("L") + "Z";
    run = [];
  };
  xs.forEach((_, i) => (low[i] === null || low[i] === undefined || high[i] === null || high[i] === undefined ? close() : run.push(i)));
  close();
  return text;
}

const known = (values) => values.filter((v) => v !== null && v !== undefined);

/**
 * lines: [{ name, colour, dash, x, y, raw, low, high, thin, points, quiet }]. Where y is smoothed, raw is what was logged,
 * and what the crosshair reads. Quiet lines are drawn, not read.
 * options: { height, unit, axis, domain, log, stacked, label, lights }; lights: where a warning light went on
 * Returns a chart with `at(x)`, which moves the crosshair and answers what stands there.
 */
function draw(box, lines, options) {
  const width = Math.max(box.clientWidth, 120), height = options.height;
  const inner = { left: 50, right: width - 8, top: 8, bottom: height - 24 };
  const stack = options.stacked ? stacked(lines) : null;
  let values = lines.flatMap((l) => known([...(stack ? [] : l.y), ...(l.raw || []), ...(l.low || []), ...(l.high || [])]));
  if (stack) values = [0, ...stack.flatMap((s) => known(s.high))];
  const log = options.log && values.some((v) => v > 0);
  if (log) values = values.filter((v) => v > 0);
  let [low, high] = values.length ? values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]) : [0, 1];
  if (!log) {
    if (low > 0 && low < 0.55 * high) low = 0;
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    const all = options.unit === "share";
    high = all ? Math.min(high + room, Math.max(1, high)) : high + room;
    low = low === 0 ? 0 : low >= 0 ? Math.max(0, low - room) : low - room;
    if (high - low < 1e-12) high = low + 1;
  } else if (low === high) [low, high] = [low / 2, high * 2];
  const scale = log ? Math.log : (v) => v;
  const [x0, x1] = options.domain;
  const place = {
    x: (v) => inner.left + ((v - x0) / (x1 - x0 || 1)) * (inner.right - inner.left),
    y: (v) => inner.bottom - ((scale(log ? Math.max(v, low) : v) - scale(low)) / (scale(high) - scale(low))) * (inner.bottom - inner.top),
  };
  const grid = svg("g", { class: "axes", "aria-hidden": "true" });
  for (const t of log ? decades(low, high) : ticks(low, high, Math.max(2, Math.round(height / 52)))) {
    const y = place.y(t).toFixed(1);
    grid.append(svg("line", { x1: inner.left, x2: inner.right, y1: y, y2: y }), svg("text", { x: inner.left - 7, y, dy: ".34em", "text-anchor": "end" }, TICKS[options.unit](t)));
  }
  for (const t of axisTicks(options.axis, x0, x1, Math.max(2, Math.floor((inner.right - inner.left) / 90)))) {
    const x = place.x(t);
    const text = options.axis === "time" ? clock(t) : digits(t);
    const anchor = x > inner.right - 16 ? "end" : x < inner.left + 8 ? "start" : "middle";
    grid.append(svg("text", { x: x.toFixed(1), y: height - 6, "text-anchor": anchor }, text));
  }
  grid.append(svg("text", { x: inner.left - 7, y: height - 6, "text-anchor": "end", class: "unit" }, options.axis));
  grid.append(svg("line", { class: "base", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }));
  const marks = svg("g", { class: "marks" });
  for (const x of options.lights || []) marks.append(svg("line", { class: "light", x1: place.x(x).toFixed(1), x2: place.x(x).toFixed(1), y1: inner.top, y2: inner.bottom }));
  if (stack) for (const s of stack) marks.append(svg("path", { class: `area ${s.line.colour}`, d: ribbon(s.line.x, s.low, s.high, place) }));
  else {
    for (const l of lines) if (l.low) marks.append(svg("path", { class: `band ${l.colour}`, d: ribbon(l.x, l.low, l.high, place) }));
    for (const l of lines) if (l.raw) marks.append(svg("path", { class: `raw ${l.colour}`, d: path(l.x, l.raw, place) }));
    for (const l of lines) {
      marks.append(svg("path", { class: `line ${l.colour}${l.thin ? " thin" : ""}`, "stroke-dasharray": l.dash, d: path(l.x, l.y, place) }));
      if (l.points || known(l.y).length === 1)
        l.x.forEach((x, i) => { if (known([l.y[i]]).length) marks.append(svg("circle", { class: `point ${l.colour}`, cx: place.x(x).toFixed(1), cy: place.y(l.y[i]).toFixed(1), r: 2.6 })); });
    }
  }
  const cross = svg("g", { class: "cross", "aria-hidden": "true" });
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": options.label }, grid, marks, cross);
  box.replaceChildren(picture);

  const read = lines.filter((l) => !l.quiet);
  const stops = [...new Set(read.flatMap((l) => l.x.filter((_, i) => known([l.y[i]]).length)))].sort((a, b) => a - b);
  function at(x) {
    cross.replaceChildren();
    if (x !== null && stops.length) {
      const near = nearest(stops, x);
      const px = place.x(near).toFixed(1);
      cross.append(svg("line", { x1: px, x2: px, y1: inner.top, y2: inner.bottom }));
    }
    return read.map((l, k) => {
      const own = l.x.map((v, i) => (known([l.y[i]]).length ? i : -1)).filter((i) => i >= 0);
      if (!own.length) return null;
      const i = x === null ? own[own.length - 1] : own.reduce((a, b) => (Math.abs(l.x[b] - x) < Math.abs(l.x[a] - x) ? b : a));
      if (x !== null && !stack)
        cross.append(svg("circle", { class: l.colour, cx: place.x(l.x[i]).toFixed(1), cy: place.y((l.raw || l.y)[i]).toFixed(1), r: l.thin ? 3 : 4.2 }));
      return { line: l, x: l.x[i], step: l.step ? l.step[i] : null, y: (l.raw || l.y)[i], low: l.low ? l.low[i] : null, high: l.high ? l.high[i] : null, order: k };
    }).filter((found) => found);
  }
  const toX = (event) => {
    const place01 = (event.clientX - picture.getBoundingClientRect().left - inner.left) / (inner.right - inner.left);
    return x0 + Math.min(Math.max(place01, 0), 1) * (x1 - x0);
  };
  return { picture, at, stops, toX };
}

const nearest = (sorted, x) => sorted.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));

function stacked(lines) {
  const total = new Map();
  return lines.map((line) => {
    const low = [], high = [];
    line.x.forEach((x, i) => {
      const base = total.get(x) || 0;
      low.push(base);
      high.push(base + (line.y[i] || 0));
      total.set(x, base + (line.y[i] || 0));
    });
    return { line, low, high };
  });
}
