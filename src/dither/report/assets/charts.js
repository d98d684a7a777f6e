"use strict";
// Charts of a report, drawn as SVG from the JSON in the page. Text from runs is only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const HTML_TAGS = ["div", "span", "ul", "li", "option", "button", "a"];

function make(tag, attributes = {}, ...children) {
  const element = HTML_TAGS.includes(tag) ? document.createElement(tag) : document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined && value !== null) element.setAttribute(name, value);
  for (const child of children) element.append(child);
  return element;
}

// Numbers as a person would write them ----------------------------------------------------------------------------------

const PREFIXES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

function trim(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

// 3·10⁻⁵, or 10⁻⁵ for a power of ten.
function scientific(value, digits) {
  const exponent = Math.floor(Math.log10(Math.abs(value)) + 1e-12), front = trim(value / 10 ** exponent, digits);
  const raised = String(exponent).replace("-", "⁻").replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
  return `${front === "1" ? "" : `${front}·`}10${raised}`;
}

function short(value, digits = 4) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e21 || size < 1e-4) return scientific(value, Math.min(digits, 3));
  for (const [unit, name] of PREFIXES) if (size >= unit * 10 || (size >= unit && unit > 1e3)) return `${trim(value / unit, digits)} ${name}`;
  return trim(value, Math.max(digits, Math.ceil(Math.log10(size + 1))));
}

function percent(value) {
  if (value > 0 && value < 1e-5) return "< 0.001 %";
  return `${trim(100 * value, value < 0.0995 ? 2 : 3)} %`;
}

function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, count), unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 2.5, 5, 10].find((factor) => factor * unit >= raw * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n <= Math.floor(high / step + 1e-9); n++) found.push(n * step);
  return found;
}

function logTicks(low, high, count) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  if (last - first < 1) return ticks(low, high, 4).filter((at) => at > 0);
  const skip = Math.max(1, Math.ceil((last - first) / count)), found = [];
  for (let power = first; power <= last; power += skip) found.push(10 ** power);
  return found;
}

function tickText(all) {
  // The digits that tell neighbouring ticks apart, in one unit for the whole axis.
  const size = Math.max(...all.map(Math.abs)), step = all.length > 1 ? Math.abs(all[1] - all[0]) : size;
  const [unit, name] = PREFIXES.find(([each]) => size >= each * (each === 1e3 ? 10 : 1)) ?? [1, ""];
  if (size && (size < 1e-3 || size >= 1e21)) return (value) => short(value, 3);
  const digits = Math.max(0, Math.min(8, Math.ceil(-Math.log10(step / unit || 1) - 1e-9)));
  const scaled = (step / unit) * 10 ** digits, more = Math.abs(scaled - Math.round(scaled)) > 1e-6 ? 1 : 0;
  return (value) => (value === 0 ? "0" : `${(value / unit).toFixed(digits + more)}${name ? ` ${name}` : ""}`).replace("-", "−");
}

function logText(all) {
  const wide = Math.min(...all) < 9e-4 || Math.max(...all) > 1e5;
  return (value) => (wide ? scientific(value, 2) : short(value, 2));
}

// Axes ------------------------------------------------------------------------------------------------------------------

const TIME_UNITS = [[3600 * 48, 86400, "days"], [7200, 3600, "hours"], [180, 60, "minutes"], [0, 1, "seconds"]];

function axisOf(name, high) {
  if (name !== "seconds") return { label: name, unit: 1 };
  const [, unit, label] = TIME_UNITS.find(([from]) => high >= from);
  return { label, unit };
}

function scaleOf(low, high, from, to, log) {
  if (log) {
    const a = Math.log10(low), b = Math.log10(high);
    const at = (value) => from + (to - from) * (b > a ? (Math.log10(value) - a) / (b - a) : 0.5);
    return Object.assign(at, { low, high, log, invert: (place) => 10 ** (a + ((place - from) / (to - from)) * (b - a)) });
  }
  const at = (value) => from + (to - from) * (high > low ? (value - low) / (high - low) : 0.5);
  return Object.assign(at, { low, high, log, invert: (place) => low + ((place - from) / (to - from)) * (high - low) });
}

function frame(holder, height, margin) {
  const width = Math.max(240, Math.floor(holder.clientWidth));
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
  return { svg, width, height, left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom };
}

function textWidth(text) {
  return 6.4 * text.length;
}

function drawAxes(box, x, y, options) {
  const { svg } = box;
  const yTicks = y.log ? logTicks(y.low, y.high, 6) : ticks(y.low, y.high, box.bottom - box.top > 200 ? 6 : 4);
  const yText = y.log ? logText(yTicks) : options.yText ?? tickText(yTicks);
  for (const at of yTicks) {
    const place = y(at).toFixed(1);
    svg.append(make("line", { class: "rule", x1: box.left, x2: box.right, y1: place, y2: place }));
    svg.append(make("text", { class: "tick", x: box.left - 6, y: place, "text-anchor": "end", dy: "0.35em" }, yText(at)));
  }
  const room = Math.max(2, Math.floor((box.right - box.left) / 70));
  const xTicks = options.ticks ?? (x.log ? logTicks(x.low, x.high, room) : ticks(x.low, x.high, room)).map((at) => [at, null]);
  const xText = (x.log ? logText : tickText)(xTicks.map(([at]) => at));
  let last = -Infinity;
  for (const [at, given] of xTicks) {
    const text = given ?? xText(at), place = x(at), half = textWidth(text) / 2;
    if (place - half < last + 4) continue;
    const anchor = place + half > box.width ? "end" : place - half < 0 ? "start" : "middle";
    svg.append(make("text", { class: "tick", x: place.toFixed(1), y: box.bottom + 16, "text-anchor": anchor }, text));
    last = place + half;
  }
  svg.append(make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  svg.append(make("text", { class: "name", x: (box.left + box.right) / 2, y: box.height - 4, "text-anchor": "middle" }, options.xName));
  if (options.yName) svg.append(make("text", { class: "name", x: 2, y: 12 }, options.yName));
}

// Tips ------------------------------------------------------------------------------------------------------------------

function tipOf(holder) {
  let tip = holder.querySelector(":scope > .tip");
  if (!tip) {
    tip = make("div", { class: "tip", role: "status", "aria-live": "polite" });
    tip.hidden = true;
    holder.append(tip);
  }
  return tip;
}

function showTip(holder, x, y, rows) {
  const tip = tipOf(holder);
  tip.replaceChildren(...rows.map(([text, swatch]) => {
    const row = make("div");
    if (swatch) row.append(make("span", { class: `dot ${swatch}` }));
    row.append(text);
    return row;
  }));
  tip.hidden = false;
  const room = holder.clientWidth, width = Math.min(tip.offsetWidth, room);
  tip.style.left = `${Math.max(0, Math.min(x + 12 + width > room ? x - width - 12 : x + 12, room - width))}px`;
  tip.style.top = `${Math.max(0, y)}px`;
}

function hideTip(holder) {
  tipOf(holder).hidden = true;
}

// Lets the pointer and the arrow keys move over items {row, column, element, x, y, tip: [lines]}, and shows the tip of one of them.
// `choose(item)` is called by a click or Enter.
function explore(holder, svg, items, { choose = null, first = 0 } = {}) {
  let at = first;
  const hide = () => {
    items[at]?.element.classList.remove("here");
    hideTip(holder);
  };
  const show = (n) => {
    items[at]?.element.classList.remove("here");
    at = n;
    const item = items[at];
    item.element.classList.add("here");
    showTip(holder, item.x - holder.scrollLeft, item.y, item.tip.map((line) => [line, ""]));
  };
  // The next item in a direction: in the row, or in the next row that has any the one whose column is nearest.
  const next = (rows, columns) => {
    const now = items[at], away = (item) => Math.abs(item.row - now.row) * 1e6 + Math.abs(item.column - now.column);
    const ahead = (item) => (rows ? Math.sign(item.row - now.row) === rows : item.row === now.row && Math.sign(item.column - now.column) === columns);
    return items.reduce((best, item, n) => (ahead(item) && (best < 0 || away(item) < away(items[best])) ? n : best), -1);
  };
  items.forEach((item, n) => {
    item.element.addEventListener("pointerenter", () => show(n));
    if (choose) item.element.addEventListener("click", () => choose(item));
  });
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("focus", () => items.length && show(at));
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key === "Escape") hide();
    if (!items.length) return;
    if (choose && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      choose(items[at]);
    }
    if (!(event.key in moves)) return;
    event.preventDefault();
    const found = next(...moves[event.key]);
    if (found >= 0) show(found);
  });
}

// Legends ---------------------------------------------------------------------------------------------------------------

function legendItem(text, width, height, ...shapes) {
  return make("li", {}, make("svg", { width, height, "aria-hidden": "true" }, ...shapes), text);
}

function button(text, action, attributes = {}) {
  const found = make("button", { type: "button", ...attributes }, text);
  found.addEventListener("click", () => action(found));
  return found;
}

function lineClass(line) {
  return `${line.style} c${line.colour % COLOURS}${line.colour >= COLOURS || line.style === "dashed" ? " dashes" : ""}`;
}

// With a view, each name shows or hides its line; one line always stays.
function lineLegend(chart, view = null) {
  const list = make("ul", { class: "legend" });
  for (const line of chart.lines) {
    const style = lineClass(line), dot = line.y.length === 1 || line.style === "dots";
    const shape = dot ? make("circle", { class: `point ${style}`, cx: 12, cy: 5, r: 4 }) : make("path", { class: `line ${style}`, d: "M1,5L23,5" });
    const item = legendItem(view ? "" : line.label, 24, 10, shape);
    if (view) item.append(button(line.label, (pressed) => {
      if (!view.hidden.delete(line.label)) view.hidden.add(line.label);
      if (chart.lines.every((each) => view.hidden.has(each.label))) view.hidden.delete(line.label);
      pressed.setAttribute("aria-pressed", !view.hidden.has(line.label));
      view.redraw();
    }, { "aria-pressed": !view.hidden.has(line.label) }));
    list.append(item);
  }
  return list;
}

function timelineLegend(chart) {
  const kinds = new Set(chart.rows.flatMap(([, spans]) => spans.map((span) => span[2])));
  return make("ul", { class: "legend" }, ...[...kinds].map((kind) => legendItem(kind, 16, 12, make("rect", { class: `span ${kind}`, width: 16, height: 12, rx: 2 }))));
}

// Lines -----------------------------------------------------------------------------------------------------------------

function xOf(line, axis) {
  const given = line.x[axis];
  if (given === undefined) return null;
  return Array.isArray(given) ? given : line.x.steps.map((step) => step * given.per_step);
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// The range of y, of the points from `begin` to `end` if there are any.
function rangeOf(chart, lines, log, begin, end) {
  const seen = (line, values) => values.filter((_, n) => line.xs[n] >= begin && line.xs[n] <= end);
  const inside = lines.flatMap((line) => [line.y, line.low, line.high].flatMap((values) => seen(line, values)));
  const values = inside.length ? inside : lines.flatMap((line) => line.y);
  let [low, high] = extent(values);
  if (log) {
    low = Math.min(...values.filter((value) => value > 0));
    return [low / 1.1, Math.max(high, low * 1.0001) * 1.1];
  }
  if (chart.from_zero) low = Math.min(0, low);
  const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  return [chart.from_zero && low === 0 ? 0 : low - pad, high + pad];
}

function pathOf(xs, ys, x, y) {
  let d = "";
  for (let n = 0; n < xs.length; n++) if (!y.log || ys[n] > 0) d += `${d ? "L" : "M"}${x(xs[n]).toFixed(1)},${y(ys[n]).toFixed(1)}`;
  return d;
}

let clips = 0;

// `view` has what a reader has chosen: {hidden: labels, log, zoom: {axis, low, high}, redraw}; null for charts without tools.
function drawLines(holder, chart, wanted, view = null) {
  const axis = chart.axes.includes(wanted) ? wanted : chart.axes[0], log = view?.log ?? chart.log;
  const lines = chart.lines.map((line) => ({ ...line, xs: xOf(line, axis) })).filter((line) => line.xs && !view?.hidden.has(line.label));
  const zoom = view?.zoom?.axis === axis ? view.zoom : null;
  const [firstX, lastX] = zoom ? [zoom.low, zoom.high] : extent(lines.flatMap((line) => line.xs));
  const { label, unit } = axisOf(axis, lastX);
  for (const line of lines) line.xs = line.xs.map((value) => value / unit);
  const from = chart.log_x || firstX < 0 || chart.ticks.length || zoom ? firstX : 0;
  const box = frame(holder, holder.closest("figure.wide") ? 340 : 250, { left: 58, right: 14, top: 24, bottom: 42 });
  let [begin, end] = [from / unit, lastX / unit];
  if (end <= begin) end = begin + (Math.abs(begin) || 1);
  const [low, high] = rangeOf(chart, lines, log, begin, end);
  const pad = zoom ? 0 : chart.log_x ? 0.08 : chart.ticks.length ? (end - begin) * 0.04 : 0;
  const x = scaleOf(chart.log_x ? begin / (1 + pad) : begin - pad, chart.log_x ? end * (1 + pad) : end + pad, box.left, box.right, chart.log_x);
  const y = scaleOf(low, high, box.bottom, box.top, log);
  drawAxes(box, x, y, { xName: label, yName: chart.y, ticks: chart.ticks.length ? chart.ticks : undefined });
  const { svg } = box, clip = `clip${clips++}`;
  svg.append(make("clipPath", { id: clip }, make("rect", { x: box.left - 5, y: box.top - 4, width: box.right - box.left + 10, height: box.bottom - box.top + 8 })));
  const plot = make("g", { "clip-path": `url(#${clip})` });
  svg.append(plot);
  if (low < 0 && high > 0) plot.append(make("line", { class: "axis", x1: box.left, x2: box.right, y1: y(0), y2: y(0) }));
  for (const [at, text] of chart.marks) {
    plot.append(make("line", { class: "mark", x1: x(at), x2: x(at), y1: box.top, y2: box.bottom }));
    const anchor = x(at) > (box.left + box.right) / 2 ? "end" : "start";
    plot.append(make("text", { class: "name", x: x(at) + (anchor === "end" ? -5 : 5), y: box.top + 10, "text-anchor": anchor }, text));
  }
  for (const line of lines) {
    const style = lineClass(line);
    if (line.low.length) {
      const back = [...line.xs.keys()].reverse();
      const band = pathOf(line.xs, line.high, x, y) + pathOf(back.map((n) => line.xs[n]), back.map((n) => line.low[n]), x, y).replace("M", "L");
      plot.append(make("path", { class: `band ${style}`, d: `${band}Z` }));
    }
    const dots = line.style === "dots";
    if (!dots) plot.append(make("path", { class: `line ${style}`, d: pathOf(line.xs, line.y, x, y), "data-label": line.label, "data-points": line.xs.length }));
    if (dots || line.marked || line.xs.length === 1) {
      line.xs.forEach((value, n) => plot.append(make("circle", { class: `point ${style}`, cx: x(value).toFixed(1), cy: y(line.y[n]).toFixed(1), r: dots ? 4.5 : 3, "data-x": value * unit, "data-y": line.y[n], "data-label": line.label })));
    }
  }
  svg.setAttribute("aria-label", `${chart.title} over ${label}: ${lines.map((line) => line.label).join(", ")}`);
  for (const [name, value] of Object.entries({ axis, x0: x.low, x1: x.high, y0: low, y1: high, left: box.left, right: box.right, top: box.top, bottom: box.bottom })) svg.dataset[name] = value;
  const move = follow(holder, svg, box, x, y, lines, label);
  if (view) zoomable(svg, box, x, move, (low, high) => {
    view.zoom = high > low ? { axis, low: low * unit, high: high * unit } : null;
    view.redraw();
  });
  return svg;
}

// Dragging over a chart, or + at the place of the arrow keys, shows that part alone; a double click, or 0, shows all of it.
function zoomable(svg, box, x, here, show) {
  const chosen = make("rect", { class: "zoom", y: box.top, height: box.bottom - box.top, visibility: "hidden" });
  const place = (event) => {
    const bounds = svg.getBoundingClientRect();
    return Math.max(box.left, Math.min(box.right, ((event.clientX - bounds.left) / bounds.width) * box.width));
  };
  let from = null;
  svg.append(chosen);
  svg.addEventListener("pointerdown", (event) => { from = event.button ? null : place(event); });
  svg.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = place(event);
    for (const [name, value] of Object.entries({ x: Math.min(from, to), width: Math.abs(to - from), visibility: "visible" })) chosen.setAttribute(name, value);
  });
  svg.addEventListener("pointerup", (event) => {
    const ends = from === null ? [0, 0] : [from, place(event)].sort((a, b) => a - b);
    from = null;
    chosen.setAttribute("visibility", "hidden");
    if (ends[1] - ends[0] > 8) show(x.invert(ends[0]), x.invert(ends[1]));
  });
  svg.addEventListener("dblclick", () => show(0, 0));
  svg.addEventListener("keydown", (event) => {
    const quarter = (box.right - box.left) / 4, middle = Math.max(box.left + quarter, Math.min(box.right - quarter, x(here())));
    if (event.key === "+") show(x.invert(middle - quarter), x.invert(middle + quarter));
    if (event.key === "0") show(0, 0);
  });
}

function nearest(values, target) {
  let best = 0;
  for (let n = 1; n < values.length; n++) if (Math.abs(values[n] - target) < Math.abs(values[best] - target)) best = n;
  return best;
}

function follow(holder, svg, box, x, y, lines, label) {
  // Values under the pointer, or at the place that arrow keys move.
  const guide = make("line", { class: "guide", y1: box.top, y2: box.bottom, visibility: "hidden" });
  svg.append(guide);
  svg.setAttribute("tabindex", "0");
  const longest = lines.reduce((a, b) => (b.xs.length > a.xs.length ? b : a));
  let at = longest.xs.length - 1;
  const show = () => {
    const place = longest.xs[at];
    guide.setAttribute("x1", x(place));
    guide.setAttribute("x2", x(place));
    guide.setAttribute("visibility", "visible");
    const rows = [[`${short(place, 6)} ${label}`, ""]];
    for (const line of lines) {
      const n = nearest(line.xs, place);
      if (Math.abs(x(line.xs[n]) - x(place)) > 24) continue;
      const band = line.low.length ? ` (${short(line.low[n], 5)} to ${short(line.high[n], 5)})` : "";
      rows.push([`${line.label}: ${short(line.y[n], 5)}${band}`, `c${line.colour % COLOURS}`]);
    }
    showTip(holder, x(place), box.top, rows.slice(0, 12));
  };
  const hide = () => {
    guide.setAttribute("visibility", "hidden");
    hideTip(holder);
  };
  svg.addEventListener("pointermove", (event) => {
    const bounds = svg.getBoundingClientRect();
    const target = ((event.clientX - bounds.left) / bounds.width) * box.width;
    at = nearest(longest.xs.map(x), target);
    show();
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: longest.xs.length - 1, PageUp: at - 20, PageDown: at + 20 };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    at = Math.max(0, Math.min(longest.xs.length - 1, moves[event.key]));
    show();
  });
  return () => longest.xs[at];
}

// Saves a chart as it is seen, with its legend, as an SVG file.
const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity", "font-size", "font-family", "visibility"];

function styled(svg) {
  const copy = svg.cloneNode(true), copies = [copy, ...copy.querySelectorAll("*")];
  [svg, ...svg.querySelectorAll("*")].forEach((element, n) => {
    for (const name of STYLES) copies[n].setAttribute(name, getComputedStyle(element).getPropertyValue(name));
  });
  return copy;
}

function svgText(holder) {
  const svg = styled(holder.querySelector(":scope > svg")), page = getComputedStyle(document.body);
  const items = [...(holder.closest("figure, [data-part]")?.querySelectorAll(".legend li:not(:has([aria-pressed=false]))") ?? [])];
  const room = (item) => 50 + textWidth(item.textContent), width = Math.max(Number(svg.getAttribute("width")), ...items.map(room));
  let height = Number(svg.getAttribute("height")), at = 8;
  for (const item of items) {
    const wide = room(item);
    if (at === 8 || at + wide > width) [at, height] = [8, height + 18];
    const shape = styled(item.querySelector("svg"));
    for (const [name, value] of Object.entries({ x: at, y: height - 14 })) shape.setAttribute(name, value);
    svg.append(shape, make("text", { x: at + 30, y: height - 4, fill: page.color, "font-size": "12px", "font-family": page.fontFamily }, item.textContent));
    at += wide;
  }
  svg.prepend(make("rect", { width: "100%", height: "100%", fill: page.backgroundColor }));
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) svg.setAttribute(name, value);
  return new XMLSerializer().serializeToString(svg);
}

function save(holder) {
  const svg = holder.querySelector(":scope > svg"), name = svg.getAttribute("aria-label").split(":")[0];
  const link = make("a", { download: `${name.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60)}.svg` });
  link.href = URL.createObjectURL(new Blob([svgText(holder)], { type: "image/svg+xml" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Bars, parts, points and time lines --------------------------------------------------------------------------------------

function drawBars(holder, chart) {
  const box = frame(holder, 250, { left: 58, right: 14, top: 24, bottom: 42 });
  const low = Math.min(...chart.bars.map((bar) => bar[0])), high = Math.max(...chart.bars.map((bar) => bar[1]));
  const from = Math.floor(low * 2) / 2, to = high - low < 0.5 ? from + 1 : Math.ceil(high * 2) / 2;
  const x = scaleOf(from, to, box.left, box.right), y = scaleOf(0, Math.max(...chart.bars.map((bar) => bar[2])) * 1.08, box.bottom, box.top);
  drawAxes(box, x, y, { xName: chart.x, yName: chart.y, yText: percent });
  const items = chart.bars.map(([begin, end, height], column) => {
    const wide = Math.max(3, x(end) - x(begin) - 1), left = Math.min(x(begin), box.right - wide);
    const element = make("rect", { class: "bar", x: left, y: y(height), width: wide, height: Math.max(0, box.bottom - y(height)), "data-low": begin, "data-high": end, "data-value": height });
    box.svg.append(element);
    return { row: 0, column, element, x: x(begin), y: y(height), tip: [`${short(begin)} to ${short(end)} ${chart.x}: ${percent(height)}`] };
  });
  explore(holder, box.svg, items);
  box.svg.setAttribute("aria-label", `${chart.title}: ${chart.bars.map(([a, b, c]) => `${short(a)} to ${short(b)} ${percent(c)}`).join(", ")}`);
  return box.svg;
}

function drawParts(holder, chart) {
  const total = chart.parts.reduce((sum, part) => sum + part[1], 0), most = Math.max(...chart.parts.map((part) => part[1]));
  const left = Math.min(150, Math.max(...chart.parts.map((part) => textWidth(part[0]))) + 12), right = 128;
  const box = frame(holder, 12 + 28 * chart.parts.length, { left, right, top: 6, bottom: 6 });
  chart.parts.forEach(([name, value, text], n) => {
    const y = box.top + 28 * n;
    box.svg.append(make("text", { class: "label", x: 0, y: y + 15 }, name));
    box.svg.append(make("rect", { class: "bar", x: left, y: y + 3, height: 16, width: Math.max(1, ((box.right - left) * value) / (most || 1)), "data-name": name, "data-value": value }));
    box.svg.append(make("text", { class: "label", x: left + ((box.right - left) * value) / (most || 1) + 6, y: y + 15 }, `${text}, ${percent(total ? value / total : 0)}`));
  });
  box.svg.setAttribute("aria-label", `${chart.title}: ${chart.parts.map((part) => `${part[0]} ${part[2]}`).join(", ")}`);
  return box.svg;
}

function drawTimeline(holder, chart) {
  const box = frame(holder, 52 + 44 * chart.rows.length, { left: 8, right: 14, top: 4, bottom: 42 });
  const end = Math.max(...chart.rows.flatMap((row) => row[1].map((span) => span[1])));
  const x = scaleOf(0, end, box.left, box.right), items = [];
  chart.rows.forEach(([name, spans], row) => {
    const y = box.top + 44 * row;
    box.svg.append(make("text", { class: "label", x: box.left, y: y + 12 }, name));
    box.svg.append(make("rect", { class: "idle", x: box.left, y: y + 17, width: box.right - box.left, height: 22 }));
    for (const [column, [from, to, kind, text]] of spans.entries()) {
      const wide = x(to) - x(from);
      const element = make("rect", { class: `span ${kind}`, x: x(from), y: y + 17, width: Math.max(1, wide - 1), height: 22, "data-begin": from, "data-end": to });
      box.svg.append(element);
      items.push({ row, column, element, x: x(to), y: y + 17, tip: [name, `${kind} of micro-batch ${text}: ${short(from)} to ${short(to)}`] });
      if (wide > 18) box.svg.append(make("text", { class: `inside ${kind}`, x: x(from) + wide / 2, y: y + 32, "text-anchor": "middle" }, text));
    }
  });
  const all = ticks(0, end, Math.max(2, Math.floor((box.right - box.left) / 70))), text = tickText(all);
  for (const at of all) box.svg.append(make("text", { class: "tick", x: x(at), y: box.bottom + 16, "text-anchor": at === 0 ? "start" : x(at) > box.right - 8 ? "end" : "middle" }, text(at)));
  box.svg.append(make("text", { class: "name", x: (box.left + box.right) / 2, y: box.height - 4, "text-anchor": "middle" }, chart.x));
  explore(holder, box.svg, items);
  box.svg.setAttribute("aria-label", `${chart.title}: ${chart.rows.length} stages`);
  return box.svg;
}

// Maps of layers ----------------------------------------------------------------------------------------------------------

function channels(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

function luminance(colour) {
  const [r, g, b] = channels(colour).map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function inkOn(colour) {
  return luminance(colour) > 0.179 ? "#000000" : "#ffffff";
}

function shade(part) {
  const stops = DATA.colours.sequence, at = Math.max(0, Math.min(1, part)) * (stops.length - 1), n = Math.min(stops.length - 2, Math.floor(at));
  const [a, b] = [channels(stops[n]), channels(stops[n + 1])];
  return `#${a.map((value, i) => Math.round(value + (b[i] - value) * (at - n)).toString(16).padStart(2, "0")).join("")}`;
}

// `look(layer)` returns {fill: [colours], value, text, tip, dot} or null; `choose(layer)` is called by a click or Enter.
function drawMap(holder, grid, look, { choose = null, chosen = -1, title = "", outlined = null } = {}) {
  const label = Math.min(110, Math.max(30, ...grid.rows.map(textWidth)) + 8);
  const room = Math.max(240, holder.clientWidth) - label - 4;
  const cell = Math.max(9, Math.min(46, Math.floor(room / grid.columns.length)));
  const high = Math.max(16, Math.min(26, cell)), width = label + cell * grid.columns.length + 4, height = 20 + high * grid.rows.length + 4;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": `${title}: a row per kind of layer, a column per block`, class: "map" });
  grid.rows.forEach((name, n) => svg.append(make("text", { class: "label", x: 0, y: 20 + high * (n + 0.5), dy: "0.35em" }, textWidth(name) > 104 ? `…${name.slice(-15)}` : name)));
  const skip = Math.ceil(22 / cell);
  grid.columns.forEach((name, n) => {
    if (n % skip === 0 || name === "") svg.append(make("text", { class: "tick", x: label + cell * (n + 0.5), y: 13, "text-anchor": "middle" }, name));
  });
  const items = [];
  grid.places.forEach(([row, column], layer) => {
    const seen = look(layer);
    if (!seen) return;
    const x = label + cell * column, y = 20 + high * row, gap = cell > 14 ? 1 : 0.5;
    const group = make("g", { class: `cell${layer === chosen ? " chosen" : ""}${outlined?.(layer) ? " new" : ""}`, "data-layer": layer, "data-value": seen.value, "data-text": seen.text });
    const whole = { x: x + gap, y: y + gap, width: cell - 2 * gap, height: high - 2 * gap };
    group.append(make("rect", { ...whole, fill: seen.fill[0] }));
    if (seen.fill[1]) group.append(make("path", { d: `M${x + cell - gap},${y + gap}V${y + high - gap}H${x + gap}Z`, fill: seen.fill[1] }));
    const ink = inkOn(seen.fill[0]), written = seen.text && textWidth(seen.text) < cell - 7;
    if (written) group.append(make("text", { class: "inside", x: x + cell / 2, y: y + high / 2, dy: "0.35em", "text-anchor": "middle", fill: ink }, seen.text));
    if (seen.dot) group.append(make("circle", { cx: written ? x + cell - gap - 4 : x + cell / 2, cy: written ? y + gap + 4 : y + high / 2, r: 2, fill: ink }));
    group.append(make("rect", { ...whole, class: "edge" }));
    svg.append(group);
    items.push({ layer, row, column, element: group, x: x + cell, y: y + 8, tip: seen.tip });
  });
  explore(holder, svg, items, { choose: choose && ((item) => choose(item.layer)), first: Math.max(0, items.findIndex((item) => item.layer === chosen)) });
  return svg;
}

function colourBar(low, high, text) {
  const width = 180, svg = make("svg", { width: width + 4, height: 14, "aria-hidden": "true" });
  for (let n = 0; n < 36; n++) svg.append(make("rect", { x: (n * width) / 36, y: 2, width: width / 36 + 0.5, height: 10, fill: shade(n / 35) }));
  return make("div", { class: "scale" }, make("span", {}, text(low)), svg, make("span", {}, text(high)));
}
