// Charts over steps or time, drawn by uPlot.

import { number } from "../format.js";
import { styleOf } from "../theme.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import uPlot from "../vendor/uPlot.js";
import { Empty } from "./basics.js";

/** The custom properties of style.css with the colours of series, in order. */
export const COLOURS = [
  "--series-1",
  "--series-2",
  "--series-3",
  "--series-4",
  "--series-5",
  "--series-6",
  "--series-7",
  "--series-8",
];

/**
 * A chart of lines, or of stacked areas.
 *
 * `series`: `{label, values, low, high, colour, dashed}`, each with a value or null at every of `xs`; `low` and `high` shade a band.
 * `marks`: `{x, text, colour}` are dotted vertical lines. `sync`: charts with the same name share their cursor. `onZoom(first, last)` is called
 * when a range is selected, and with nulls for a double click. `time`: `xs` are Unix seconds.
 */
export function Chart({
  xs,
  series,
  height = 200,
  log = false,
  stacked = false,
  marks = [],
  sync,
  onZoom,
  time = false,
  label,
  range,
}) {
  const place = useRef(null);
  const [themed, setThemed] = useState(0);
  const hasValues = series.some(({ values }) => values.some(Number.isFinite));
  useEffect(() => {
    const changed = () => setThemed((before) => before + 1);
    addEventListener("theme", changed);
    return () => removeEventListener("theme", changed);
  }, []);
  useEffect(() => {
    if (!hasValues) return undefined;
    const shown = stacked ? stack(series) : series;
    const plot = new uPlot(
      options({ shown, height, log, stacked, marks, sync, onZoom, time, range, place }),
      columns(xs, shown),
      place.current,
    );
    const resize = new ResizeObserver(() => plot.setSize({ width: place.current.clientWidth, height }));
    resize.observe(place.current);
    return () => {
      resize.disconnect();
      plot.destroy();
    };
  }, [xs, series, height, log, stacked, marks, sync, time, range, themed, hasValues]);
  if (!hasValues)
    return html`<${Empty}>${label ?? "This chart"} has no values${series.length ? " in this range" : ""}.<//>`;
  return html`<div class="chart" role="img" aria-label=${label} ref=${place}></div>`;
}

/** The series as sums of themselves and those before, so that filled areas lie on one another; the last is drawn first. */
function stack(series) {
  const sums = [];
  for (const each of series) {
    const below = sums.at(-1)?.values;
    sums.push({ ...each, own: each.values, values: each.values.map((value, i) => (value ?? 0) + (below?.[i] ?? 0)) });
  }
  return sums.reverse();
}

const columns = (xs, shown) => [
  xs,
  ...shown.flatMap(({ values, low, high }) => (low && high ? [values, low, high] : [values])),
];

function options({ shown, height, log, stacked, marks, sync, onZoom, time, range, place }) {
  const axis = {
    stroke: styleOf("--faint"),
    grid: { stroke: styleOf("--grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui",
  };
  const bands = [];
  const drawn = [{}];
  shown.forEach((each, i) => {
    const colour = styleOf(each.colour ?? COLOURS[i % COLOURS.length]);
    drawn.push({
      label: each.label,
      stroke: colour,
      width: 1.5,
      dash: each.dashed ? [4, 3] : undefined,
      fill: stacked ? `color-mix(in srgb, ${colour} 70%, ${styleOf("--surface")})` : undefined,
      points: { show: each.values.filter(Number.isFinite).length < 2 ? true : undefined, size: 5 },
      spanGaps: true,
      value: (_, value, __, at) => number(at === null ? null : stacked ? each.own[at] : value, 4),
    });
    if (each.low && each.high) {
      const at = drawn.length;
      const edge = { stroke: "transparent", points: { show: false }, label: `${each.label} (range)`, class: "hidden" };
      drawn.push({ ...edge }, { ...edge });
      bands.push({ series: [at + 1, at], fill: `color-mix(in srgb, ${colour} 18%, transparent)` });
    }
  });
  return {
    width: place.current.clientWidth || 300,
    height,
    series: drawn,
    bands,
    scales: { x: { time, range: range ? () => range : undefined }, y: { distr: log ? 3 : 1 } },
    axes: [axis, { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) }],
    cursor: {
      sync: sync ? { key: sync } : undefined,
      drag: { x: Boolean(onZoom), y: false, setScale: false },
      focus: { prox: 24 },
    },
    legend: { live: true },
    hooks: {
      draw: [(plot) => drawMarks(plot, marks)],
      setSelect: [
        (plot) =>
          plot.select.width > 4 &&
          onZoom?.(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")),
      ],
      ready: [(plot) => onZoom && plot.over.addEventListener("dblclick", () => onZoom(null, null))],
    },
  };
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const { x, colour } of marks) {
    const at = plot.valToPos(x, "x", true);
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    ctx.strokeStyle = styleOf(colour ?? "--mark");
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}
