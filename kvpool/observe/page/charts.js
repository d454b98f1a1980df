// Charts by Chart.js, if it is there, and the same numbers as a table under each of them.

import { at, element, fill, setText } from "./dom.js";
import { bytes, clock, percent } from "./format.js";

const ROWS_MAX = 30;
const drawn = new Map(); // figure's id -> Chart

export const hasCharts = () => typeof window.Chart === "function";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The parts of a figure, once. The legend is text, for a picture tells nothing to who cannot see it.
function parts(id, title) {
  const figure = at(id);
  if (!figure.firstChild) {
    const legend = element("span", { class: "legend" });
    figure.append(
      element("figcaption", {}, element("h3", {}, title), legend),
      element("div", { class: "canvas" }, element("canvas", { role: "img" })),
      element("details", {}, element("summary", {}, "As a table"), element("table")));
    figure.querySelector(".canvas").hidden = !hasCharts();
    figure.querySelector("details").open = !hasCharts();
  }
  return {
    canvas: figure.querySelector("canvas"),
    legend: figure.querySelector(".legend"),
    table: figure.querySelector("table"),
    details: figure.querySelector("details"),
  };
}

function showLegend(legend, series) {
  series.forEach(({ name, tone, last }, index) => {
    if (!legend.children[index]) {
      legend.append(element("span", { class: `key ${tone}` }, element("i"), element("span")));
    }
    setText(legend.children[index].lastChild, last === undefined ? name : `${name} ${last}`);
  });
}

function axis(extra = {}, ticks = {}) {
  return {
    border: { display: false },
    grid: { color: color("--line"), drawTicks: false },
    ...extra,
    ticks: { color: color("--quiet"), font: { size: 11 }, padding: 6, maxRotation: 0, ...ticks },
  };
}

function dataset(label, tone, data, extra = {}) {
  return {
    label,
    data,
    borderColor: color(`--${tone}`),
    backgroundColor: color(`--${tone}-soft`),
    borderDash: tone === "two" ? [5, 3] : [],
    borderWidth: 1.75,
    pointRadius: 0,
    pointHitRadius: 8,
    fill: tone === "one",
    ...extra,
  };
}

function options(scales, say) {
  return {
    animation: false,
    responsive: true,
    maintainAspectRatio: false,
    interaction: { mode: "index", intersect: false },
    events: ["mousemove", "mouseout", "touchstart", "touchmove"],
    plugins: {
      legend: { display: false },
      tooltip: {
        displayColors: false,
        callbacks: { label: (item) => `${item.dataset.label} ${say(item.parsed.y)}` },
      },
    },
    scales,
  };
}

function draw(id, canvas, config) {
  if (!hasCharts()) return;
  const chart = drawn.get(id);
  if (chart && chart.data.datasets.length === config.data.datasets.length) {
    chart.data.datasets.forEach((each, index) => Object.assign(each, config.data.datasets[index]));
    chart.options = config.options;
    chart.update("none");
    return;
  }
  chart?.destroy();
  drawn.set(id, new window.Chart(canvas, config));
}

// Scales of y, by the largest value. Bytes get steps that are round where a KiB is 1024.
export const inShares = () => ({ min: 0, max: 1, step: 0.5 });
export const inNumbers = (largest) => ({ min: 0, suggestedMax: Math.max(1, largest) });
export function inBytes(largest) {
  const most = Math.max(1 << 20, largest);
  const step = 2 ** Math.ceil(Math.log2(most / 4));
  return { min: 0, max: step * Math.ceil(most / step), step };
}

// One figure of lines over time. series: [{name, field, tone}]; say: value -> text.
export function timeChart(id, title, history, series, say, scale) {
  const { canvas, legend, table, details } = parts(id, title);
  const named = series.map((each) => ({ ...each, last: say(history[each.field].at(-1)) }));
  showLegend(legend, named);
  const known = history[series[0].field].filter((value) => value !== null);
  const range = known.length
    ? `from ${say(Math.min(...known))} to ${say(Math.max(...known))}` : "nothing yet";
  canvas.setAttribute("aria-label",
    `${title} over time. ${named.map(({ name, last }) => `${name} now ${last}`).join(", ")}. ` +
    `${series[0].name} ${range}. The numbers are in the table below.`);
  const data = series.map(({ name, field, tone }) => dataset(name, tone,
    history.times.map((time, index) => ({ x: 1000 * time, y: history[field][index] }))));
  const span_s = history.step_s * { 1: 300, 10: 360, 60: 1440 }[history.step_s];
  const x = axis({ type: "time", min: 1000 * (history.now_s - span_s), max: 1000 * history.now_s,
    grid: { display: false }, time: { displayFormats: { second: "HH:mm:ss", minute: "HH:mm", hour: "HH:mm" },
      tooltipFormat: "HH:mm:ss" } }, { autoSkipPadding: 40 });
  const { step, ...limits } = scale(Math.max(0, ...series.flatMap(({ field }) => history[field])));
  const y = axis(limits, { callback: (value) => say(value), maxTicksLimit: 5, stepSize: step });
  draw(id, canvas, { type: "line", data: { datasets: data }, options: options({ x, y }, say) });
  if (details.open) timeTable(table, history, series, say);
  else details.ontoggle = () => details.open && timeTable(table, history, series, say);
}

function timeTable(table, history, series, say) {
  const every = Math.max(1, Math.ceil(history.times.length / ROWS_MAX));
  const rows = history.times.map((time, index) => ({ time, index })).reverse()
    .filter((_, position) => position % every === 0);
  fill(table, [
    { title: "Time", kind: "name", of: ({ time }) => clock(time, history.step_s < 60) },
    ...series.map(({ name, field }) => (
      { title: name, kind: "number", of: ({ index }) => say(history[field][index]) })),
  ], rows, "Nothing yet: the first point comes in a moment.");
}

// The hit ratio by bytes of DRAM, and where the pool is now.
export function curveChart(id, curve) {
  const { canvas, legend, table, details } = parts(id, "Hit ratio by size of DRAM");
  const points = (curve?.points ?? []).filter(([size]) => size > 0);
  const here = curve?.now_hit ?? null;
  showLegend(legend, [
    { name: "estimated hit ratio", tone: "one" },
    { name: "you are here", tone: "here" },
  ]);
  canvas.setAttribute("aria-label", points.length && here !== null
    ? `You are here: ${bytes(curve.now_bytes)}, ${percent(here)} hits. At ${bytes(points.at(-1)[0])} ` +
      `it would be ${percent(points.at(-1)[1])}. The numbers are in the table below.`
    : "No curve yet.");
  const line = points.map(([size, hit]) => ({ x: size, y: hit }));
  const spot = points.length && here !== null ? [{ x: curve.now_bytes, y: here }] : [];
  const x = axis({ type: "logarithmic", grid: { display: false }, afterBuildTicks: powersOfTwo },
    { callback: (value) => bytes(value), autoSkip: true, autoSkipPadding: 16 });
  const y = axis({ min: 0, max: 1 }, { callback: (value) => percent(value), maxTicksLimit: 5 });
  const shown = options({ x, y }, percent);
  shown.plugins.tooltip.callbacks.title = (items) => bytes(items[0].parsed.x);
  draw(id, canvas, {
    type: "line",
    data: { datasets: [
      dataset("you are here at", "here", spot,
        { pointRadius: 7, pointBackgroundColor: color("--here"), pointBorderColor: color("--page"),
          pointBorderWidth: 2 }),
      dataset("hit ratio", "one", line, { fill: true }),
    ] },
    options: shown,
  });
  const every = Math.max(1, Math.ceil(points.length / ROWS_MAX));
  const write = () => fill(table, [
    { title: "DRAM", kind: "name", of: ([size]) => bytes(size) },
    { title: "Hit ratio", kind: "number", of: ([, hit]) => percent(hit) },
  ], points.filter((_, index) => index % every === 0), "Nothing yet.");
  if (details.open) write();
  details.ontoggle = () => details.open && write();
}

function powersOfTwo(scale) {
  const first = Math.ceil(Math.log2(Math.max(1, scale.min)));
  const last = Math.floor(Math.log2(Math.max(1, scale.max)));
  const ticks = [];
  for (let power = first; power <= last; power += 1) ticks.push({ value: 2 ** power });
  scale.ticks = ticks;
}
