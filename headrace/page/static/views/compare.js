// Several runs in the same charts, what each reached, and in what their configurations differ.

import { navigate, rangeOf, setQuery } from "../address.js";
import { useData } from "../api.js";
import { Card, Empty, Failure, formatBest, Loaded, State, Table } from "../components/basics.js";
import { colourOf } from "../components/chart.js";
import { apiPath, viewAddress } from "../components/links.js";
import { useReader } from "../components/series.js";
import { count, duration, visible } from "../format.js";
import { html, useEffect, useMemo, useState } from "../vendor/preact.js";
import { choices, POINTS, Section, search, sections, Tools } from "./metrics.js";

/** What is compared without a search. */
const USUAL =
  "^(reward|accuracy|entropy|grad_norm|kl_penalty|mean_gen_tokens_per_sample|timing/train/total_step_time)$";

/**
 * Returns the metrics of several runs as those of one: each `kind:name` once, empty only where all are. `answers` are the runs' answers, or
 * null for those that are not read.
 */
function unite(answers) {
  const found = new Map();
  for (const answer of answers)
    for (const each of answer?.names ?? []) {
      const key = `${each.kind}:${each.name}`;
      const before = found.get(key);
      found.set(key, { ...each, empty: each.empty && (before?.empty ?? true) });
    }
  const steps = answers.filter(Boolean).map((answer) => answer.steps);
  return {
    names: [...found.values()],
    steps: [Math.min(...steps.map(([first]) => first)), Math.max(...steps.map(([, last]) => last))],
  };
}

/** The server compares at least two runs, and at most twenty. */
const FEWEST = 2;
const MOST = 20;

export function Compare({ query }) {
  const runs = query.getAll("run");
  if (runs.length >= FEWEST) return html`<${Compared} runs=${runs} query=${query} />`;
  const chosen = runs.length ? `${visible(runs[0])} and another run` : "Runs";
  return html`<${Card} title=${`${chosen} side by side`} tools=${html`<${Choose} runs=${runs} query=${query} />`}>
    <${Empty}>Add runs until there are two.<//>
  <//>`;
}

function Compared({ runs, query }) {
  const answer = useData("/api/compare", { run: runs }, { every: 5 });
  return html`<${Loaded} answer=${answer}>
    ${(data) => html`
      <${Card} title=${`${runs.length} runs side by side`} tools=${html`<${Choose} runs=${runs} query=${query} />`}>
        <${Results} runs=${data.runs} query=${query} />
      <//>
      <${Differences} runs=${data.runs} differences=${data.differences} />
      <${Curves} runs=${data.runs} query=${query} />
    `}
  <//>`;
}

/** Adds a run to those that are compared. */
function Choose({ runs, query }) {
  const { data, error } = useData("/api/runs");
  if (error) return html`<${Failure} error=${error} />`;
  const others = (data?.runs ?? []).map(({ id }) => id).filter((id) => !runs.includes(id));
  const add = (id) => {
    const next = new URLSearchParams(query);
    next.append("run", id);
    navigate(`/compare?${next}`, { replace: runs.length > 0 });
  };
  return html`<select aria-label="Add a run" value="" disabled=${!others.length || runs.length >= MOST} onChange=${(event) => event.target.value && add(event.target.value)}>
    <option value="">Add a run …</option>
    ${others.map((id) => html`<option key=${id} value=${id}>${visible(id)}</option>`)}
  </select>`;
}

/** The name of a run with its colour in the charts. */
const Named = ({ run, index }) => html`<span class="named">
  <i class="run-colour" style=${{ background: `var(${colourOf(index)})` }}></i><a href=${viewAddress(run.id)}><b>${visible(run.id)}</b></a>
</span>`;

function Results({ runs, query }) {
  const leave = (id) => {
    const next = new URLSearchParams(query);
    next.delete("run");
    for (const run of runs) if (run.id !== id) next.append("run", run.id);
    navigate(`/compare?${next}`, { replace: true });
  };
  const columns = [
    { name: "id", label: "run", cell: (run) => html`<${Named} run=${run} index=${runs.indexOf(run)} />` },
    { name: "state", label: "state", cell: (run) => html`<${State} run=${run} />` },
    {
      name: "step",
      label: "step",
      numeric: true,
      cell: (run) =>
        html`${count(run.step)}${run.max_steps && html`<span class="faint"> of ${count(run.max_steps)}</span>`}`,
    },
    { name: "best", label: "best", cell: (run) => formatBest(run.best) },
    { name: "pace", label: "a step", numeric: true, cell: (run) => duration(run.seconds_per_step) },
    {
      name: "total",
      label: "its steps",
      numeric: true,
      cell: (run) => duration(run.seconds_per_step && run.step * run.seconds_per_step),
    },
    { name: "algorithm", label: "algorithm", cell: (run) => run.algorithm },
    { name: "model", label: "model", cell: (run) => visible(run.model) },
    {
      name: "leave",
      label: html`<span class="unseen">leave out</span>`,
      cell: (run) => html`<button aria-label=${`leave out ${run.id}`} onClick=${() => leave(run.id)}>×</button>`,
    },
  ];
  return html`<${Table} label="Runs" columns=${columns} rows=${runs} rowKey=${({ id }) => id} />`;
}

const shown = (value) =>
  value === null || value === undefined
    ? html`<span class="faint">not set</span>`
    : html`<code>${visible(typeof value === "string" ? value : JSON.stringify(value))}</code>`;

/** The keys in which the configurations differ; a search where they are many. */
function Differences({ runs, differences }) {
  const [text, setText] = useState("");
  if (!differences.length)
    return html`<${Card} title="Configuration"><${Empty}>${runs.length > 1 ? "The configurations are equal." : "Add a run to compare with."}<//><//>`;
  const found = differences.filter(({ key }) => key.includes(text));
  const columns = [
    { name: "key", label: "key", cell: ({ key }) => html`<code>${visible(key)}</code>` },
    ...runs.map((run, i) => ({
      name: run.id,
      label: html`<i class="run-colour" style=${{ background: `var(${colourOf(i)})` }}></i>${visible(run.id)}`,
      cell: ({ values }) => shown(values[i]),
    })),
  ];
  const tools =
    differences.length > 12 &&
    html`<input type="search" aria-label="Search keys" placeholder="key" value=${text} onInput=${(event) => setText(event.target.value)} />`;
  return html`<${Card} title=${`${differences.length} ${differences.length === 1 ? "key differs" : "keys differ"} in the configurations`} tools=${tools}>
    ${found.length ? html`<${Table} label="Differences" columns=${columns} rows=${found} rowKey=${({ key }) => key} />` : html`<${Empty}>No key matches.<//>`}
  <//>`;
}

/** Reads the metrics of each run, and draws those that the search finds. */
function Curves({ runs, query }) {
  const [answers, setAnswers] = useState({});
  const ids = runs.map(({ id }) => id);
  const chosen = choices(query);
  const range = useMemo(() => rangeOf(query), [query.get("first"), query.get("last")]);
  const { test, error } = search(chosen.re || (chosen.only.length ? "" : USUAL));
  const reader = useReader(
    { points: POINTS, first: range?.[0], last: range?.[1] },
    runs.map(({ step }) => step).join(),
  );
  const { names, steps } = unite(ids.map((id) => answers[id]?.data));
  const found = sections(names, test, chosen.only);
  const broken = ids.filter((id) => answers[id]?.error);
  const shared = { runs: ids, reader, marks: NONE, range, extent: steps, chosen };
  return html`
    ${ids.map((id) => html`<${Names} key=${id} run=${id} tell=${setAnswers} />`)}
    <${Tools} chosen=${chosen} range=${range} error=${error} found=${found}>
      <p class="runs-legend">
        ${runs.map((run, i) => html`<${Named} key=${run.id} run=${run} index=${i} />`)}
        ${!chosen.re && !chosen.only.length && html`<span class="faint">These are the usual metrics. <button onClick=${() => setQuery({ re: "." })}>All metrics</button></span>`}
      </p>
    <//>
    ${broken.map((id) => html`<${Failure} key=${id} error=${`${id}: ${answers[id].error}`} />`)}
    ${!found.length && html`<${Empty}>${names.length ? "No metric matches the search." : "Reading the metrics …"}<//>`}
    ${found.map((each) => html`<${Section} key=${each.section} ...${each} shared=${shared} />`)}
  `;
}

const NONE = [];

/** Reads which metrics a run has: a part of its own, because the number of runs changes. */
function Names({ run, tell }) {
  const { data, error } = useData(apiPath(run, "metrics"));
  useEffect(() => tell((before) => ({ ...before, [run]: { data, error } })), [data, error]);
  return null;
}
