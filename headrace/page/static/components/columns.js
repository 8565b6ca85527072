// What the columns of a trajectory's tokens mean, and how their values look.

import { number } from "../format.js";
import { colourAt, position, scaleOf } from "./colour.js";

const CLIPPED = {
  "-1": "cut at the low bound",
  0: "not clipped",
  1: "cut at the high bound",
  2: "cut at the dual bound",
};
const MASK_REASONS = {
  0: "counts",
  1: "the environment wrote it",
  2: "its call isn't trained",
  3: "over age",
  4: "its row's loss multiplier is 0",
  5: "cut off (overlong_filtering)",
  6: "log-probabilities too far apart (seq_logprob_error_threshold)",
  7: "left out by top-k or top-p",
  8: "its sequence is masked (seq-mask-tis)",
  9: "importance weight (icepop)",
  10: "probability difference",
};

/** By column: label, what it is, and its scale. `names` are the texts of a column of few values; the `plain` one has no colour. */
const COLUMNS = {
  token_losses: ["loss of the token", "its term of the policy's loss", { middle: 0 }],
  token_loss_gradients: ["gradient", "derivative of the loss by the token's log-probability", { middle: 0 }],
  advantages: ["advantage", "how much better than expected", { middle: 0 }],
  generation_logprobs: ["log-probability, rollout", "as sampled", {}],
  prev_logprobs: ["log-probability, trainer at the start", "before the step's updates", {}],
  difference: ["difference", "trainer at the start − rollout", { middle: 0 }],
  policy_logprobs: ["log-probability, policy", "when its loss was computed", {}],
  reference_policy_logprobs: ["log-probability, reference", "of the frozen initial policy", {}],
  teacher_logprobs: ["log-probability, teacher", "of the model that the policy imitates", {}],
  ratios: ["ratio", "policy : before, which the clip bounds", { middle: 1, log: true }],
  clipped: ["clip", "which bound cut the token's term", { names: CLIPPED, plain: 0 }],
  importance_weights: ["importance weight", "corrects for the policy that sampled", { middle: 1, log: true }],
  raw_importance_weights: ["importance weight, raw", "before its bounds", { middle: 1, log: true }],
  token_loss_mask: [
    "mask",
    "whether the token counts in the loss",
    { names: { 0: "left out", 1: "counts" }, plain: 1 },
  ],
  mask_reasons: ["reason of the mask", "why a token doesn't count", { names: MASK_REASONS, plain: 0 }],
  entropies: ["entropy", "of the policy at the token", {}],
  token_value_losses: ["value loss of the token", "its share of the value model's loss", {}],
  values: ["value", "the value model's prediction", {}],
  returns: ["return", "the value model's target", {}],
};

/** Returns `{label, help, middle, log, names, plain}` of a column, known or not. */
export function columnOf(name) {
  const [label, help, scale] = COLUMNS[name] ?? [name.replaceAll("_", " "), "", {}];
  return { label, help, ...scale };
}

/** Returns the columns with those that follow from them, the known ones first and in the order above. */
export function withDerived(columns) {
  const { prev_logprobs: prev, generation_logprobs: rollout } = columns;
  const all = { ...columns };
  if (prev && rollout)
    all.difference = prev.map((value, i) =>
      Number.isFinite(value) && Number.isFinite(rollout[i]) ? value - rollout[i] : null,
    );
  return all;
}

/** Returns the names of columns in the order in which they are offered. */
export function ordered(names) {
  const known = Object.keys(COLUMNS);
  const place = (name) => (known.includes(name) ? known.indexOf(name) : known.length);
  return [...names].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
}

/** The column that is shown if none is chosen. */
export const firstColumn = (names) =>
  ["generation_logprobs", "policy_logprobs", ...ordered(names)].find((name) => names.includes(name)) ?? null;

const SAMPLE = 20_000;

/** Returns the scale of a column's values; of many, of every so-manieth. */
export function columnScale(name, values) {
  const { names, middle, log } = columnOf(name);
  if (names) return { kind: "names" };
  const every = Math.max(1, Math.floor(values.length / SAMPLE));
  const sample = [];
  for (let i = 0; i < values.length; i += every) if (Number.isFinite(values[i])) sample.push(values[i]);
  return scaleOf(sample, { middle, log });
}

const STRENGTH = 52;
/** The colours of named values: custom property and per cent. There are as many as a column has names. */
const NAMED = [
  ["--series-2", 40],
  ["--series-1", 40],
  ["--series-4", 40],
  ["--series-5", 40],
  ["--series-3", 40],
  ["--series-6", 40],
  ["--series-7", 40],
  ["--text", 22],
  ["--bad", 45],
  ["--series-8", 50],
];

/** The colour behind a token: weak enough that its text can be read in both themes. */
export function colourOf(name, scale, value) {
  if (!Number.isFinite(value)) return "transparent";
  if (scale.kind !== "names") return colourAt(position(scale, value), STRENGTH);
  const { names, plain } = columnOf(name);
  if (value === plain) return "transparent";
  const others = Object.keys(names).filter((each) => Number(each) !== plain);
  const [property, share] = NAMED[Math.max(0, others.indexOf(String(value))) % NAMED.length];
  return `color-mix(in srgb, var(${property}) ${share}%, transparent)`;
}

/** Returns the values of a column of names that occur in it: a legend of those that don't is noise. */
export function present(name, values) {
  const { names, plain } = columnOf(name);
  const found = new Set(values);
  return Object.keys(names)
    .map(Number)
    .filter((value) => value === plain || found.has(value));
}

/** A value of a column as text. */
export function valueText(name, value) {
  if (!Number.isFinite(value)) return "–";
  const { names } = columnOf(name);
  return names ? (names[value] ?? number(value)) : number(value, 4);
}

/** Returns the `most` tokens with the greatest distance from the column's middle: `[{at, value, share}]`, share of the sum of distances. */
export function extremes(name, values, most = 20) {
  const { middle = 0, log } = columnOf(name);
  const far = (value) => (log ? Math.abs(Math.log(Math.max(value, 1e-12) / middle)) : Math.abs(value - middle));
  let sum = 0;
  const found = [];
  for (let at = 0; at < values.length; at += 1) {
    if (!Number.isFinite(values[at])) continue;
    const distance = far(values[at]);
    if (!distance) continue;
    sum += distance;
    if (found.length < most || distance > found.at(-1).distance) {
      found.push({ at, value: values[at], distance });
      found.sort((a, b) => b.distance - a.distance);
      found.length = Math.min(found.length, most);
    }
  }
  return found.map(({ at, value, distance }) => ({ at, value, share: distance / sum }));
}

/** A token's text with what can't be seen in it: line feeds, tabs, and nothing but spaces. Of an old run only the id is known. */
export function shownToken(text, id) {
  if (text === null || text === undefined) return `⟨${id}⟩`;
  if (text === "") return "∅";
  if (/^ +$/.test(text)) return "·".repeat(text.length);
  return text.replaceAll("\t", "→\t").replaceAll("\n", "↵\n");
}
