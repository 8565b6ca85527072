// What is computed for a timeline: rows of bars, ranges, ticks, and which bar is where.

export const AXIS = 24;
const MOST_ROWS = 12;
const [SHORTEST, TALLEST, FEW] = [26, 54, 12];
/** The shortest range that can be shown, in seconds. */
const SHORTEST_S = 0.05;

/** Seconds by which bars that follow one another may seem to overlap: times are rounded. */
const SAME = 0.001;

/**
 * Gives each bar, which are in the order of their starts, a row in which it overlaps no other. Beyond `most` rows bars share the row that is
 * free first. Returns `{rows, of}`: how many rows, and the row of each bar.
 */
function pack(bars, most = MOST_ROWS) {
  const ends = [];
  const of = bars.map(({ start, end }) => {
    let row = ends.findIndex((each) => each <= start + SAME);
    if (row < 0 && ends.length < most) row = ends.length;
    if (row < 0) row = ends.indexOf(Math.min(...ends));
    ends[row] = Math.max(ends[row] ?? Number.NEGATIVE_INFINITY, end);
    return row;
  });
  return { rows: Math.max(1, ends.length), of };
}

/** Returns the rows of the trainer's lane: the parts of its steps in the first, what goes on beside them below. */
function packTrainer(bars) {
  const isBeside = ({ what }) => / (run|written)$/.test(what);
  const [steps, beside] = [
    pack(
      bars.filter((bar) => !isBeside(bar)),
      1,
    ),
    pack(bars.filter(isBeside)),
  ];
  const next = [steps.of[Symbol.iterator](), beside.of[Symbol.iterator]()];
  const of = bars.map((bar) => (isBeside(bar) ? steps.rows + next[1].next().value : next[0].next().value));
  return { rows: Math.max(...of, 0) + 1, of };
}

const KINDS = ["trainer", "environment", "replica"];

/** A part of a step that took less, in seconds, didn't happen in this step: it is the time of asking whether it should. */
const WORTH_S = 0.001;

/** Returns the lanes as they are drawn: the trainer, environments, then replicas, each with its rows, its height and its `top`. */
export function arrange(lanes) {
  let top = AXIS;
  // A few lanes have room for higher bars.
  const [each, most] = lanes.length > FEW ? [5, TALLEST] : [9, 2 * TALLEST];
  return lanes
    .map((lane, i) => ({ lane, i }))
    .sort((a, b) => KINDS.indexOf(a.lane.kind) - KINDS.indexOf(b.lane.kind) || a.i - b.i)
    .map(({ lane }) => {
      const given = lane.kind === "trainer" ? lane.bars.filter(({ start, end }) => end - start >= WORTH_S) : lane.bars;
      const bars = given.every((bar, i) => i === 0 || given[i - 1].start <= bar.start)
        ? given
        : [...given].sort((a, b) => a.start - b.start);
      const { rows, of } = lane.kind === "trainer" ? packTrainer(bars) : pack(bars);
      const height = Math.max(SHORTEST, Math.min(most, rows * (lane.kind === "trainer" ? 20 : each) + 6));
      const placed = { ...lane, bars, rows, of, height, top, row: (height - 6) / rows };
      top += height;
      return placed;
    });
}

export const heightOf = (lanes) => (lanes.length ? lanes.at(-1).top + lanes.at(-1).height : AXIS);

/** Returns a range within `whole`: not shorter than can be shown, not longer than `whole`, and inside it. */
export function within([first, last], whole) {
  const most = Math.max(SHORTEST_S, whole[1] - whole[0]);
  const long = Math.max(SHORTEST_S, Math.min(most, last - first));
  const middle = (first + last) / 2;
  const from = Math.max(whole[0], Math.min(whole[0] + most - long, middle - long / 2));
  return [from, from + long];
}

/** Returns the range that shows `factor` times as much, with the time `at` in its place. */
export function zoom([first, last], factor, at, whole) {
  const next = [at - (at - first) * factor, at + (last - at) * factor];
  // At an edge the range moves instead of shrinking.
  return within(next, whole);
}

export const pan = ([first, last], share, whole) => {
  const by = (last - first) * share;
  return within([first + by, last + by], whole);
};

const STEPS = [
  0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200,
  86400,
];

/** Returns the times of ticks in a range, at most `most`, on round local times. */
export function ticks([first, last], most) {
  const long = last - first;
  const step = STEPS.find((each) => long / each <= most) ?? Math.ceil(long / most / 86400) * 86400;
  const zone = new Date(first * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let i = Math.ceil((first - zone) / step); i * step + zone <= last; i += 1) found.push(i * step + zone);
  return { step, times: found };
}

/** The text of a tick: as much of the date as neighbours differ in. */
export function tickText(seconds, step) {
  const at = new Date(seconds * 1000);
  if (step >= 86400) return at.toLocaleDateString("sv");
  const text = at.toLocaleTimeString("sv");
  if (step >= 60) return text.slice(0, 5) === "00:00" ? at.toLocaleDateString("sv") : text.slice(0, 5);
  return step >= 1
    ? text
    : `${text}.${String(at.getMilliseconds())
        .padStart(3, "0")
        .slice(0, step >= 0.1 ? 1 : 2)}`;
}

/** Returns the number of the lane at a place in the drawing; -1 beside all. */
export const laneAt = (lanes, y) => lanes.findIndex((each) => y >= each.top && y < each.top + each.height);

/** Returns the bar at a place, `{lane, bar}` (numbers), or null. `x` is a time, `y` a place in the drawing, `slack` seconds that a bar may miss. */
export function find(lanes, x, y, slack = 0) {
  const lane = laneAt(lanes, y);
  if (lane < 0) return null;
  const { bars, of, row, top } = lanes[lane];
  let best = null;
  bars.forEach((bar, i) => {
    if (bar.start > x + slack || bar.end < x - slack) return;
    const away = Math.abs(top + 3 + (of[i] + 0.5) * row - y) + Math.max(0, bar.start - x, x - bar.end) / (slack || 1);
    if (away <= row / 2 + 4 && (!best || away < best.away)) best = { lane, bar: i, away };
  });
  return best && { lane: best.lane, bar: best.bar };
}

/** Returns the bar of a lane that is nearest to a time; null in an empty lane. */
export function nearest(lane, at) {
  let best = null;
  lane.bars.forEach(({ start, end }, i) => {
    const away = Math.max(0, start - at, at - end);
    if (!best || away < best.away) best = { i, away };
  });
  return best?.i ?? null;
}

/** Returns the bar that a key moves to from `{lane, bar}`; null for other keys. */
export function moveBar(key, lanes, { lane, bar }) {
  const { bars } = lanes[lane];
  const along = { ArrowLeft: bar - 1, ArrowRight: bar + 1, Home: 0, End: bars.length - 1 }[key];
  if (along !== undefined) return { lane, bar: Math.max(0, Math.min(bars.length - 1, along)) };
  const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10 }[key];
  if (by === undefined) return null;
  const to = Math.max(0, Math.min(lanes.length - 1, lane + by));
  const here = bars[bar];
  return { lane: to, bar: nearest(lanes[to], here ? (here.start + here.end) / 2 : 0) ?? 0 };
}

/** Returns the text of a bar without the seconds at its end: how long it took is shown beside it. */
export const textOf = (bar) => (bar.text || bar.what).replace(/, [\d.e+-]+ s$/, "");

// In order: the first that matches what a bar is.
const KINDS_OF_BARS = [
  [/wait/, "wait"],
  [/valid/, "validation"],
  [/checkpoint/, "checkpoint"],
  [/refit/, "refit"],
  [/^scor/, "scoring"],
  [/^(generation|trajectory)/, "generation"],
  [/train|step|prob/, "training"],
];
const known = new Map();

/** Returns the kind of a bar, which decides its colour, by what it is. A drawing asks it of each of its bars. */
export function kindOf(what) {
  if (!known.has(what)) known.set(what, KINDS_OF_BARS.find(([words]) => words.test(what))?.[1] ?? "other");
  return known.get(what);
}

/** Returns the bars of a lane in a range, at most `most`: `{bars, total}`. */
export function barsIn(lane, [first, last], most) {
  const seen = lane.bars.map((bar, i) => ({ bar, i })).filter(({ bar }) => bar.start <= last && bar.end >= first);
  return { bars: seen.slice(0, most), total: seen.length };
}
