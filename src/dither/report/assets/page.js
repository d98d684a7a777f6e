// The page: draws its charts and maps, and answers the switch, sliders and choices.

let DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = DATA.colours.lines;
const OPERANDS = { input: "input", weight: "weight", grad: "gradient" };
let axis = "steps";

const DRAW = {
  lines: (holder, chart, view) => drawLines(holder, chart, axis, view),
  bars: drawBars,
  parts: drawParts,
  timeline: drawTimeline,
};

function keepFocus(holder, draw) {
  const focused = holder.contains(document.activeElement) && document.activeElement.matches("svg");
  draw();
  if (focused) holder.querySelector("svg[tabindex]")?.focus({ preventScroll: true });
}

function place(holder, svg) {
  hideTip(holder);
  holder.querySelectorAll(":scope > svg").forEach((old) => old.remove());
  holder.prepend(svg);
}

function sentence(text) {
  return `${text.slice(0, 1).toUpperCase()}${text.slice(1)}`;
}

// A share for a cell of a map: two digits, so that neighbours are equally wide.
function briefly(share) {
  if (!share) return "";
  return share < 0.001 ? "<0.1%" : `${trim(100 * share, 2)}%`;
}

function visible(element) {
  return element.clientWidth > 0;
}

function drawChart(figure) {
  const chart = DATA.charts[figure.dataset.chart], holder = figure.querySelector(".plot");
  if (!visible(holder)) return;
  const view = chart.kind === "lines" ? viewOf(figure) : null;
  keepFocus(holder, () => place(holder, DRAW[chart.kind](holder, chart, view)));
  const tools = figure.querySelector(".tools") ?? toolsOf(figure, chart, view);
  tools.querySelector(".whole")?.toggleAttribute("hidden", !view.zoom);
}

// What a reader has chosen in a chart; the live page keeps it.
const views = new Map();

function viewOf(figure) {
  const id = figure.dataset.chart;
  if (!views.has(id)) views.set(id, { hidden: new Set(), log: null, zoom: null });
  return Object.assign(views.get(id), { redraw: () => drawChart(figure) });
}

function toolsOf(figure, chart, view) {
  const holder = figure.querySelector(".plot"), tools = make("div", { class: "tools" });
  if (view) {
    tools.append(button("Whole range", () => { view.zoom = null; view.redraw(); }, { class: "whole", hidden: "" }));
    const positive = chart.lines.every((line) => line.y.every((value) => value > 0));
    if (positive) tools.append(button("Log", (pressed) => {
      view.log = !(view.log ?? chart.log);
      pressed.setAttribute("aria-pressed", view.log);
      view.redraw();
    }, { "aria-pressed": view.log ?? chart.log, title: "Logarithmic y axis" }));
  }
  tools.append(button("SVG", () => save(holder), { title: "Save this chart as a file" }));
  figure.prepend(tools);
  if (chart.kind === "lines" && chart.lines.length > 1) holder.before(lineLegend(chart, view));
  if (chart.kind === "timeline") holder.before(timelineLegend(chart));
  return tools;
}

function drawCharts() {
  document.querySelectorAll("figure[data-chart]").forEach(drawChart);
}

// Controls ----------------------------------------------------------------------------------------------------------------

function fill(select, names, chosen) {
  names.forEach((name, n) => {
    const option = make("option", { value: n }, name);
    option.selected = n === chosen;
    select.append(option);
  });
}

const redraws = [], parts = [];
let bound = new AbortController();

function part(name, begin) {
  parts.push([name, begin]);
}

// Gives the controls their actions; the live page does so again when its contents are new.
function bind() {
  bound.abort();
  bound = new AbortController();
  redraws.length = 0;
  document.querySelectorAll("input[name=axis]").forEach((input) => {
    input.addEventListener("change", () => {
      axis = input.value;
      for (const view of views.values()) view.zoom = null;
      drawCharts();
    });
  });
  document.querySelectorAll("details").forEach((details) => {
    details.addEventListener("toggle", () => details.open && drawAll());  // what was hidden had no width to draw in
  });
  document.querySelectorAll("[data-part] .plot").forEach((holder) => {
    holder.before(button("SVG", () => save(holder), { class: "save", title: "Save this map or chart as a file" }));
  });
  for (const [name, begin] of parts) {
    document.querySelectorAll(`[data-part=${name}]`).forEach((section) => {
      const run = DATA.runs[Number(section.dataset.run)], find = (which) => section.querySelector(`[data-of=${which}]`);
      const draw = begin(run, find, section);
      redraws.push(() => visible(section) && draw());
    });
  }
}

// Plans: input, weight and gradient at the step of the slider ---------------------------------------------------------------

part("plans", (run, find) => {
  const { entries, states } = run.plans, slider = find("slider");
  const used = new Map();
  for (const state of states) for (const cells of Object.values(state.cells)) for (const at of cells) for (const [n, name] of entries[at].formats.entries()) used.set(name, entries[at].colours[n]);
  const add = (text, shape) => find("legend").append(legendItem(text, 16, 12, shape));
  for (const [name, colour] of used) add(name, make("rect", { width: 16, height: 12, rx: 2, fill: colour }));
  if (entries.some((entry) => entry.sampled)) add("sampled: noise in place of rounding", make("circle", { class: "ink", cx: 8, cy: 6, r: 2.5 }));
  if (states.length > 1) add("changed at this step", make("rect", { class: "newkey", x: 1, y: 1, width: 14, height: 10 }));
  const draw = () => {
    const at = Number(slider.value), state = states[at], before = states[at - 1];
    const until = states[at + 1] ? `steps ${state.step.toLocaleString("en")} to ${states[at + 1].step.toLocaleString("en")}` : `from step ${state.step.toLocaleString("en")} on, in force`;
    find("now").textContent = `Plan ${at + 1} of ${states.length}: ${until}. ${sentence(state.reason)}`;
    slider.setAttribute("aria-valuetext", `step ${state.step}`);
    for (const [operand, name] of Object.entries(OPERANDS)) {
      const holder = find(operand), cells = state.cells[operand];
      keepFocus(holder, () => place(holder, drawMap(holder, run.grid, (layer) => {
        const entry = entries[cells[layer]];
        return { fill: entry.colours, value: entry.formats.join("|"), text: entry.text, dot: entry.sampled, tip: [`${run.grid.names[layer]}, ${name}`, entry.about || entry.text] };
      }, { title: `Precision of the ${name}`, outlined: (layer) => before && before.cells[operand][layer] !== cells[layer] })));
    }
  };
  slider.addEventListener("input", () => {
    draw();
    document.dispatchEvent(new CustomEvent("plan", { detail: { run, at: Number(slider.value) } }));
  });
  return draw;
});

// Sensitivity: the estimates on which the plan of the slider is based ---------------------------------------------------------

part("sensitivity", (run, find) => {
  let at = run.sensitivities.length - 1, older = false;
  const all = run.sensitivities, measure = find("measure"), option = find("option");
  const widest = all[at].options.length - 1;
  fill(option, all[at].options, widest);
  const draw = () => {
    const seen = all[at], column = Number(option.value), table = seen[measure.value];
    const values = table.map((row) => (row.length ? row[column] : null)), positive = all.flatMap((each) => each[measure.value].flat()).filter((value) => value > 0);
    const [low, high] = positive.length ? extent(positive) : [1, 1];  // of all estimates and options: one scale
    const span = Math.log10(high / low) || 1, holder = find("map");
    find("now").textContent = `Estimated at step ${seen.measured.toLocaleString("en")} with the probe ${seen.probe}: ${measure.selectedOptions[0].textContent}, if cast to ${seen.options[column]}. Colours are logarithmic, on one scale for all steps and options.${older ? " The page has no estimates of the plan that the slider shows." : ""}`;
    keepFocus(holder, () => place(holder, drawMap(holder, run.grid, (layer) => {
      if (values[layer] === null) return null;
      const share = values[layer] > 0 ? Math.log10(values[layer] / low) / span : 0;
      const chosen = seen.chosen[layer] < 0 ? "none of the options" : seen.options[seen.chosen[layer]];
      return { fill: [shade(high > low ? share : 0.5)], value: values[layer], text: "", tip: [run.grid.names[layer], `${measure.selectedOptions[0].textContent} in ${seen.options[column]}: ${short(values[layer], 4)}`, `chosen: ${chosen}`] };
    }, { title: "Sensitivity" })));
    find("scale").replaceChildren(colourBar(low, high, (value) => short(value, 2)));
  };
  measure.addEventListener("change", draw);
  option.addEventListener("change", draw);
  document.addEventListener("plan", (event) => {
    if (event.detail.run !== run) return;
    const found = all.findLastIndex((each) => each.state <= event.detail.at);
    at = Math.max(0, found);
    older = found < 0;
    draw();
  }, { signal: bound.signal });
  return draw;
});

// Bitwidths -------------------------------------------------------------------------------------------------------------------

part("bitwidths", (run, find) => {
  const view = run.bitwidths, [low, high] = view.scale, slider = find("slider"), layers = find("layer");
  const colour = (value) => shade((Math.round(value * 100) / 100 - low) / (high - low));
  fill(layers, view.grid.names, 0);
  const last = view.steps.length - 1;
  const drawMeans = () => {
    const at = Number(slider.value), holder = find("map");
    find("now").textContent = `Mean bitwidth of each layer at step ${view.steps[at].toLocaleString("en")}.`;
    slider.setAttribute("aria-valuetext", `step ${view.steps[at]}`);
    keepFocus(holder, () => place(holder, drawMap(holder, view.grid, (layer) => {
      const mean = view.means[at][layer];
      if (mean === null) return null;
      return { fill: [colour(mean)], value: mean, text: mean.toFixed(2), tip: [view.grid.names[layer], `mean ${mean.toFixed(3)} ± ${view.deviations[at][layer].toFixed(3)}, from ${view.lows[at][layer].toFixed(3)} to ${view.highs[at][layer].toFixed(3)} bits`] };
    }, { title: "Mean bitwidths", chosen: Number(layers.value), choose })));
  };
  const drawLayer = () => {
    const layer = Number(layers.value), there = view.steps.map((_, n) => n).filter((n) => view.means[n][layer] !== null);
    const of = (table) => there.map((n) => table[n][layer]), around = (sign) => there.map((n) => view.means[n][layer] + sign * view.deviations[n][layer]);
    const x = { steps: there.map((n) => view.steps[n]) }, base = { x, colour: 0, low: [], high: [], marked: false };
    const lines = [
      { ...base, label: "mean ± deviation", y: of(view.means), style: "strong", low: around(-1), high: around(1), marked: there.length <= 40 },
      { ...base, label: "largest", y: of(view.highs), style: "plain", colour: 1 },
      { ...base, label: "smallest", y: of(view.lows), style: "dashed", colour: 2 },
    ];
    const chart = { title: `Bitwidths of ${view.grid.names[layer]}`, y: "bits", axes: ["steps"], lines, log: false, from_zero: false, log_x: false, ticks: [], marks: [] };
    const holder = find("history");
    place(holder, drawLines(holder, chart, "steps"));
    find("history-legend").replaceChildren(lineLegend(chart));
    drawBlocks(layer);
  };
  const drawBlocks = (layer) => {
    const rows = view.blocks[layer], holder = find("blocks");
    if (!holder || !rows) return;
    holder.querySelectorAll(":scope > svg").forEach((old) => old.remove());
    const [tall, wide] = view.shapes[layer];
    if (!rows.length) {
      find("about-blocks").textContent = "The blocks of this layer are not recorded.";
      return;
    }
    const columns = rows[0].length, pooled = tall > rows.length || wide > columns;
    find("about-blocks").textContent = `${view.grid.names[layer]}: ${tall} × ${wide} blocks at step ${view.block_step.toLocaleString("en")}${pooled ? `, each cell the mean of about ${Math.round((tall * wide) / rows.length / columns)}` : ""}. Rows are outputs, columns are inputs.`;
    const cell = Math.max(6, Math.min(26, Math.floor((holder.clientWidth - 4) / columns)));
    const svg = make("svg", { viewBox: `0 0 ${cell * columns + 2} ${cell * rows.length + 2}`, width: cell * columns + 2, height: cell * rows.length + 2, role: "group", "aria-label": `Bitwidths of the blocks of ${view.grid.names[layer]}` });
    const items = rows.flatMap((values, row) => values.map((hundredths, column) => {
      const value = hundredths / 100;
      const element = make("rect", { class: "block", x: 1 + cell * column, y: 1 + cell * row, width: cell - 0.5, height: cell - 0.5, fill: colour(value), "data-row": row, "data-column": column, "data-value": value });
      svg.append(element);
      return { row, column, element, x: cell * (column + 1), y: cell * row, tip: [`row ${row}, column ${column}: ${value.toFixed(2)} bits`] };
    }));
    explore(holder, svg, items);
    place(holder, svg);
  };
  function choose(layer) {
    layers.value = layer;
    drawMeans();
    drawLayer();
  }
  slider.addEventListener("input", drawMeans);
  layers.addEventListener("change", () => choose(Number(layers.value)));
  find("scale").replaceChildren(colourBar(low, high, (value) => `${value} bits`));
  slider.value = last;
  return () => {
    drawMeans();
    drawLayer();
  };
});

// Numerics --------------------------------------------------------------------------------------------------------------------

part("numerics", (run, find) => {
  const view = run.numerics, share = find("share"), layers = find("layer"), slider = find("slider");
  fill(layers, view.grid.names, 0);
  const drawShares = () => {
    const at = Number(slider.value), name = share.selectedOptions[0].textContent;
    const stretch = view.every > 1 ? `, the largest of ${view.every} samples` : "";
    find("now").textContent = `${sentence(name)} at step ${view.steps[at].toLocaleString("en")}${stretch}. Colours from 0 to 100 %, by the square root.`;
    slider.setAttribute("aria-valuetext", `step ${view.steps[at]}`);
    for (const [operand, words] of Object.entries(OPERANDS)) {
      const holder = find(operand), values = view.shares[share.value][operand][at];
      keepFocus(holder, () => place(holder, drawMap(holder, view.grid, (layer) => {
        const value = values[layer];
        if (value === null) return null;
        const amax = view.amax[operand][at][layer];
        return { fill: [shade(Math.sqrt(value))], value, text: briefly(value), tip: [`${view.grid.names[layer]}, ${words}`, `${name}: ${percent(value)}`, `amax ${amax === null ? "not known" : short(amax)}, ${view.casts[operand][layer]}`] };
      }, { title: `${name}, ${words}`, chosen: Number(layers.value), choose })));
    }
  };
  const drawLayer = () => {
    const layer = Number(layers.value);
    const lineOf = (table, label, colour, style, low, high) => {
      const there = view.steps.map((_, n) => n).filter((n) => table[n][layer] !== null && table[n][layer] > 0);
      const pick = (other) => (other ? there.map((n) => other[n][layer]) : []);
      return { label, x: { steps: there.map((n) => view.steps[n]) }, y: there.map((n) => table[n][layer]), colour, style, low: pick(low), high: pick(high), marked: there.length <= 40 };
    };
    const base = { axes: ["steps"], log: true, from_zero: false, log_x: false, ticks: [], marks: [] };
    const operands = Object.entries(OPERANDS);
    const charts = {
      amax: { ...base, title: `Largest magnitudes of ${view.grid.names[layer]}`, y: "amax", lines: operands.map(([key, name], n) => lineOf(view.amax[key], name, n, "plain")) },
      scales: { ...base, title: `Scales of ${view.grid.names[layer]}`, y: "scale", lines: operands.map(([key, name], n) => lineOf(view.scales[key].median, name, n, "plain", view.scales[key].low, view.scales[key].high)) },
    };
    for (const [name, chart] of Object.entries(charts)) {
      chart.lines = chart.lines.filter((line) => line.y.length && line.low.every((value) => value > 0));
      const holder = find(name);
      holder.querySelectorAll(":scope > svg").forEach((old) => old.remove());
      find(`${name}-legend`).replaceChildren(chart.lines.length ? lineLegend(chart) : "Not measured for this layer.");
      if (chart.lines.length) place(holder, drawLines(holder, chart, "steps"));
    }
  };
  function choose(layer) {
    layers.value = layer;
    drawShares();
    drawLayer();
  }
  share.addEventListener("change", drawShares);
  slider.addEventListener("input", drawShares);
  layers.addEventListener("change", () => choose(Number(layers.value)));
  slider.value = view.steps.length - 1;
  find("scale").replaceChildren(colourBar(0, 1, percent));
  return () => {
    drawShares();
    drawLayer();
  };
});

// All of it, again when the width changes or a section opens -----------------------------------------------------------------------

function drawAll() {
  drawCharts();
  redraws.forEach((draw) => draw());
}

let width = document.documentElement.clientWidth, waiting = false;
window.addEventListener("resize", () => {
  if (document.documentElement.clientWidth === width || waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    width = document.documentElement.clientWidth;
    drawAll();
  });
});
window.addEventListener("beforeprint", () => {
  document.querySelectorAll("details.print").forEach((details) => { details.open = true; });
  drawAll();
});
bind();
drawAll();
document.documentElement.dataset.ready = "true";
