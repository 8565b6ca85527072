// Continuous colours for values: which one a value has, as CSS that follows the theme.

import { number } from "../format.js";

/**
 * A scale of values: `{kind, low, high, middle, log}`. A `sequential` one goes from `low` (no colour) to `high`; a `diverging` one has no
 * colour at `middle` and another colour on each side. `log`: distances are those of logarithms, for ratios.
 */
const transform = (scale, value) => (scale.log ? Math.log(Math.max(value, 1e-12)) : value);

/** Returns where a value lies on its scale: 0 to 1, or -1 to 1 for a diverging one; null without a value. */
export function position(scale, value) {
  if (!Number.isFinite(value)) return null;
  const [at, low, high] = [value, scale.low, scale.high].map((each) => transform(scale, each));
  if (scale.kind === "diverging") {
    const middle = transform(scale, scale.middle ?? 0);
    const reach = Math.max(Math.abs(high - middle), Math.abs(low - middle));
    return reach ? Math.max(-1, Math.min(1, (at - middle) / reach)) : 0;
  }
  return high === low ? 0 : Math.max(0, Math.min(1, (at - low) / (high - low)));
}

/** Returns the colour at a position as CSS. `strength` is its greatest opacity in per cent: text on it needs less than 60. */
export function colourAt(at, strength = 100) {
  if (at === null || at === 0) return "transparent";
  const share = Math.round(Math.abs(at) * strength);
  return `color-mix(in srgb, var(${at < 0 ? "--heat-low" : "--heat-high"}) ${share}%, transparent)`;
}

/** The colour of a cell or a bar without a text on it: grey in the middle, so that it is seen there too. */
export const cellColour = (at) =>
  `color-mix(in srgb, var(${at < 0 ? "--heat-low" : "--heat-high"}) ${Math.round(Math.abs(at) * 100)}%, var(--heat-middle))`;

/**
 * Returns the scale of values: from their 2nd to their 98th percentile, so that one huge value leaves the others distinct. `middle`: the
 * value without a colour; undefined for 0 where values have both signs.
 */
export function scaleOf(values, { middle, log = false } = {}) {
  const known = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!known.length) return { kind: "sequential", low: 0, high: 1, log: false };
  const at = (share) => known[Math.min(known.length - 1, Math.floor(share * known.length))];
  let [low, high] = [at(0.02), at(0.98)];
  if (low === high) [low, high] = [known[0], known.at(-1)];
  if (middle === undefined && known[0] < 0 && known.at(-1) > 0) middle = 0;
  if (middle !== undefined) {
    const reach = Math.max(Math.abs(low - middle), Math.abs(high - middle)) || 1;
    if (!log) return { kind: "diverging", low: middle - reach, high: middle + reach, middle, log };
    const most = Math.max(high / middle, middle / Math.max(low, 1e-12));
    return { kind: "diverging", low: middle / most, high: middle * most, middle, log };
  }
  // The colour grows with the distance from 0, so that log-probabilities of unlikely tokens stand out.
  return high <= 0 ? { kind: "sequential", low: high, high: low, log } : { kind: "sequential", low, high, log };
}

/** Returns the scale of rewards: at least from 0 to 1, its middle without a colour. */
export function rewardScale(rewards) {
  const known = rewards.filter(Number.isFinite);
  const low = known.reduce((a, b) => Math.min(a, b), 0);
  const high = known.reduce((a, b) => Math.max(a, b), 1);
  return { kind: "diverging", low, high, middle: (low + high) / 2 };
}

/** The ends of a scale, and its middle, as texts. */
export const endsOf = (scale) =>
  (scale.kind === "diverging" ? [scale.low, scale.middle, scale.high] : [scale.low, scale.high]).map((each) =>
    number(each),
  );
