// The two charts, on uPlot.

import { clock, seconds } from "./units.js";

const FEWEST = 4; // of what is counted in a second, at the top of the scale

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axis(more) {
  const line = color("--line");
  return {
    stroke: color("--soft"),
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    grid: { stroke: line, width: 1 },
    ticks: { stroke: line, width: 1, size: 4 },
    ...more,
  };
}

// A chart that fills its element, and is drawn again in other colours if the theme changes.
class Chart {
  constructor(element, options) {
    this.element = element;
    this.options = options;
    this.data = null;
    new ResizeObserver(() => this.plot?.setSize(this.#size())).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.plot?.destroy();
      this.plot = null;
      if (this.data) this.show(this.data);
    });
  }

  show(data) {
    this.data = data;
    if (this.plot) this.plot.setData(data);
    else this.plot = new uPlot({ ...this.#size(), legend: { show: false }, ...this.options() }, data, this.element);
  }

  #size() {
    return { width: this.element.clientWidth, height: this.element.clientHeight };
  }
}

const compact = new Intl.NumberFormat("en", { notation: "compact" });

// Rates by kind, stacked: each series is drawn over the one that it is a part of.
// onPoint gets a point's time and its values, or null.
export function barsChart(element, kinds, label, onPoint) {
  let rates = null;
  const chart = new Chart(element, () => ({
    scales: { x: { range: (_, first, last) => [first - 1, last + 1] }, y: { range: (_, __, most) => [0, Math.max(FEWEST, 1.08 * most)] } },
    axes: [
      axis({ size: 28, space: 90, values: (_, times, __, ___, step) => times.map((t) => clock(t).slice(0, step < 60 ? 8 : 5)), incrs: [10, 30, 60] }),
      axis({ size: 54, values: (_, values) => values.map((v) => compact.format(v)), label, labelSize: 18 }),
    ],
    cursor: { y: false, points: { show: false }, drag: { setScale: false, x: false } },
    hooks: { setCursor: [({ cursor: { idx } }) => onPoint(idx === null || idx === undefined ? null : { time: rates[0][idx], values: rates.slice(1).map((x) => x[idx]) })] },
    series: [{}, ...kinds.toReversed().map((kind) => ({
      fill: color(kind.color),
      width: 0,
      points: { show: false },
      paths: uPlot.paths.bars({ size: [0.86, 40] }),
    }))],
  }));
  return (series) => {
    rates = series;
    const stacked = [];
    for (const values of series.slice(1)) {
      const below = stacked.at(-1);
      stacked.push(values.map((v, i) => v + (below ? below[i] : 0)));
    }
    chart.show([series[0], ...stacked.toReversed()]);
  };
}

// Predicted against observed seconds by choice, both logarithmic; on the line they are equal.
export function timesChart(element, choices) {
  let range = [0.001, 1];
  const scale = () => ({ time: false, distr: 3, range: () => range });
  const powers = (_, values) => values.map((v) => (Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9 ? v : null));
  const log = (more) => {
    const made = axis({ values: (_, values) => values.map((v) => (v === null ? "" : seconds(v).replace(/\.0+ /, " "))), filter: powers, ...more });
    return { ...made, grid: { ...made.grid, filter: powers }, ticks: { ...made.ticks, filter: powers } };
  };
  const chart = new Chart(element, () => ({
    mode: 2,
    scales: { x: scale(), y: scale() },
    axes: [
      log({ size: 26, label: "predicted", labelSize: 18 }),
      log({ size: 54, label: "observed", labelSize: 18 }),
    ],
    cursor: { show: false },
    hooks: { drawAxes: [drawEquality] },
    series: [null, ...choices.map((choice) => ({ fill: color(choice.color), paths: drawDots(choice.color) }))],
  }));
  return (points) => {
    const values = points.flat(2);
    const power = (f, v) => 10 ** f(Math.log10(v));
    range = values.length ? [power(Math.floor, Math.min(...values)), power(Math.ceil, 1.001 * Math.max(...values))] : [0.001, 1];
    chart.show([null, ...points]);
  };
}

function drawEquality(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = color("--soft");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([5 * devicePixelRatio, 5 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, bbox.top + bbox.height);
  ctx.lineTo(bbox.left + bbox.width, bbox.top);
  ctx.stroke();
  ctx.restore();
}

const drawDots = (name) => (plot, series) => {
  const { ctx } = plot, radius = 4 * devicePixelRatio;
  uPlot.orient(plot, series, (_, xs, ys, scaleX, scaleY, toX, toY, left, top, width, height) => {
    ctx.save();
    ctx.fillStyle = color(name);
    ctx.globalAlpha = 0.8;
    plot.data[series][0].forEach((x, i) => {
      ctx.beginPath();
      ctx.arc(toX(x, scaleX, width, left), toY(plot.data[series][1][i], scaleY, height, top), radius, 0, 2 * Math.PI);
      ctx.fill();
    });
    ctx.restore();
  });
  return null;
};
