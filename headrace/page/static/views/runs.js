// All runs of the folder: state, steps, best value, and the choice of some to lay over one another.

import { navigate, setQuery } from "../address.js";
import { useData } from "../api.js";
import { Card, Empty, Failure, formatBest, formatEta, Loaded, Sparkline, State, Table } from "../components/basics.js";
import { viewAddress } from "../components/links.js";
import { ago, count, duration, visible } from "../format.js";
import { html, useState } from "../vendor/preact.js";

/** The order of the rows, by the name in the address. */
const ORDERS = {
  started: (run) => run.started ?? 0,
  id: (run) => run.id,
  state: (run) => run.state,
  step: (run) => run.step ?? -1,
  best: (run) => run.best?.value ?? Number.NEGATIVE_INFINITY,
};

/** Returns the runs that match the filter, in the order of the address (default: the newest first). */
function choose(runs, text, sorted) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (run) => {
    const where = [run.id, run.state, run.model, run.algorithm, ...(run.environments ?? [])].join(" ").toLowerCase();
    return words.every((word) => where.includes(word));
  };
  const by = ORDERS[sorted.replace("-", "")] ?? ORDERS.started;
  const sign = sorted.startsWith("-") ? -1 : 1;
  return runs.filter(matches).sort((a, b) => sign * (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : 0));
}

export function Runs({ query }) {
  const answer = useData("/api/runs", {}, { every: 5 });
  const [chosen, setChosen] = useState(() => new Set());
  const sorted = query.get("sort") ?? "-started";
  const text = query.get("text") ?? "";
  const toggle = (id) => {
    const next = new Set(chosen);
    next.delete(id) || next.add(id);
    setChosen(next);
  };
  const compare = () => navigate(`/compare?${[...chosen].map((id) => `run=${encodeURIComponent(id)}`).join("&")}`);
  const columns = [
    {
      name: "choose",
      label: html`<span class="unseen">compare</span>`,
      cell: (run) =>
        html`<input type="checkbox" aria-label=${`compare ${run.id}`} checked=${chosen.has(run.id)} onChange=${() => toggle(run.id)} />`,
    },
    {
      name: "id",
      label: "run",
      sort: "id",
      cell: (run) =>
        html`<a href=${viewAddress(run.id)}><b>${visible(run.id)}</b></a><div class="faint">${visible(run.model)}</div>`,
    },
    { name: "state", label: "state", sort: "state", cell: (run) => html`<${State} run=${run} />` },
    {
      name: "step",
      label: "step",
      sort: "step",
      numeric: true,
      cell: (
        run,
      ) => html`${run.step === null ? "–" : count(run.step)}${run.max_steps ? html`<span class="faint"> of ${count(run.max_steps)}</span>` : ""}
        <div class="faint">${run.state === "running" ? formatEta(run) : ""}</div>`,
    },
    { name: "best", label: "best", sort: "best", cell: (run) => formatBest(run.best) },
    { name: "curve", label: "curve", cell: (run) => run.spark && html`<${Sparkline} points=${run.spark.points} />` },
    { name: "speed", label: "a step", numeric: true, cell: (run) => duration(run.seconds_per_step) },
    { name: "started", label: "started", sort: "started", cell: (run) => ago(run.started) },
  ];
  return html`<${Loaded} answer=${answer}>
    ${(data) => {
      const rows = choose(data.runs, text, sorted);
      const tools = html`
        <input
          type="search"
          placeholder="name, state, model, environment"
          aria-label="Filter"
          value=${text}
          onInput=${(event) => setQuery({ text: event.target.value })}
        />
        <button disabled=${chosen.size < 2} onClick=${compare}>Compare ${chosen.size || ""}</button>
      `;
      return html`<${Card} title=${`${data.runs.length} runs in ${data.folder}`} tools=${tools}>
        ${
          rows.length
            ? html`<${Table} label="Runs" columns=${columns} rows=${rows} rowKey=${(run) => run.id} sorted=${sorted} onSort=${(sort) => setQuery({ sort })} />`
            : html`<${Empty}>${data.runs.length ? "No run matches the filter." : "No run yet. Start one: headrace up examples/arithmetic_tiny.yaml"}<//>`
        }
        ${rows.filter((run) => run.error || run.reason).map((run) => html`<${Failure} key=${run.id} error=${`${run.id}: ${run.error ?? run.reason}`} />`)}
      <//>`;
    }}
  <//>`;
}
