// A run at a glance: where it stands, how groups flow through it, what costs its time, and what needs a person.

import { setQuery } from "../address.js";
import { useData } from "../api.js";
import { Badge, Card, Choice, Empty, Failure, formatEta, Loaded, Table, Tile, Tiles } from "../components/basics.js";
import { Chart, colourOf } from "../components/chart.js";
import { Environments, Replicas, Runners } from "../components/fleet.js";
import { Flow } from "../components/flow.js";
import { apiPath, groupAddress, viewAddress } from "../components/links.js";
import { ago, clock, count, duration, number, percent, time, visible } from "../format.js";
import { html, useEffect, useMemo, useState } from "../vendor/preact.js";

const WINDOWS = [
  ["last", "last step"],
  ["10", "last 10 steps"],
  ["all", "whole run"],
];
const windowText = (window) => WINDOWS.find(([name]) => name === window)[1];

/** Rows of a table here; System has all. */
const FEW = 8;

/** Returns the address of what a finding or an alarm is seen by. */
const evidenceAddress = (run, { view, query = {} }) =>
  view === "group" ? groupAddress(run, query.id ?? query.group, query.index ?? null) : viewAddress(run, view, query);

function steps(value) {
  return `${number(value)} ${value === 1 ? "step" : "steps"}`;
}

/** The tiles of metrics: label, the metrics that may have the value (the first that is there), how it is written, and what its note adds. */
const TILES = [
  ["tokens/s", ["performance/tokens_per_sec", "tokens_per_second"], number],
  ["age", ["avg_trajectory_age", "mean_age"], steps, oldest],
  ["entropy", ["entropy"], number],
  ["mean length", ["mean_gen_tokens_per_sample", "mean_generation_length"], (value) => `${number(value)} tokens`],
  ["failed prompts", ["failed_prompts_total", "failed_prompts"], count],
];

function oldest(metrics) {
  const most = metrics.max_trajectory_age ?? metrics["staleness/max"];
  return most > (metrics.avg_trajectory_age ?? metrics.mean_age) ? `oldest ${steps(most)}` : "";
}

/** Returns the tiles that the newest training step has values for: `[{label, metric, text, note}]`. */
const metricTiles = (metrics, tiles = TILES) =>
  tiles
    .map(([label, names, text, note]) => {
      const metric = names.find((name) => metrics[name] !== undefined && metrics[name] !== null);
      return metric && { label, metric, text: text(metrics[metric]), note: note?.(metrics) ?? "" };
    })
    .filter(Boolean);

const metricAddress = (run, metric) =>
  viewAddress(run, "metrics", { re: `^${metric.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$` });

/** Seconds after which the state of a run that is up is late: its trainer writes it every second. */
const LATE = 10;

/** Says how old the live state is: `{text, tone}`. `at` is the time now; `lost`: the server of the page does not answer. */
function asOf(run, now, at, lost = false) {
  if (!now)
    return run.state === "running"
      ? { text: "The trainer has not written its state yet.", tone: "calm" }
      : {
          text: `Not live: ${run.state}${run.since ? ` since ${time(run.since)}` : ""}. What follows is what its files say.`,
          tone: "calm",
        };
  const age = Math.max(0, at - now.time);
  if (run.state !== "running")
    return {
      text: `Not live: ${run.state}. The last known state is of ${time(now.time)}, ${ago(now.time)}.`,
      tone: "calm",
    };
  const problem = lost ? ": the server of this page does not answer" : age > LATE ? ": the trainer is silent" : "";
  return { text: `As of ${clock(now.time)}, ${ago(now.time)}${problem}`, tone: problem ? "bad" : "good" };
}

export function Overview({ run, query }) {
  const window = WINDOWS.some(([name]) => name === query.get("window")) ? query.get("window") : "10";
  const answer = useData(apiPath(run), { window }, { every: 2 });
  return html`<${Loaded} answer=${answer}>${(data) => html`<${Known} ...${{ run, window, data, lost: answer.error !== null }} />`}<//>`;
}

function Known({ run, window, data, lost }) {
  const { now, flow, alarms = [], checkpoints = [] } = data;
  const live = now && data.run.state === "running" ? now : null;
  return html`
    <div class="tools between">
      <${AsOf} run=${data.run} now=${now} lost=${lost} />
      <${Choice} label="Window" choices=${WINDOWS} value=${window} onChange=${(value) => setQuery({ window: value })} />
    </div>
    <${Trouble} run=${data.run} problems=${data.problems ?? []} />
    <${Facts} run=${run} data=${data} />
    <${Card} title=${`Groups, and how many a minute in the ${windowText(window)}`} tools=${html`<a href=${viewAddress(run, "prompts")}>All groups</a>`}>
      <${Flow} run=${run} counts=${flow.counts} perSecond=${flow.per_s} window=${windowText(window)} now=${live} secondsPerStep=${data.run.seconds_per_step} />
      <${Waits} now=${live} />
    <//>
    <div class="columns">
      <div class="pile">
        <${Findings} run=${run} findings=${data.findings} window=${window} />
        <${Alarms} run=${run} alarms=${alarms} />
        <${Checkpoints} run=${data.run} checkpoints=${checkpoints} />
      </div>
      <${Time} run=${run} parts=${data.time?.parts ?? []} steps=${data.time?.steps ?? {}} window=${window} />
    </div>
    ${live && html`<${Fleet} run=${run} now=${live} />`}
  `;
}

/** How old the state is, counted on every second. */
function AsOf({ run, now, lost }) {
  const [at, setAt] = useState(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setAt(Date.now() / 1000), 1000);
    return () => clearInterval(timer);
  }, []);
  const { text, tone } = asOf(run, now, Math.max(at, Date.now() / 1000), lost);
  return html`<span class=${`as-of ${tone}`}>${text}</span>`;
}

/** Why a run ended, its collapse, and what of its files can't be read. */
const Trouble = ({ run, problems }) => html`
  ${run.error && html`<${Failure} error=${run.error} />`}
  ${run.reason && ["failed", "killed"].includes(run.state) && html`<${Failure} error=${`${run.state}: ${run.reason}`} />`}
  ${run.collapse && html`<${Failure} error=${run.collapse} />`}
  ${problems.map((problem) => html`<${Failure} key=${problem} error=${problem} />`)}
`;

/** The tiles of the newest training step, each with its curve behind it. */
const MetricTiles = ({ run, train, tiles }) =>
  metricTiles(train.metrics, tiles).map(
    ({ label, metric, text, note }) =>
      html`<${Tile} key=${label} label=${label} value=${text} note=${[note, `at step ${count(train.step)}`].filter(Boolean).join(", ")} href=${metricAddress(run, metric)} />`,
  );

const FIRST = [["reward", ["reward"], number]];

function Facts({ run, data }) {
  const { train, validation } = data.newest;
  const { best, state, step, max_steps, seconds_per_step, started } = data.run;
  const heldOut = validation && (validation.metrics.accuracy ?? validation.metrics.reward);
  const name =
    validation?.metrics.partial_credit || validation?.metrics.accuracy === undefined
      ? "held-out reward"
      : "held-out accuracy";
  const note = [
    max_steps && `of ${count(max_steps)}`,
    formatEta(data.run),
    seconds_per_step && `${duration(seconds_per_step)} a step`,
  ];
  return html`<div class="even"><${Tiles}>
    <${Tile} label="state" value=${state} note=${started ? `started ${ago(started)}` : ""} tone=${["failed", "killed"].includes(state) ? "bad" : ""} />
    <${Tile} label="step" value=${count(step)} note=${note.filter(Boolean).join(", ")} href=${viewAddress(run, "timeline")} />
    ${train && html`<${MetricTiles} run=${run} train=${train} tiles=${FIRST} />`}
    ${validation && html`<${Tile} label=${name} value=${number(heldOut)} note=${`at step ${count(validation.step)}`} href=${viewAddress(run, "metrics", { metric: ["validation:accuracy", "validation:reward"] })} />`}
    ${best && html`<${Tile} label="best" value=${number(best.value)} note=${`${visible(best.metric)} at step ${count(best.step)}`} href=${metricAddress(run, best.metric.replace(/^val:/, "validation:"))} />`}
    ${train && html`<${MetricTiles} run=${run} train=${train} tiles=${TILES} />`}
  <//></div>`;
}

/** What the run waits for, and the groups of its validation lane. */
function Waits({ now }) {
  const validation = Object.entries(now?.validation ?? {}).filter(([, groups]) => groups > 0);
  return html`
    ${now?.waits?.length > 0 && html`<p class="waits"><b>Waits:</b> ${now.waits.map((each) => html`<${Badge} key=${each} tone="warn">${visible(each)}<//> `)}</p>`}
    ${validation.length > 0 && html`<p class="waits faint">Validation lane: ${validation.map(([state, groups]) => `${count(groups)} ${state}`).join(", ")}</p>`}
  `;
}

const TONES = { error: "bad", warning: "warn", info: "calm" };

function Findings({ run, findings, window }) {
  const title = `Findings, ${windowText(window)}`;
  if (!findings?.length) return html`<${Card} title=${title}><${Empty}>Nothing stands out.<//><//>`;
  return html`<${Card} title=${title}>
    <ul class="findings">
      ${findings.map(
        (each) => html`<li key=${each.title}>
          <${Badge} tone=${TONES[each.severity]}>${each.severity}<//>
          <div>
            <b>${visible(each.title)}</b>
            ${each.share !== null && each.share !== undefined && html`<span class="faint"> · ${percent(each.share)} of the time</span>`}
            <p>${visible(each.remedy)}</p>
          </div>
          <a href=${evidenceAddress(run, each.evidence)} aria-label=${`Evidence: ${each.title}`}>Evidence</a>
        </li>`,
      )}
    </ul>
  <//>`;
}

/**
 * Returns the parts of the time that took any, in the window or in the run, each with its colour; the rest, which is none of them, is grey.
 */
const partsOf = (parts, steps) =>
  parts
    .map((part, i) => ({ ...part, colour: part.name === "rest" ? "--faint" : colourOf(i) }))
    .filter(({ name, share }) => share > 0 || steps[name]?.some((seconds) => seconds > 0));

/** Where the time of a step goes: one bar of shares, its legend, and the same step by step. */
function Time({ run, parts, steps, window }) {
  const spent = partsOf(parts, steps);
  const known = JSON.stringify([steps, spent.map(({ name }) => name)]);
  const xs = useMemo(() => steps.step ?? [], [known]);
  const series = useMemo(
    () =>
      spent.filter(({ name }) => steps[name]).map(({ name, colour }) => ({ label: name, values: steps[name], colour })),
    [known],
  );
  if (!parts.length) return html`<${Card} title="Time"><${Empty}>No step is done yet.<//><//>`;
  return html`<${Card} title=${`Time of a step, ${windowText(window)}`}>
    <div class="shares" role="img" aria-label=${spent.map(({ name, share }) => `${name} ${percent(share)}`).join(", ")}>
      ${spent.map(({ name, share, colour }) => share > 0 && html`<i key=${name} title=${`${name}: ${percent(share)}`} style=${{ flexGrow: share, background: `var(${colour})` }}></i>`)}
    </div>
    <ul class="parts">
      ${spent.map(
        ({ name, metric, seconds, share, colour }) => html`<li key=${name}>
          <i style=${{ background: `var(${colour})` }}></i>
          ${metric ? html`<a href=${metricAddress(run, metric)}>${visible(name)}</a>` : html`<span>${visible(name)}</span>`}
          <span class="numeric">${duration(seconds)}</span><span class="numeric">${percent(share)}</span>
        </li>`,
      )}
    </ul>
    <h3>Whole run: seconds by step</h3>
    <${Chart} xs=${xs} series=${series} stacked height=${170} label="Seconds of a step by part" />
  <//>`;
}

function Fleet({ run, now }) {
  const { replicas = [], runners = [], environments = [] } = now;
  const all = html`<a href=${viewAddress(run, "system")}>System</a>`;
  return html`<div class="columns">
    <${Card} title=${`${replicas.length} ${replicas.length === 1 ? "replica" : "replicas"}`} tools=${all}>
      <${Replicas} replicas=${replicas} most=${FEW} />
      ${replicas.length > FEW && html`<p class="faint">and ${replicas.length - FEW} more, in <a href=${viewAddress(run, "system")}>System</a></p>`}
      ${runners.length > 0 && html`<${Runners} runners=${runners.slice(0, FEW)} />`}
    <//>
    <${Card} title=${`${environments.length} ${environments.length === 1 ? "environment" : "environments"}`} tools=${all}>
      <${Environments} environments=${environments} most=${FEW} />
      ${environments.length > FEW && html`<p class="faint">and ${environments.length - FEW} more, in <a href=${viewAddress(run, "system")}>System</a></p>`}
    <//>
  </div>`;
}

/** Returns alarms, the newest first, with those of one name at steps in a row as one: `{first, step, name, text, evidence}`. */
function foldAlarms(alarms) {
  const folded = [];
  for (const alarm of [...alarms].sort((a, b) => b.step - a.step)) {
    const before = folded.findLast(({ name }) => name === alarm.name);
    if (before && before.first - alarm.step <= 1) before.first = alarm.step;
    else folded.push({ ...alarm, first: alarm.step });
  }
  return folded;
}

function Alarms({ run, alarms }) {
  if (!alarms.length) return html`<${Card} title="Alarms"><${Empty}>No alarm.<//><//>`;
  return html`<${Card} title=${`${count(alarms.length)} ${alarms.length === 1 ? "alarm" : "alarms"}`}>
    <div class="low" role="region" aria-label="Alarms" tabindex="0"><ul class="findings">
      ${foldAlarms(alarms).map(
        ({ first, step, name, text, evidence }) => html`<li key=${`${step} ${name}`}>
          <${Badge} tone="bad">${first === step ? `step ${count(step)}` : `steps ${count(first)}–${count(step)}`}<//>
          <div><b>${visible(name)}</b><p>${visible(text)}</p></div>
          ${evidence && html`<a href=${evidenceAddress(run, evidence)} aria-label=${`Evidence: ${name} at step ${step}`}>Evidence</a>`}
        </li>`,
      )}
    </ul></div>
  <//>`;
}

/** The newest checkpoints that are kept. */
function Checkpoints({ run, checkpoints }) {
  const kept = checkpoints.filter((each) => each.kept);
  const newest = [...kept].sort((a, b) => b.step - a.step).slice(0, FEW);
  if (!newest.length)
    return html`<${Card} title="Checkpoints"><${Empty}>${checkpoints.length ? "None is kept." : "No checkpoint yet."}<//><//>`;
  const columns = [
    {
      name: "step",
      label: "step",
      cell: ({ step, best }) => html`${count(step)}${best && html` <${Badge} tone="good">best<//>`}`,
    },
    { name: "metric", label: run.best?.metric ?? "metric", numeric: true, cell: ({ metric }) => number(metric, 4) },
  ];
  const [older, gone] = [kept.length - newest.length, checkpoints.length - kept.length];
  const rest = [older && `${count(older)} older`, gone && `${count(gone)} removed`].filter(Boolean).join(", ");
  return html`<${Card} title=${`${count(kept.length)} ${kept.length === 1 ? "checkpoint" : "checkpoints"}`}>
    <${Table} label="Checkpoints" columns=${columns} rows=${newest} rowKey=${({ step }) => step} />
    ${rest && html`<p class="faint">and ${rest}</p>`}
  <//>`;
}
