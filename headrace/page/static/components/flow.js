// The flow of groups through a run: the states in order, who moves them on, and the other ends.

import { count, number, percent, visible } from "../format.js";
import { html } from "../vendor/preact.js";
import { viewAddress } from "./links.js";

/** The states that a trained group goes through, and what moves it into each. */
const STAGES = [
  ["queued", "enqueue", "Prompts that wait for a lease"],
  ["open", "lease", "Groups that replicas or runners generate"],
  ["scoring", "all pushed", "Groups that wait for scores of environments"],
  ["ready", "all scored", "Complete groups that wait for their step"],
  ["reserved", "reserve", "Groups of the step at work"],
  ["trained", "commit", "Groups in a checkpoint"],
];

/** The other ends of a group, and why it comes there. */
const ENDS = [
  ["failed", "attempts used up, or too many trajectories failed"],
  ["filtered", "all rewards equal"],
  ["evaluated", "validation lane, all scored"],
  ["unused", "left over at the end of the run"],
];

/** A rate as people read it: groups a minute, in one unit so that the arrows can be compared; "" if nobody knows. */
const rate = (perSecond) => (perSecond === null || perSecond === undefined ? "" : `${number(perSecond * 60)}/min`);

const few = (names) => `${names.slice(0, 2).join(", ")}${names.length > 2 ? ` and ${names.length - 2} more` : ""}`;

/** Returns the services above the states that they work on, as `{stage, who, what}`, from what `now` knows; nothing of a run that is down. */
function services(now, newest) {
  if (!now) return [];
  const { replicas = [], runners = [], environments = [] } = now;
  const tokens = replicas.reduce((sum, { tokens_per_s }) => sum + (tokens_per_s ?? 0), 0);
  const inHand = environments.reduce((sum, { in_hand }) => sum + (in_hand ?? 0), 0);
  const capacity = environments.reduce((sum, { capacity }) => sum + (capacity ?? 0), 0);
  const broken = environments.filter((each) => each.broken).map(({ name }) => name);
  const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
  const busy = capacity
    ? `${count(inHand)} of ${count(capacity)} places busy (${percent(inHand / capacity)})`
    : `${count(inHand)} in hand`;
  return [
    { stage: "queued", who: "trainer", what: now.closed ? "no more prompts" : "enqueues prompts" },
    {
      stage: "open",
      who: "rollout",
      what: `${plural(replicas.length, "replica")}${tokens ? `, ${number(tokens)} tokens/s` : ""}${runners.length ? `, ${plural(runners.length, "runner")}` : ""}`,
    },
    {
      stage: "scoring",
      who: "reward",
      what: broken.length ? `open breaker: ${few(broken)}` : busy,
      tone: broken.length ? "bad" : "",
    },
    {
      stage: "reserved",
      who: "trainer",
      what:
        now.next_step === undefined
          ? "trains"
          : `step ${count(now.next_step)}${newest ? `, ${number(newest)} s a step` : ""}`,
    },
  ];
}

const Box = ({ run, state, value, title, tone = "" }) =>
  html`<a class=${`box ${tone}`} href=${viewAddress(run, "prompts", { state })} title=${title} aria-label=${`${state}: ${count(value)}. ${title}`}>
    <b>${count(value)}</b><span>${state}</span>
  </a>`;

/** The flow as boxes, which lead to their groups. `counts` and `perSecond` are by state, the latter of the `window` in words. */
export function Flow({ run, counts, perSecond = {}, window, now, secondsPerStep }) {
  const title = `Groups that come here a minute, ${window}`;
  const above = services(now, secondsPerStep);
  return html`<div class=${`flow ${above.length ? "live" : ""}`} role="group" aria-label="Flow of groups">
    ${STAGES.map(([state, how, about]) => {
      const service = above.find(({ stage }) => stage === state);
      return html`<div class="stage" key=${state}>
        <div class=${`service ${service?.tone ?? ""}`}>${service && html`<b>${service.who}</b><span>${visible(service.what)}</span>`}</div>
        <div class="arrow"><span>${how}</span><i aria-hidden="true"></i><span class="rate" title=${title}>${rate(perSecond[state])}</span></div>
        <${Box} ...${{ run, state, title: about, value: counts[state], tone: state === "trained" ? "good" : "" }} />
      </div>`;
    })}
    <div class="ends" role="group" aria-label="Other ends">
      ${ENDS.map(
        ([state, why]) => html`<div class="end" key=${state}>
          <i aria-hidden="true"></i>
          <${Box} ...${{ run, state, title: why, value: counts[state], tone: state === "failed" && counts[state] ? "bad" : "quiet" }} />
          <span class="faint">${why} <span class="rate" title=${title}>${rate(perSecond[state])}</span></span>
        </div>`,
      )}
    </div>
  </div>`;
}
