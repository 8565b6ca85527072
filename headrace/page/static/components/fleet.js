// What is at work in a run: replicas, runners and environments, as `now` of a run has them.

import { count, duration, number, percent, visible } from "../format.js";
import { html } from "../vendor/preact.js";
import { Badge, Empty, Table } from "./basics.js";

/** A bar of how much of something is in use, with the numbers beside it. `share` is 0 … 1, or null if nobody knows. */
const Busy = ({ share, label, text }) => {
  const filled = Math.min(1, Math.max(0, share ?? 0));
  return html`<span class="busy">
    ${share !== null && share !== undefined && html`<span class=${`track ${share >= 0.95 ? "full" : ""}`} role="img" aria-label=${`${label}: ${percent(share)}`}><i style=${{ width: `${filled * 100}%` }}></i></span>`}
    <span>${text}</span>
  </span>`;
};

const STATES = { HEALTHY: "good", LOADING: "calm", STALE: "warn", DEAD: "bad", QUARANTINED: "bad" };

/** The tone of a replica's state: what isn't at work stands out. */
export const toneOf = (state) => STATES[state] ?? "calm";

const GRAVITY = { bad: 0, warn: 1, calm: 2, good: 3 };

/** Returns replicas with those first that need a person. */
const gravestFirst = (replicas) =>
  [...replicas].sort((a, b) => GRAVITY[toneOf(a.state)] - GRAVITY[toneOf(b.state)] || (a.id < b.id ? -1 : 1));

/** Returns environments, the broken ones first, then those with the most waiting. */
const brokenFirst = (environments) =>
  [...environments].sort((a, b) => Number(b.broken) - Number(a.broken) || (b.waiting ?? 0) - (a.waiting ?? 0));

/** Whether any of `rows` knows a field; a column that nobody knows is left out. */
const has = (rows, name) => rows.some((row) => row[name] !== null && row[name] !== undefined);

const REPLICA_COLUMNS = [
  { name: "id", label: "replica", cell: ({ id }) => html`<code class="id">${visible(id)}</code>` },
  {
    name: "state",
    label: "state",
    cell: ({ state, reason }) =>
      html`<${Badge} tone=${toneOf(state)}>${visible(String(state).toLowerCase())}<//>${reason ? html`<div class="faint said" title=${visible(reason)}>${visible(reason)}</div>` : ""}`,
  },
  { name: "version", label: "weights", numeric: true, cell: ({ version }) => count(version) },
  { name: "holding", label: "groups", numeric: true, cell: ({ holding }) => count(holding) },
  { name: "tokens_per_s", label: "tokens/s", numeric: true, cell: (row) => number(row.tokens_per_s) },
  { name: "queue", label: "in its engine", numeric: true, cell: ({ queue }) => count(queue) },
  {
    name: "kv_use",
    label: "KV cache",
    cell: ({ kv_use }) => html`<${Busy} share=${kv_use} label="KV cache" text=${percent(kv_use)} />`,
  },
  { name: "preemptions_per_s", label: "preempted/s", numeric: true, cell: (row) => number(row.preemptions_per_s) },
  { name: "prefix_hits", label: "prefix hits", numeric: true, full: true, cell: (row) => percent(row.prefix_hits) },
  { name: "running", label: "computed", numeric: true, full: true, cell: ({ running }) => count(running) },
  { name: "waiting", label: "waiting", numeric: true, full: true, cell: ({ waiting }) => count(waiting) },
  {
    name: "logprob_error",
    label: "log-probability error",
    numeric: true,
    full: true,
    cell: (row) => number(row.logprob_error),
  },
  { name: "seen_s_ago", label: "seen", numeric: true, full: true, cell: (row) => `${duration(row.seen_s_ago)} ago` },
  { name: "device", label: "device", full: true, cell: ({ device }) => visible(device) },
  { name: "address", label: "address", full: true, cell: ({ address }) => html`<code>${visible(address)}</code>` },
];

/** A table of replicas with what is known of them. `full`: with addresses and devices. `most`: no more rows than this. */
export function Replicas({ replicas, full = false, most = replicas.length }) {
  if (!replicas.length) return html`<${Empty}>No replica is attached.<//>`;
  const columns = REPLICA_COLUMNS.filter((column) => has(replicas, column.name) && (full || !column.full));
  const rows = gravestFirst(replicas).slice(0, most);
  return html`<div class=${full ? "" : "short"}><${Table} label="Replicas" tall=${full} columns=${columns} rows=${rows} rowKey=${({ id }) => id} /></div>`;
}

const RUNNER_COLUMNS = [
  { name: "id", label: "runner", cell: ({ id }) => html`<code class="id">${visible(id)}</code>` },
  {
    name: "alive",
    label: "state",
    cell: ({ alive }) => html`<${Badge} tone=${alive ? "good" : "bad"}>${alive ? "alive" : "silent"}<//>`,
  },
  { name: "holding", label: "groups", numeric: true, cell: ({ holding }) => count(holding) },
  { name: "seen_s_ago", label: "seen", numeric: true, cell: (row) => `${duration(row.seen_s_ago)} ago` },
  { name: "address", label: "address", cell: ({ address }) => html`<code>${visible(address)}</code>` },
];

export const Runners = ({ runners }) =>
  html`<${Table} label="Runners" tall columns=${RUNNER_COLUMNS.filter(({ name }) => has(runners, name))} rows=${runners} rowKey=${({ id }) => id} />`;

const ENVIRONMENT_COLUMNS = [
  { name: "name", label: "environment", cell: ({ name }) => html`<b>${visible(name)}</b>` },
  {
    name: "broken",
    label: "breaker",
    cell: ({ broken, trouble, message }) =>
      html`<${Badge} tone=${broken ? "bad" : "good"}>${broken ? `open: ${visible(trouble ?? "broken")}` : "closed"}<//>${message ? html`<div class="faint said" title=${visible(message)}>${visible(message)}</div>` : ""}`,
  },
  {
    name: "in_hand",
    label: "in hand",
    cell: ({ in_hand, capacity }) =>
      html`<${Busy} share=${capacity ? in_hand / capacity : null} label="places busy" text=${capacity ? `${count(in_hand)} of ${count(capacity)}` : count(in_hand)} />`,
  },
  { name: "waiting", label: "waiting", numeric: true, cell: ({ waiting }) => count(waiting) },
  { name: "p50_s", label: "p50", numeric: true, cell: ({ p50_s }) => duration(p50_s) },
  { name: "p99_s", label: "p99", numeric: true, cell: ({ p99_s }) => duration(p99_s) },
  { name: "scored_per_s", label: "scores/s", numeric: true, full: true, cell: (row) => number(row.scored_per_s) },
  {
    name: "build",
    label: "build",
    full: true,
    cell: ({ build }) => (build ? html`<code>${visible(build)}</code>` : "–"),
  },
];

/** A table of environments: how busy, how fast, and why one is broken. `full`: with builds. `most`: no more rows than this. */
export function Environments({ environments, full = false, most = environments.length }) {
  if (!environments.length) return html`<${Empty}>No environment is known.<//>`;
  const columns = ENVIRONMENT_COLUMNS.filter((column) => has(environments, column.name) && (full || !column.full));
  return html`<div class=${full ? "" : "short"}><${Table} label="Environments" columns=${columns} rows=${brokenFirst(environments).slice(0, most)} rowKey=${({ name }) => name} /></div>`;
}
