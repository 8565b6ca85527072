// Charts over steps or time, drawn by uPlot.

import { number, time as timeText, visible } from "../format.js";
import { styleOf } from "../theme.js";
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import uPlot from "../vendor/uPlot.js";
import { Empty } from "./basics.js";
import { known, logTicks, marksNear, pointsWithin, robustRange, stack, zoomed } from "./curves.js";

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

/** The width of the axis of values, in pixels. */
const AXIS = 50;

/** The colour of the series at `index`. */
export const colourOf = (index) => COLOURS[index % COLOURS.length];

/** Dashes of the lines from the ninth on, so that no two lines look alike before the 24th. */
export const dashesOf = (index) => [undefined, [5, 3], [2, 2]][Math.floor(index / COLOURS.length) % 3];

/**
 * A chart of lines, or of stacked areas.
 *
 * `series`: `{label, values, low, high, colour, dashed, faint}`, each with a value or null at every of `xs`; `low` and `high` shade a band.
 * A `faint` series is a background of others: without a legend. `marks`: `{x, text, colour, sign}` are dotted vertical lines, with their text
 * on hover. `sync`: charts with the same name share their cursor. `onZoom(first, last)` is called when a range is selected, with the keys + and
 * -, and with nulls for a double click, 0 or Escape. `time`: `xs` are Unix seconds. `range`: [first, last] of `xs` in view, of the whole
 * `extent` ([first, last]; default: of `xs`). Single values far from all others are left out of the axis, unless the person asks for all.
 */
export function Chart(props) {
  const { xs, series, stacked = false, label, range, log = false } = props;
  const [hidden, setHidden] = useState(() => new Set());
  const [all, setAll] = useState(false);
  const shown = useMemo(() => {
    const coloured = series.map((each, i) => ({ colour: colourOf(i), ...each }));
    const visibleOnes = coloured.map((each) => ({ ...each, off: hidden.has(each.of ?? each.label) }));
    return stacked ? stack(visibleOnes.filter(({ off }) => !off)) : visibleOnes;
  }, [series, stacked, hidden]);
  const axis = useMemo(() => {
    const points = pointsWithin(
      xs,
      shown.filter(({ off }) => !off),
      range,
    );
    return stacked ? { ...robustRange([[0], ...points], { all: true }), low: 0 } : robustRange(points, { all, log });
  }, [xs, shown, range, all, log, stacked]);
  const cursor = useRef(null);
  if (!series.some(({ values }) => values.some(Number.isFinite)))
    return html`<${Empty}>${label ?? "This chart"} has no values${series.length ? " in this range" : ""}.<//>`;
  const toggle = (name) =>
    setHidden((before) => (before.has(name) ? without(before, name) : new Set([...before, name])));
  return html`<div class="chart">
    <${Plot} ...${props} shown=${shown} axis=${axis} cursor=${cursor} />
    <${Legend} ...${props} hidden=${hidden} toggle=${toggle} cursor=${cursor} />
    <${Outside} axis=${axis} all=${all} setAll=${setAll} />
  </div>`;
}

const without = (set, name) => new Set([...set].filter((each) => each !== name));

/** Says how many values the axis leaves out, with a button that shows all. */
function Outside({ axis, all, setAll }) {
  if (!axis.outside && !all) return null;
  const text = `${axis.outside} ${axis.outside === 1 ? "value" : "values"} outside`;
  return html`<p class="outside">
    ${all ? "" : text} <button aria-pressed=${all} onClick=${() => setAll(!all)}>all values</button>
  </p>`;
}

/** The names of the series with their colours and their values at the cursor (else the newest). Each is a button that hides its series. */
function Legend({ xs, series, hidden, toggle, cursor, time }) {
  const place = useRef(null);
  useEffect(() => {
    const show = (index) => {
      const rows = series.filter(({ faint }) => !faint);
      place.current?.querySelectorAll("button b").forEach((box, i) => {
        box.textContent = rows[i] ? valueAt(xs, rows[i].values, index) : "";
      });
      const at = place.current?.querySelector(".at");
      if (at) at.textContent = index === null ? "" : time ? timeText(xs[index]) : `step ${number(xs[index], 6)}`;
    };
    cursor.current = { show };
    show(null);
  }, [xs, series, time, hidden]);
  return html`<div class="chart-legend" ref=${place}>
    ${series
      .map((each, i) => ({ colour: colourOf(i), ...each }))
      .filter(({ faint }) => !faint)
      .map(
        ({ label, colour, dashed, values }) => html`<button
          key=${label}
          class="plain"
          aria-pressed=${!hidden.has(label)}
          title="Show or hide"
          onClick=${() => toggle(label)}
          disabled=${!values.some(Number.isFinite)}
        >
          <i class=${dashed ? "dashed" : ""} style=${{ borderColor: `var(${colour})` }}></i>${visible(label)} <b></b>
        </button>`,
      )}
    <span class="at faint"></span>
  </div>`;
}

/** The value of a series at an index of `xs`; without one there, the one before it with its step. */
function valueAt(xs, values, index) {
  const found = known(values, index ?? values.length - 1);
  if (found === null) return "–";
  return number(values[found], 4) + (index === null || found === index ? "" : ` (${number(xs[found], 6)})`);
}

const NONE = [];

/** The drawing itself, and its keys. */
function Plot(props) {
  const { xs, shown, axis, marks = NONE, height = 200, log = false, stacked, sync, time = false, range, label } = props;
  const place = useRef(null);
  const tip = useRef(null);
  const plot = useRef(null);
  const now = useRef(null);
  const status = useRef(null);
  // measured once: to measure again while other charts are made lays out the page for each of them
  const width = useRef(null);
  const drawn = useRef(null);
  const data = [xs, shown, axis, marks, range];
  now.current = { ...props, marks, tip, status };
  const [themed, setThemed] = useState(0);
  useEffect(() => {
    const changed = () => setThemed((before) => before + 1);
    addEventListener("theme", changed);
    return () => removeEventListener("theme", changed);
  }, []);
  // what a plot can't change once it is drawn
  const kind = JSON.stringify(shown.map(({ low, colour, dashed, faint }) => [Boolean(low), colour, dashed, faint]));
  useEffect(() => {
    const box = place.current;
    const made = new uPlot(
      options({ shown, height, log, stacked, sync, time, now, width: width.current ?? box.clientWidth }),
      columns(xs, shown, axis),
      box,
    );
    plot.current = made;
    drawn.current = data;
    const resize = new ResizeObserver(([{ contentRect }]) => {
      width.current = Math.round(contentRect.width);
      if (made.width !== width.current) made.setSize({ width: width.current, height });
    });
    resize.observe(box);
    return () => {
      resize.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [kind, height, log, stacked, sync, time, themed]);
  useEffect(() => {
    // a new one has these data already
    if (!plot.current || data.every((each, i) => each === drawn.current[i])) return;
    drawn.current = data;
    plot.current.batch(() => {
      shown.forEach((each, i) => {
        for (const at of placesOf(shown, i))
          if (plot.current.series[at].show === Boolean(each.off)) plot.current.setSeries(at, { show: !each.off });
      });
      plot.current.setData(columns(xs, shown, axis));
    });
  }, data);
  return html`<div class="plot">
    <div role="img" tabindex="0" aria-label=${`${label ?? "Chart"}. Arrow keys read values; plus, minus and 0 zoom.`} ref=${place} onKeyDown=${(event) => keyPressed(event, plot.current, now.current)}></div>
    <div class="tip" ref=${tip} hidden></div>
    <div class="unseen" ref=${status} role="status"></div>
  </div>`;
}

/** The columns of series `i` in the plot: itself and the two edges of its band. */
function placesOf(shown, i) {
  const at = 1 + shown.slice(0, i).reduce((sum, each) => sum + (hasBand(each) ? 3 : 1), 0);
  return hasBand(shown[i]) ? [at, at + 1, at + 2] : [at];
}

const hasBand = ({ low, high }) => Boolean(low && high);

/** The columns of the plot. What lies far outside the axis is drawn just outside it, because a canvas can't count to 1e300. */
function columns(xs, shown, { low, high }) {
  const far = 2 * (high - low);
  const within = (value) => (Number.isFinite(value) ? Math.min(Math.max(value, low - far), high + far) : null);
  return [
    xs,
    ...shown.flatMap((each) =>
      (hasBand(each) ? [each.values, each.low, each.high] : [each.values]).map((row) => row.map(within)),
    ),
  ];
}

function options({ shown, height, log, stacked, sync, time, now, width }) {
  const axis = {
    stroke: styleOf("--faint"),
    grid: { stroke: styleOf("--grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui",
  };
  const ticks = (_, values) => values.map((tick) => (tick === null ? "" : number(tick)));
  return {
    width: width || 300,
    height,
    padding: [12, 14, 0, 0],
    ...drawnSeries(shown, stacked),
    scales: {
      x: {
        time,
        range: (_, first, last) => now.current.range ?? (first === last ? [first - 1, last + 1] : [first, last]),
      },
      y: { distr: log ? 3 : 1, range: () => [now.current.axis.low, now.current.axis.high] },
    },
    axes: [
      {
        ...axis,
        space: 60,
        size: 26,
        values: time ? undefined : (_, values) => values.map((tick) => (Number.isInteger(tick) ? number(tick, 6) : "")),
      },
      {
        ...axis,
        space: 34,
        size: 50,
        values: ticks,
        ...(log && { splits: (_, __, low, high) => logTicks(low, high), filter: (_, splits) => splits }),
      },
    ],
    cursor: {
      // without the filter a selection in one chart would be made in all of them
      sync: sync
        ? {
            key: sync,
            scales: ["x", null],
            filters: { pub: (what) => what.startsWith("mousem") || what === "mouseleave", sub: () => true },
          }
        : undefined,
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
      y: false,
    },
    legend: { show: false },
    hooks: hooks(now),
  };
}

function drawnSeries(shown, stacked) {
  const [series, bands] = [[{}], []];
  for (const each of shown) {
    const colour = styleOf(each.colour);
    const at = series.length;
    series.push({
      show: !each.off,
      stroke: each.faint ? `color-mix(in srgb, ${colour} 28%, transparent)` : colour,
      width: each.faint ? 1 : 1.6,
      dash: Array.isArray(each.dashed) ? each.dashed : each.dashed ? [5, 3] : undefined,
      fill: stacked ? `color-mix(in srgb, ${colour} 75%, ${styleOf("--surface")})` : undefined,
      points: { show: (plot, at) => lonely(plot.data[at]), size: 5, fill: colour },
      spanGaps: true,
    });
    if (!hasBand(each)) continue;
    const edge = { show: !each.off, stroke: "transparent", points: { show: false } };
    series.push({ ...edge }, { ...edge });
    bands.push({ series: [at + 2, at + 1], fill: `color-mix(in srgb, ${colour} 16%, transparent)` });
  }
  return { series, bands };
}

/** A curve of few values shows each as a point too: one value alone has no line. */
const lonely = (values) => values.filter(Number.isFinite).length < 3;

function hooks(now) {
  return {
    draw: [(plot) => drawMarks(plot, now.current.marks)],
    setCursor: [
      (plot) => {
        const { idx, left } = plot.cursor;
        now.current.cursor.current?.show(left < 0 ? null : (idx ?? null));
        showMarks(plot, now.current, left);
      },
    ],
    setSelect: [
      (plot) => {
        const { left, width } = plot.select;
        if (width > 4) now.current.onZoom?.(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
        if (width) plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      },
    ],
    ready: [(plot) => plot.over.addEventListener("dblclick", () => now.current.onZoom?.(null, null))],
  };
}

/** Shows the texts of the marks under the cursor. */
function showMarks(plot, { marks, tip }, left) {
  const box = tip.current;
  if (!box) return;
  const x = plot.posToVal(left, "x");
  const here = plot.root.parentElement.matches(":hover, :focus"); // others only share the cursor
  const near =
    !here || left < 0 || !marks.length ? [] : marksNear(marks, x, Math.abs(plot.posToVal(left + 6, "x") - x));
  box.hidden = !near.length;
  box.textContent = near.map((mark) => visible(mark.text)).join("\n");
  // at the side of the line that has room: to measure the box would lay out the page at every move
  const right = x > (plot.scales.x.min + plot.scales.x.max) / 2;
  box.style.left = right ? "auto" : `${left + AXIS + 8}px`;
  box.style.right = right ? `${plot.width - left - AXIS + 8}px` : "auto";
}

/** What the legend says at an index, as a sentence for those who hear it. */
const spoken = (xs, series, index, time) =>
  `${time ? timeText(xs[index]) : `step ${xs[index]}`}: ${series
    .filter(({ faint, off }) => !faint && !off)
    .map(({ label, own, values }) => `${visible(label)} ${valueAt(xs, own ?? values, index)}`)
    .join(", ")}`;

/** Arrow keys move the cursor from value to value, + and - zoom at it, 0 and Escape show everything. */
function keyPressed(event, plot, { xs, shown, marks, time, status, onZoom, extent = [xs[0], xs.at(-1)] }) {
  if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
  const { min, max } = plot.scales.x;
  const inView = xs.map((x, i) => [x, i]).filter(([x]) => x >= min && x <= max);
  const [first, last] = [inView[0]?.[1] ?? 0, inView.at(-1)?.[1] ?? xs.length - 1];
  const at = plot.cursor.idx ?? last;
  const goTo = (index) => {
    const there = Math.min(last, Math.max(first, index));
    plot.setCursor({ left: plot.valToPos(xs[there], "x"), top: 10 });
    status.current.textContent = [
      spoken(xs, shown, there, time),
      ...marksNear(marks, xs[there], 0).map(({ text }) => visible(text)),
    ].join("; ");
  };
  const stride = event.shiftKey ? 10 : 1;
  const zoom = (factor) => {
    const next = zoomed(
      [min, max],
      plot.cursor.idx === null || plot.cursor.idx === undefined ? (min + max) / 2 : xs[at],
      factor,
      extent,
    );
    onZoom?.(...(next ?? [null, null]));
  };
  const actions = {
    ArrowLeft: () => goTo(at - stride),
    ArrowRight: () => goTo(at + stride),
    Home: () => goTo(first),
    End: () => goTo(last),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    0: () => onZoom?.(null, null),
    Escape: () => onZoom?.(null, null),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

/** Returns marks of which those at one place are one: all their signs, and the colour of the last. */
const together = (marks) => {
  const byPlace = new Map();
  for (const mark of marks) {
    const before = byPlace.get(mark.at)?.sign ?? "";
    byPlace.set(mark.at, { ...mark, sign: before.includes(mark.sign) ? before : before + (mark.sign ?? "") });
  }
  return [...byPlace.values()];
};

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const places = marks.map((mark) => ({ ...mark, at: plot.valToPos(mark.x, "x", true) }));
  const inside = places.filter(({ at }) => at >= bbox.left && at <= bbox.left + bbox.width);
  const room = 10 * devicePixelRatio;
  ctx.save();
  ctx.font = `${room}px system-ui`;
  ctx.textAlign = "center";
  // many marks must not hide the curves
  ctx.globalAlpha = inside.length * 2 * room > bbox.width ? 0.35 : 1;
  let free = Number.NEGATIVE_INFINITY;
  for (const { at, colour, sign } of together(inside)) {
    ctx.strokeStyle = styleOf(colour ?? "--mark");
    ctx.fillStyle = ctx.strokeStyle;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    if (!sign || at < free) continue;
    ctx.fillText(sign, at, bbox.top - 2 * devicePixelRatio);
    free = at + room * Math.max(1, sign.length * 0.7);
  }
  ctx.restore();
}
