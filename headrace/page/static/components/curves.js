// What is computed of curves before they are drawn. Pure functions; values may be null where nothing is known.

const finite = (value) => Number.isFinite(value);

/** How many times the width of the middle 98 % a value must lie away from it to be left out of a robust range. */
const FAR = 10;

/**
 * Returns the exponential moving average of `values` with `weight` (0 … 1) on the past. The first values are not pulled towards zero. Nulls
 * stay nulls, and so do values far from all others: one of 4e28 would be all that an average shows.
 */
export function smooth(values, weight) {
  if (!(weight > 0)) return values;
  const [least, most] = bounds(values.filter(finite).sort((a, b) => a - b));
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (!finite(value) || value < least || value > most) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/**
 * Returns curves `{steps, values, low, high, …}` on one axis: `{xs, curves}`, with null at the steps that a curve does not have. Other
 * fields of a curve stay.
 */
export function align(curves) {
  const xs = [...new Set(curves.flatMap(({ steps }) => steps))].sort((a, b) => a - b);
  const at = new Map(xs.map((x, i) => [x, i]));
  const spread = (steps, values) => {
    const row = new Array(xs.length).fill(null);
    steps.forEach((step, i) => {
      row[at.get(step)] = finite(values[i]) ? values[i] : null;
    });
    return row;
  };
  return {
    xs,
    curves: curves.map(({ steps, values, low, high, ...rest }) => ({
      ...rest,
      values: spread(steps, values),
      ...(low && high && { low: spread(steps, low), high: spread(steps, high) }),
    })),
  };
}

/** Returns the value at `share` (0 … 1) of ascending values. */
const quantile = (sorted, share) => sorted[Math.round(share * (sorted.length - 1))];

/**
 * Returns what an axis must show of `series` between the steps of `range` ([first, last] or null): the points `[value, low, high]`; of a
 * series without a band, `[value]`.
 */
export function pointsWithin(xs, series, range) {
  const inside = (i) => !range || (xs[i] >= range[0] && xs[i] <= range[1]);
  return series.flatMap(({ values, low, high }) =>
    values
      .map((value, i) => (low && high ? [value, low[i], high[i]] : [value]))
      .filter(([value], i) => finite(value) && inside(i)),
  );
}

/**
 * Returns the range `{low, high}` of an axis that shows `points`, and how many lie `outside`. Unless `all`, single values that are far from
 * the rest (4e28 among numbers around 1) are left outside. A logarithmic axis has no place for zero and below; those are `outside` too.
 */
export function robustRange(points, { all = false, log = false } = {}) {
  const scale = (value) => (log ? Math.log10(value) : value);
  const drawn = (values) => values.filter((value) => finite(value) && (!log || value > 0)).map(scale);
  const middle = drawn(points.map(([value]) => value)).sort((a, b) => a - b);
  if (!middle.length) return { low: log ? 0.1 : 0, high: 1, outside: points.length };
  const [least, most] = all ? [Number.NEGATIVE_INFINITY, Number.POSITIVE_INFINITY] : bounds(middle, log);
  let [low, high] = [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY];
  let outside = 0;
  for (const point of points) {
    const values = drawn(point);
    const inside = values.filter((value) => value >= least && value <= most);
    if (inside.length < point.filter(finite).length) outside += 1;
    for (const value of inside) [low, high] = [Math.min(low, value), Math.max(high, value)];
  }
  // shares, counts and times that are always 0 are never below it
  if (!log && low === 0 && high === 0) high = 1;
  const room = (high - low || (log ? 1 : Math.abs(high) || 1)) * 0.06;
  const edge = (value) => (log ? 10 ** value : value);
  return { low: edge(low - room), high: edge(high + room), outside };
}

/** Returns the bounds of what is not far from the rest of ascending values. */
function bounds(sorted, log = false) {
  if (!sorted.length) return [0, 0];
  const cut = sorted.length > 4 ? Math.max(1 / (sorted.length - 1), 0.01) : 0;
  const [bottom, top] = [quantile(sorted, cut), quantile(sorted, 1 - cut)];
  // where nearly all values are equal, the size of what is normal is that of the value itself
  const width = top - bottom || (log ? 1 : Math.max(Math.abs(bottom), 1));
  return [bottom - FAR * width, top + FAR * width];
}

/** Returns the ticks of a logarithmic axis: at most about `most`, at powers of ten, with 2 and 5 between them where there is room. */
export function logTicks(low, high, most = 6) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const stride = Math.max(1, Math.ceil((last - first) / most));
  const between = last - first <= most / 3 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = Math.ceil(first / stride) * stride; power <= last; power += stride)
    for (const factor of between) ticks.push(factor * 10 ** power);
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  // a range without any of these is narrow: ticks as on a linear axis
  return inside.length > 1
    ? inside
    : [0, 1, 2, 3].map((i) => Number((low + ((high - low) * (i + 0.5)) / 4).toPrecision(2)));
}

/** Returns the series as sums of themselves and those before, so that filled areas lie on one another; the last is drawn first. */
export function stack(series) {
  const sums = [];
  for (const each of series) {
    const below = sums.at(-1)?.values;
    sums.push({ ...each, own: each.values, values: each.values.map((value, i) => (value ?? 0) + (below?.[i] ?? 0)) });
  }
  return sums.reverse();
}

/** Returns the index of the newest value at or before `index` of `values`, for curves that have none at every step; null without one. */
export function known(values, index) {
  for (let i = Math.min(index, values.length - 1); i >= 0; i--) if (finite(values[i])) return i;
  return null;
}

/** Returns the marks within `reach` of `x`. */
export const marksNear = (marks, x, reach) => marks.filter((mark) => Math.abs(mark.x - x) <= reach);

/** Returns the range that a key zooms to, from the range in view and the place in its middle: half as wide, or twice, within `[least, most]`. */
export function zoomed([first, last], middle, factor, [least, most]) {
  const half = ((last - first) * factor) / 2;
  const [low, high] = [Math.max(least, middle - half), Math.min(most, middle + half)];
  return low <= least && high >= most ? null : [low, high];
}
