// One group: its prompt, what happened to it, and its completions side by side.

import { navigate, setQuery } from "../address.js";
import { useData } from "../api.js";
import { Badge, Card, Choice, Empty, Failure, Fold, Loaded, Text } from "../components/basics.js";
import { Completion, fold, ORDERS, scalesOf } from "../components/completions.js";
import { diffWords } from "../components/diff.js";
import { useKeys } from "../components/keys.js";
import { apiPath, groupAddress, toneOf, viewAddress } from "../components/links.js";
import { LongText, Messages } from "../components/messages.js";
import { Problems } from "../components/problems.js";
import { Histogram, RewardStrip } from "../components/rewards.js";
import { Story } from "../components/story.js";
import { count, duration, number, time, visible } from "../format.js";
import { html, useMemo } from "../vendor/preact.js";

/** With more completions than this each is shown smaller, and what the environment said is folded. */
const MANY = 16;

const ENDS = ["trained", "filtered", "failed", "evaluated", "unused"];

export function Group({ run, params, query }) {
  // A group that has ended isn't read again: its completions may be megabytes.
  const every = (data) => (ENDS.includes(data?.state) ? 0 : 10);
  const answer = useData(apiPath(run, "groups", params.group), {}, { every });
  const group = answer.data;
  const go = (id) => id && navigate(groupAddress(run, id));
  useKeys({ n: () => go(group?.next), p: () => go(group?.previous), u: () => navigate(viewAddress(run, "prompts")) });
  return html`<${Loaded} answer=${answer}>
    ${(data) => html`
      <${Head} run=${run} group=${data} />
      <${Problems} of=${data} />
      ${data.state === "failed" && html`<${Failed} group=${data} />`}
      <div class="group-parts">
        <div><${Prompt} group=${data} /></div>
        <div class="told">
          <${Card} title="Story" tools=${html`<span class="faint">${data.enqueued > 0 && time(data.enqueued)}${ENDS.includes(data.state) ? "" : ", not at its end yet"}</span>`}>
            ${data.story.length ? html`<${Story} story=${data.story} />` : html`<${Empty}>No events of this group are recorded.<//>`}
          <//>
        </div>
        <div class="all"><${Completions} run=${run} group=${data} query=${query} /></div>
      </div>
    `}
  <//>`;
}

function Head({ run, group }) {
  const facts = [
    ["step", group.step === null ? "–" : count(group.step)],
    ["mean reward", number(group.mean)],
    ["spread", number(group.spread)],
    ["age", count(group.age)],
    ["attempts", count(group.attempts)],
    ["took", group.ended > group.enqueued ? duration(group.ended - group.enqueued) : "–"],
    ["environment", visible(group.environment)],
    ["build", visible(group.build ?? "–")],
    ["task", visible(group.task || "–")],
    ["epoch", count(group.epoch)],
  ];
  const neighbour = (id, label, key) =>
    id
      ? html`<a class="button" href=${groupAddress(run, id)} title=${`${visible(id)} (key ${key})`}>${label}</a>`
      : html`<span class="button off">${label}</span>`;
  return html`<section class="card head" aria-label="Group">
    <header>
      <h2>${visible(group.id)} <${Badge} tone=${toneOf(group.state)}>${group.state}<//>${group.lane === "validation" && html` <${Badge}>validation<//>`}</h2>
      <nav class="tools" aria-label="Neighbours">${neighbour(group.previous, "‹ previous", "p")}${neighbour(group.next, "next ›", "n")}</nav>
    </header>
    <dl class="numbers">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <nav class="links" aria-label="Related">
      ${group.step !== null && html`<a href=${viewAddress(run, "prompts", { step: group.step })}>groups of step ${group.step}</a>`}
      ${group.step !== null && html`<a href=${viewAddress(run, "metrics", { first: Math.max(0, group.step - 10), last: group.step + 10 })}>metrics around step ${group.step}</a>`}
      ${group.enqueued > 0 && html`<a href=${viewAddress(run, "timeline", { first: group.enqueued.toFixed(3), last: (group.ended ?? group.enqueued + 60).toFixed(3) })}>this time in the timeline</a>`}
      ${group.source && html`<a href=${viewAddress(run, "prompts", { row: `${group.source.file}:${group.source.line}` })}>${visible(group.source.file)}:${group.source.line}</a>`}
      ${group.replicas.map((each) => html`<a key=${each} href=${viewAddress(run, "prompts", { replica: each })}>${visible(each)}</a>`)}
    </nav>
  </section>`;
}

const Prompt = ({ group }) => html`<${Card} title="Prompt">
  ${group.messages ? html`<${Messages} messages=${group.messages} />` : html`<${LongText}>${group.prompt}<//>`}
  ${
    group.expected !== null && group.expected !== undefined
      ? html`<h3>Expected answer</h3><${LongText}>${group.expected}<//>`
      : html`<${Empty}>The data set gives no expected answer.<//>`
  }
<//>`;

/** Why a group failed; the traceback that an environment gave, if there is one. */
function Failed({ group }) {
  const traces = [
    ...new Set(group.trajectories.map((each) => each.traceback ?? each.metadata?.traceback).filter(Boolean)),
  ];
  const messages = [...new Set(group.trajectories.map((each) => each.message).filter(Boolean))];
  return html`<${Failure} error=${group.reason || "It failed, and no reason is recorded."} />
    ${messages.map((message) => html`<${Failure} key=${message} error=${message} />`)}
    ${traces.map((trace) => html`<${Fold} key=${trace} label="traceback" open><${Text}>${trace}<//><//>`)}`;
}

/** Returns the two completions to compare after one more is chosen: the newest choice comes last; choosing one again removes it. */
function chooseTwo(chosen, index) {
  if (chosen.includes(index)) return chosen.filter((each) => each !== index);
  return [...chosen, index].slice(-2);
}

const chosenOf = (query) => (query.get("compare") ?? "").split(",").filter(Boolean).map(Number);

function Completions({ run, group, query }) {
  const all = group.trajectories;
  const [order, isFolded, chosen] = [query.get("by") ?? "index", query.get("fold") !== "no", chosenOf(query)];
  const shown = useMemo(() => fold(all, order, isFolded), [all, order, isFolded]);
  if (!all.length)
    return html`<${Card} title="Completions"><${Empty}>It has no completions${ENDS.includes(group.state) ? "" : " yet"}.<//><//>`;
  const rewards = all.map((each) => each.reward);
  const scales = scalesOf(all);
  const isMany = shown.length > MANY;
  const choose = (index) => setQuery({ compare: chooseTwo(chosen, index).join(",") });
  const letter = (same) => same.map((each) => "AB"[chosen.indexOf(each.index)]).find(Boolean);
  const tools = html`
    <${Choice} label="Order" choices=${ORDERS.map(([name, label]) => [name, label])} value=${order} onChange=${(by) => setQuery({ by: by === "index" ? null : by })} />
    <label class="check"><input type="checkbox" checked=${isFolded} onChange=${() => setQuery({ fold: isFolded ? "no" : null })} /> fold equal ones</label>
  `;
  return html`
    <${Card} title=${`${all.length} completion${all.length === 1 ? "" : "s"}`} tools=${tools}>
      <div class="rewards">
        <div><h3>Rewards by index</h3><${RewardStrip} rewards=${rewards} scale=${scales.reward} /></div>
        <div class="grow"><h3>How many have which reward</h3><${Histogram} values=${rewards} label="Rewards" /></div>
      </div>
      ${chosen.length > 0 && html`<${Comparison} all=${all} chosen=${chosen} clear=${() => setQuery({ compare: null })} />`}
      <div class=${`completions ${isMany ? "many" : ""}`}>
        ${shown.map((same) => html`<${Completion} key=${same[0].index} run=${run} group=${group.id} same=${same} scales=${scales} chosen=${letter(same)} choose=${choose} unkept=${group.unkept} isMany=${isMany} isAlone=${all.length === 1} />`)}
      </div>
    <//>
  `;
}

/** The words that differ between two completions. */
function Comparison({ all, chosen, clear }) {
  const [a, b] = chosen.map((index) => all.find((each) => each.index === index));
  const texts = [a?.content ?? "", b?.content ?? ""];
  const parts = useMemo(() => (b ? diffWords(...texts) : []), texts);
  const close = html`<button onClick=${clear}>Close</button>`;
  if (!b)
    return html`<div class="comparison"><header>Completion ${chosen[0]} is chosen: choose another one to see the differences. ${close}</header></div>`;
  const isKnown = [a, b].every((each) => each?.kept && each.content !== null);
  return html`<div class="comparison" aria-label="Differences">
    <header><span>From <b>A</b> (#${chosen[0]}) to <b>B</b> (#${chosen[1]}): <del>only in A</del> <ins>only in B</ins></span> ${close}</header>
    ${
      !isKnown
        ? html`<${Empty}>The text of one of them is no longer kept.<//>`
        : texts[0] === texts[1]
          ? html`<${Empty}>Their texts are equal.<//>`
          : html`<pre class="text">${parts.map(({ kind, text }, i) =>
              kind === "same"
                ? visible(text)
                : kind === "added"
                  ? html`<ins key=${i}>${visible(text)}</ins>`
                  : html`<del key=${i}>${visible(text)}</del>`,
            )}</pre>`
    }
  </div>`;
}
