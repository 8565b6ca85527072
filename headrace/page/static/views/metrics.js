// Every metric of a run as curves, in sections.

import { rangeOf, setQuery } from "../address.js";
import { useData } from "../api.js";
import { Choice, Empty, Failure, Fold, Loaded } from "../components/basics.js";
import { Chart, colourOf, dashesOf } from "../components/chart.js";
import { align, smooth } from "../components/curves.js";
import { apiPath } from "../components/links.js";
import { Problems } from "../components/problems.js";
import { InView, useReader, useSeries } from "../components/series.js";
import { count, visible } from "../format.js";
import { html, useMemo } from "../vendor/preact.js";

/** Points of a curve: more than a chart has pixels show nothing more. */
export const POINTS = 500;

/** How a mark of each kind is drawn: its sign above the line, and its colour. */
const MARKS = {
  build: { sign: "B", colour: "--mark", label: "build" },
  rewind: { sign: "R", colour: "--warn", label: "rewind" },
  configuration: { sign: "C", colour: "--accent", label: "configuration" },
  collapse: { sign: "!", colour: "--bad", label: "collapse" },
};

/** Returns `{test(kind, name), error}` of a search: a regular expression on `name` and `kind:name`. A bad one finds everything. */
export function search(text) {
  try {
    const pattern = new RegExp(text, "i");
    return { test: (kind, name) => pattern.test(name) || pattern.test(`${kind}:${name}`), error: null };
  } catch (error) {
    return { test: () => true, error: `${text} is not a regular expression: ${error.message}` };
  }
}

/**
 * Returns the charts of the metrics that are found, by section: `[{section, charts: [{name, help, unit, metrics}], empty: [name]}]`. Metrics of
 * one name, in training and in validation, are in one chart. `only`: `kind:name` of those to show, if any.
 */
export function sections(names, test, only = []) {
  const found = new Map();
  const matches = ({ kind, name }) => test(kind, name) && (!only.length || only.includes(`${kind}:${name}`));
  for (const { kind, name, section, help, unit, empty } of names.filter(matches)) {
    if (!found.has(section)) found.set(section, new Map());
    const charts = found.get(section);
    const chart = charts.get(name) ?? { name, help, unit, metrics: [] };
    charts.set(name, {
      ...chart,
      help: chart.help || help,
      metrics: empty ? chart.metrics : [...chart.metrics, `${kind}:${name}`],
    });
  }
  return [...found].map(([section, charts]) => {
    const all = [...charts.values()];
    return {
      section,
      charts: all.filter(({ metrics }) => metrics.length),
      empty: all.filter(({ metrics }) => !metrics.length).map(({ name }) => name),
    };
  });
}

/**
 * Returns the series of a chart from those read, with the original faint behind if they are smoothed. `labelled(run, metric)` names one, and
 * `styled(run, metric)` is how it is drawn.
 */
function curvesOf(found, runs, metrics, weight, labelled, styled) {
  const read = runs.flatMap((run) =>
    metrics
      .filter((metric) => found[run]?.[metric])
      .map((metric) => ({
        ...unbanded(found[run][metric], runs.length > 1),
        label: labelled(run, metric),
        ...styled(run, metric),
      })),
  );
  const { xs, curves } = align(read);
  const missing = read.reduce((sum, each) => sum + (each.missing ?? 0), 0);
  if (!weight) return { xs, series: curves, missing };
  const behind = curves.map(({ low, high, ...each }) => ({ ...each, faint: true, of: each.label, dashed: undefined }));
  return {
    xs,
    series: [...behind, ...curves.map(({ low, high, ...each }) => ({ ...each, values: smooth(each.values, weight) }))],
    missing,
  };
}

/** A band for each of several runs would hide the others' lines. */
const unbanded = ({ low, high, ...series }, several) => (several ? series : { ...series, low, high });

/** Stands between the names of closed sections in the address; names have commas. */
const BETWEEN = "|";

/** The choices of a view of curves, as they are in the address. */
export const choices = (query) => ({
  re: query.get("re") ?? "",
  only: query.getAll("metric"),
  weight: Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0)),
  log: query.get("scale") === "log",
  closed: (query.get("closed") ?? "").split(BETWEEN).filter(Boolean),
  wide: query.get("wide"),
});

export function Metrics({ run, query }) {
  const answer = useData(apiPath(run, "metrics"), {}, { every: 5 });
  return html`<${Loaded} answer=${answer}>${(data) => html`<${Found} run=${run} query=${query} data=${data} />`}<//>`;
}

function Found({ run, query, data }) {
  const chosen = choices(query);
  const range = useMemo(() => rangeOf(query), [query.get("first"), query.get("last")]);
  const { test, error } = search(chosen.re);
  const found = sections(data.names, test, chosen.only);
  const reader = useReader({ points: POINTS, first: range?.[0], last: range?.[1] }, data.steps.join());
  const marks = useMemo(
    () =>
      data.marks.map(({ step, kind, text }) => ({
        x: step,
        text: `${MARKS[kind]?.label ?? kind} at ${step}: ${text}`,
        ...MARKS[kind],
      })),
    [JSON.stringify(data.marks)],
  );
  const shared = { runs: [run], reader, marks, range, extent: data.steps, chosen };
  return html`
    <${Tools} chosen=${chosen} range=${range} error=${error} found=${found}><${Marks} marks=${data.marks} /><${Problems} of=${data} /><//>
    ${!found.length && html`<${Empty}>${data.names.length ? "No metric matches the search." : "This run has no metrics yet: its first step is not done."}<//>`}
    ${found.map((each) => html`<${Section} key=${each.section} ...${each} shared=${shared} />`)}
  `;
}

/** The tools above curves: search, smoothing, scale, and the steps in view. */
export function Tools({ chosen, range, error, found, children }) {
  const { re, only, weight, log } = chosen;
  return html`<section class="card sticky">
    <div class="tools">
      <input type="search" class="code" placeholder="regular expression: reward|entropy" aria-label="Search metrics by regular expression" aria-invalid=${Boolean(error)} value=${re} onInput=${(event) => setQuery({ re: event.target.value })} />
      <label class="slider">
        smoothing
        <input type="range" min="0" max="0.99" step="0.01" value=${weight} onInput=${(event) => setQuery({ smooth: Number(event.target.value) || null })} />
        <output>${weight.toFixed(2)}</output>
      </label>
      <${Choice} label="Scale" choices=${[["linear", "linear"], ["log", "log"]]} value=${log ? "log" : "linear"} onChange=${(scale) => setQuery({ scale: scale === "log" ? scale : null })} />
      ${
        range
          ? html`<span>steps ${count(range[0])} – ${count(range[1])}</span> <button onClick=${() => setQuery({ first: null, last: null })}>All steps</button>`
          : html`<span class="faint">Select a range in a chart to zoom.</span>`
      }
      ${only.length > 0 && html`<span class="badge" title=${only.map(visible).join("\n")}>${only.length === 1 ? visible(only[0]) : `${only.length} metrics`}</span> <button onClick=${() => setQuery({ metric: null })}>All metrics</button>`}
    </div>
    ${error && html`<${Failure} error=${error} />`}
    ${found.length > 1 && html`<${Menu} found=${found} closed=${chosen.closed} />`} ${children}
  </section>`;
}

const idOf = (section) => `section-${section.replace(/\W+/g, "-")}`;

/** A button for each section, which opens it and goes there. */
function Menu({ found, closed }) {
  const goTo = (section) => {
    setQuery({ closed: closed.filter((each) => each !== section).join(BETWEEN) });
    requestAnimationFrame(() => document.getElementById(idOf(section))?.scrollIntoView());
  };
  const all = closed.length < found.length ? found.map(({ section }) => section) : [];
  return html`<nav class="sections" aria-label="Sections">
    ${found.map(({ section, charts }) => html`<button key=${section} class="plain" onClick=${() => goTo(section)}>${visible(section)} <span class="faint">${charts.length}</span></button>`)}
    <button class="plain" onClick=${() => setQuery({ closed: all.join(BETWEEN) })}>${all.length ? "Close all" : "Open all"}</button>
  </nav>`;
}

/** What happened at which step, as it is marked in the charts. */
function Marks({ marks }) {
  if (!marks.length) return null;
  return html`<${Fold} label=${marks.length === 1 ? "1 mark" : `${marks.length} marks`}>
    <ul class="marks" tabindex="0" aria-label="Marks">
      ${marks.map(
        ({ step, kind, text }) => html`<li key=${`${step} ${kind} ${text}`}>
          <b class=${`sign ${kind}`} aria-hidden="true">${MARKS[kind]?.sign ?? "•"}</b> step ${count(step)} · ${MARKS[kind]?.label ?? kind}: ${visible(text)}
        </li>`,
      )}
    </ul>
  <//>`;
}

/** A section of charts, which its heading shows or hides. */
export function Section({ section, charts, empty, shared }) {
  const { chosen } = shared;
  const closed = chosen.closed.includes(section);
  const next = closed ? chosen.closed.filter((each) => each !== section) : [...chosen.closed, section];
  return html`<section class="section" id=${idOf(section)}>
    <h2>
      <button class="plain" aria-expanded=${!closed} onClick=${() => setQuery({ closed: next.join(BETWEEN) })}>
        ${closed ? "▸" : "▾"} ${visible(section)} <span class="faint">${charts.length}</span>
      </button>
    </h2>
    ${!closed && html`<div class="charts">${charts.map((chart) => html`<${MetricChart} key=${chart.name} ...${chart} ...${shared} />`)}</div>`}
    ${!closed && empty.length > 0 && html`<p class="empty">Empty, no value in any step: ${empty.map((name) => html`<code key=${name}>${visible(name)}</code> `)}</p>`}
  </section>`;
}

const kindOf = (metric) => metric.slice(0, metric.indexOf(":"));
const KINDS = { train: 0, validation: 1 };

/** Puts the range that a person has chosen into the address: whole steps; nulls show all. */
const zoom = (first, last) =>
  setQuery(first === null ? { first: null, last: null } : { first: Math.floor(first), last: Math.ceil(last) });

/**
 * The chart of a metric, in training and in validation; of several runs, each with a colour of its own. It is made anew only when what it
 * shows has changed: there are hundreds, and the address changes with each letter of a search.
 */
function MetricChart({ name, help, unit, metrics, runs, reader, marks, range, extent, chosen }) {
  const [wide, { weight, log }] = [chosen.wide === name, chosen];
  return useMemo(
    () =>
      html`<${Framed} ...${{ name, help, unit, metrics, runs, reader, marks, range, extent, weight, log, wide }} />`,
    [name, help, unit, metrics.join(), runs.join(), reader, marks, range, extent.join(), weight, log, wide],
  );
}

function Framed({ name, help, unit, wide, ...shown }) {
  const height = wide ? 380 : 170;
  return html`<${InView} class=${`card metric ${wide ? "wide" : ""}`} height=${height + 92} label=${name}>
    ${(active) => html`
      <header>
        <div>
          <h3><code>${visible(name)}</code> ${unit && html`<span class="faint">${visible(unit)}</span>`}</h3>
          <p class="faint help" title=${visible(help)}>${visible(help)}</p>
        </div>
        <button class="plain" aria-pressed=${wide} aria-label=${`${name}: ${wide ? "small" : "large"}`} title=${wide ? "Small" : "Large"} onClick=${() => setQuery({ wide: wide ? null : name })}>${wide ? "⤡" : "⤢"}</button>
      </header>
      ${active && html`<${Curves} name=${name} height=${height} ...${shown} />`}
    `}
  <//>`;
}

function Curves({ name, metrics, runs, reader, marks, range, extent, weight, log, height }) {
  const { found, error, params } = useSeries(reader, runs, metrics, true);
  const several = runs.length > 1;
  const { xs, series, missing } = useMemo(() => {
    const labelled = (run, metric) =>
      several ? `${run}${metrics.length > 1 ? ` ${kindOf(metric)}` : ""}` : kindOf(metric);
    const styled = (run, metric) => ({
      colour: colourOf(several ? runs.indexOf(run) : (KINDS[kindOf(metric)] ?? 0)),
      dashed:
        kindOf(metric) === "validation" && metrics.length > 1 ? [5, 3] : dashesOf(several ? runs.indexOf(run) : 0),
    });
    return curvesOf(found, runs, metrics, weight, labelled, styled);
  }, [found, runs.join(), metrics.join(), weight]);
  if (error && !series.length) return html`<${Failure} error=${error} />`;
  if (!params) return html`<p class="empty" aria-busy="true">Reading …</p>`;
  return html`
    <${Chart} ...${{ xs, series, height, log, marks, range, extent, label: name, sync: "metrics", onZoom: zoom }} />
    ${missing > 0 && html`<p class="outside">${count(missing)} ${missing === 1 ? "value is" : "values are"} not a finite number</p>`}
  `;
}
