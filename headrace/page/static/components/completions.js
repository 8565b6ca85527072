// The completions of a group side by side.

import { count, number, percent, visible } from "../format.js";
import { html } from "../vendor/preact.js";
import { Badge, Fold } from "./basics.js";
import { colourAt, position, rewardScale } from "./colour.js";
import { groupAddress } from "./links.js";
import { LongText, Values } from "./messages.js";

/** How completions can be ordered: name in the address, label, and a key of each; the greatest comes first, but for the index. */
export const ORDERS = [
  ["index", "index", (each) => -each.index],
  ["reward", "reward", (each) => each.reward ?? Number.NEGATIVE_INFINITY],
  ["advantage", "advantage", (each) => each.advantage ?? Number.NEGATIVE_INFINITY],
  ["tokens", "length", (each) => each.tokens ?? 0],
];

/** Returns the completions in an order, equal ones as one list: `[[trajectory, …], …]`. Those whose text isn't kept are not equal to any. */
export function fold(trajectories, order = "index", folded = true) {
  const key = (ORDERS.find(([name]) => name === order) ?? ORDERS[0])[2];
  const groups = new Map();
  for (const each of [...trajectories].sort((a, b) => key(b) - key(a) || a.index - b.index)) {
    const isKnown = folded && each.kept && each.content !== null;
    const name = isKnown ? JSON.stringify([each.content, each.reward, each.finish_reason]) : each.index;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(each);
  }
  return [...groups.values()];
}

/** The weight versions that wrote a completion, and how much of it each. */
function versionText(versions) {
  const total = versions.reduce((sum, [, start, end]) => sum + end - start, 0);
  if (versions.length <= 1 || !total) return versions.map(([version]) => `version ${version}`).join("");
  return versions.map(([version, start, end]) => `version ${version}: ${percent((end - start) / total)}`).join(", ");
}

/** Returns what the environment said of equal completions, each text once: `{metadata, of: [index, …]}`. */
function reasons(same) {
  const found = new Map();
  for (const { index, metadata } of same) {
    if (!Object.keys(metadata ?? {}).length) continue;
    const name = JSON.stringify(metadata);
    if (!found.has(name)) found.set(name, { metadata, of: [] });
    found.get(name).of.push(index);
  }
  return [...found.values()];
}

/** Returns the scale of each number of a group's completions, by its name: they are compared with one another. */
export function scalesOf(trajectories) {
  const reach = Math.max(...trajectories.map((each) => Math.abs(each.advantage ?? 0)), 1e-9);
  const longest = Math.max(...trajectories.map((each) => each.tokens ?? 0), 1);
  const names = [...new Set(trajectories.flatMap((each) => Object.keys(each.components ?? {})))];
  return {
    reward: rewardScale(trajectories.map((each) => each.reward)),
    advantage: { kind: "diverging", low: -reach, high: reach, middle: 0 },
    tokens: { kind: "sequential", low: 0, high: longest },
    components: Object.fromEntries(
      names.map((name) => [name, rewardScale(trajectories.map((each) => each.components?.[name]))]),
    ),
  };
}

/** Numbers of a completion, each with its name and a colour behind it. */
function Facts({ trajectory, scales }) {
  const { advantage, tokens, finish_reason, components = {}, versions = [] } = trajectory;
  const facts = [
    ["advantage", number(advantage), scales.advantage, advantage],
    ["tokens", count(tokens), scales.tokens, tokens],
    ...Object.entries(components).map(([name, value]) => [
      visible(name),
      number(value),
      scales.components[name],
      value,
    ]),
  ];
  return html`<dl class="numbers">
    ${facts.map(
      ([name, text, scale, value]) =>
        html`<div key=${name}><dt>${name}</dt><dd class="tinted" style=${{ background: colourAt(position(scale, value), 40) }}>${text}</dd></div>`,
    )}
    ${finish_reason === "length" && html`<div><dd><${Badge} tone="warn">truncated<//></dd></div>`}
    ${versions.length > 0 && html`<div><dd class="faint">${versionText(versions)}</dd></div>`}
  </dl>`;
}

/** One completion, or several equal ones. `chosen` is "A" or "B" where it is compared; `choose(index)` takes it for that. */
export function Completion({ run, group, same, scales, chosen, choose, unkept, isMany, isAlone }) {
  const [first] = same;
  const indices = same.map((each) => each.index);
  return html`<article class=${`completion ${chosen ? "chosen" : ""}`} aria-label=${`Completion ${indices.join(", ")}`}>
    <header>
      <span class="reward" style=${{ background: colourAt(position(scales.reward, first.reward), 50) }} title="reward">${number(first.reward)}</span>
      <span class="indices">${same.map(({ index, kept }) =>
        kept
          ? html`<a key=${index} href=${groupAddress(run, group, index)} title=${`tokens of completion ${index}`}>#${index}</a> `
          : html`<span key=${index}>#${index}</span> `,
      )}</span>
      ${same.length > 1 && html`<${Badge}>×${same.length}<//>`}
      ${first.status && first.status !== "SCORED" && html`<${Badge} tone="bad">${visible(first.status)}<//>`}
      ${!isAlone && html`<button class="compare" aria-pressed=${Boolean(chosen)} onClick=${() => choose(first.index)}>${chosen ? `compared (${chosen})` : "compare"}</button>`}
    </header>
    <${Facts} trajectory=${first} scales=${scales} />
    ${first.message && html`<p class="because">${visible(first.message)}</p>`}
    ${first.kept && first.content !== null ? html`<${LongText} most=${isMany ? 4000 : 20_000}>${first.content || " "}<//>` : html`<p class="empty">Its text is not kept: ${visible(unkept)}.</p>`}
    ${reasons(same).map(({ metadata, of }) => html`<${Fold} key=${of[0]} open=${!isMany} label=${`metadata of the score${of.length < same.length ? ` of #${of.join(", #")}` : ""}`}><${Values} value=${metadata} /><//>`)}
    <footer>
      ${first.kept ? html`<a href=${groupAddress(run, group, first.index)}>${first.calls > 1 ? `${first.calls} calls, tokens` : "tokens"} →</a>` : html`<span></span>`}
      <span class="faint">${visible(first.replica)}${first.attempt > 1 ? `, attempt ${first.attempt}` : ""}</span>
    </footer>
  </article>`;
}
