// What happened to a group, in time.

import { clock, duration, number, time, visible } from "../format.js";
import { html } from "../vendor/preact.js";
import { Fold } from "./basics.js";

const GAP_S = 1;
const FOLDED = 6;

/**
 * Returns the events with what their line needs: `since` the group was enqueued, the `gap` to the event before if it is long (an eighth of
 * the story, at least a second), and whether the event begins an `attempt`.
 */
function lines(story) {
  const [first, last] = [story[0]?.time ?? 0, story.at(-1)?.time ?? 0];
  const long = Math.max(GAP_S, (last - first) / 8);
  let attempt = null;
  return story.map((event, i) => {
    const gap = i ? event.time - story[i - 1].time : 0;
    const begins = Number.isFinite(event.attempt) && event.attempt !== attempt;
    if (begins) attempt = event.attempt;
    return { ...event, since: event.time - first, gap: gap >= long ? gap : null, begins };
  });
}

/** Returns runs of consecutive lines: those about single completions together, so that a group of 64 has a readable story. */
function runsOf(all) {
  const runs = [];
  for (const line of all) {
    const isSingle = Number.isFinite(line.index) && ["pushed", "scored"].includes(line.what);
    const run = runs.at(-1);
    if (isSingle && run?.isSingle && !line.begins) run.lines.push(line);
    else runs.push({ isSingle, lines: [line] });
  }
  return runs;
}

const TONES = {
  trained: "good",
  evaluated: "good",
  failed: "bad",
  filtered: "warn",
  passed_on: "warn",
  requeued: "warn",
  rejected: "warn",
  rewound: "warn",
  began_anew: "warn",
  dropped: "warn",
  lost: "bad",
};

/** What an event tells besides its text: nothing twice. */
function details(line) {
  const text = line.text || line.what;
  const all = [
    [line.replica, (value) => `on ${visible(value)}`],
    [line.index, (value) => `trajectory ${value}`],
    [line.reward, (value) => `reward ${number(value, 6)}`],
    [line.step, (value) => `step ${value}`],
    [line.build, (value) => `build ${visible(value)}`],
  ];
  return all
    .filter(([value]) => value !== null && value !== undefined && value !== "")
    .map(([value, write]) => (typeof value === "string" && text.includes(value) ? "" : write(value)))
    .filter(
      (detail) =>
        detail && !text.includes(detail) && !detail.split(" ").every((word) => text.split(/[\s,]+/).includes(word)),
    );
}

function Line({ line }) {
  return html`
    ${line.gap !== null && html`<li class="gap">${duration(line.gap)} later</li>`}
    ${line.begins && html`<li class="attempt">attempt ${line.attempt}</li>`}
    <li class=${`event ${TONES[line.what] ?? ""}`}>
      <span class="since" title=${`${time(line.time)} (${clock(line.time)})`}>+${duration(line.since)}</span>
      <span class="what"><b>${visible(line.text || line.what)}</b> <span class="faint">${details(line).join(" · ")}</span>
        ${line.reason && html`<div class="because">${visible(line.reason)}</div>`}</span>
    </li>
  `;
}

/** The story as a line from top to bottom: time since the group was enqueued, and long waits between. */
export const Story = ({ story }) => html`<ol class="story" aria-label="Story">
  ${runsOf(lines(story)).map(({ lines: run }, i) =>
    run.length <= FOLDED
      ? run.map((line, k) => html`<${Line} key=${`${i}.${k}`} line=${line} />`)
      : html`<li key=${i} class="event folded"><${Fold} label=${`+${duration(run[0].since)} to +${duration(run.at(-1).since)}: ${run.length} events of completions`}>
          <ol class="story">${run.map((line, k) => html`<${Line} key=${k} line=${line} />`)}</ol>
        <//></li>`,
  )}
</ol>`;
