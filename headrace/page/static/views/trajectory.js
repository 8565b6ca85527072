// One trajectory: its tokens as a heat map over the text, and the calls of an episode.

import { navigate, setQuery } from "../address.js";
import { useData } from "../api.js";
import { Card, Empty, Failure, Fold } from "../components/basics.js";
import { CallTree, Conversation } from "../components/call_tree.js";
import { endsOf } from "../components/colour.js";
import {
  colourOf,
  columnOf,
  columnScale,
  extremes,
  firstColumn,
  ordered,
  present,
  shownToken,
  valueText,
} from "../components/columns.js";
import { useKeys } from "../components/keys.js";
import { apiPath, groupAddress, viewAddress } from "../components/links.js";
import { Values } from "../components/messages.js";
import { TokenMap } from "../components/token_map.js";
import { useTokens, WINDOW } from "../components/token_store.js";
import { TokenStrip } from "../components/token_strip.js";
import { count, number, percent, visible } from "../format.js";
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";

/** Of fewer tokens the text itself is the overview. */
const MANY = 200;

/** Where weight versions and calls begin: `{versions: Map(token → version), calls: Map(token → number)}`. */
const startsOf = ({ versions, calls }) => ({
  versions: new Map(versions.map(([version, start]) => [start, version])),
  calls: new Map(calls.map((call) => [call.start, call.number])),
});

export function Trajectory({ run, params, query }) {
  const path = apiPath(run, "groups", params.group, "trajectories", String(params.index));
  const tokens = useTokens(path, Math.max(0, Number(query.get("at")) || 0));
  const group = useData(apiPath(run, "groups", params.group)).data;
  const indices = (group?.trajectories ?? []).map((each) => each.index);
  const place = indices.indexOf(params.index);
  const go = (index) => index !== undefined && navigate(groupAddress(run, params.group, index));
  useKeys({
    n: () => go(indices[place + 1]),
    p: () => place > 0 && go(indices[place - 1]),
    u: () => navigate(groupAddress(run, params.group)),
  });
  const { head } = tokens.store;
  if (!head)
    return tokens.error
      ? html`<${Failure} error=${tokens.error} retry=${tokens.retry} />
          <p><a href=${groupAddress(run, params.group)}>Back to group ${visible(params.group)}</a></p>`
      : html`<p class="empty" aria-busy="true">Reading …</p>`;
  return html`
    <${Head} run=${run} params=${params} head=${head} total=${tokens.store.total} indices=${indices} />
    ${tokens.error && html`<${Failure} error=${tokens.error} retry=${tokens.retry} />`}
    <${Body} tokens=${tokens} query=${query} />
  `;
}

function Head({ run, params, head, total, indices }) {
  const others = indices.map((index) =>
    index === params.index
      ? html`<b key=${index} aria-current="page">#${index}</b>`
      : html`<a key=${index} href=${groupAddress(run, params.group, index)}>#${index}</a>`,
  );
  const facts = [
    ["reward", number(head.reward, 4)],
    ...Object.entries(head.components ?? {}).map(([name, value]) => [visible(name), number(value, 4)]),
    ["tokens", count(total)],
    ["step", count(head.step)],
    ["versions", head.versions.map(([version]) => version).join(", ") || "–"],
    ...(head.calls.length ? [["calls", count(head.calls.length)]] : []),
  ];
  return html`<section class="card head" aria-label="Trajectory">
    <header>
      <h2><a href=${groupAddress(run, params.group)}>${visible(params.group)}</a> #${params.index}</h2>
      <nav class="tools" aria-label="Completions of the group">${others}</nav>
    </header>
    <dl class="numbers">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${head.step !== null && html`<nav class="links" aria-label="Related"><a href=${viewAddress(run, "prompts", { step: head.step })}>groups of step ${head.step}</a></nav>`}
    ${Object.keys(head.metadata ?? {}).length > 0 && html`<${Fold} label="metadata of the score"><${Values} value=${head.metadata} /><//>`}
    ${Object.keys(head.artifacts ?? {}).length > 0 && html`<${Fold} label="artifacts"><${Values} value=${head.artifacts} /><//>`}
  </section>`;
}

/** The token in use: at once in the view, and after a pause in the address, since browsers refuse to change it with every key press. */
function useSelected(query, total) {
  const asked = Math.max(0, Math.min(total - 1, Number(query.get("at")) || 0));
  const [at, setAt] = useState(asked);
  const timer = useRef(null);
  useEffect(() => () => clearTimeout(timer.current), []);
  const select = (next) => {
    setAt(next);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setQuery({ at: next || null }), 300);
  };
  return [at, select];
}

function Body({ tokens, query }) {
  const { store, arrived } = tokens;
  const { head } = store;
  const names = Object.keys(store.columns);
  const column = names.includes(query.get("column")) ? query.get("column") : firstColumn(names);
  const [at, select] = useSelected(query, store.total);
  const hovered = useRef(() => {});
  const scale = useMemo(() => columnScale(column ?? "", store.columns[column] ?? []), [column, arrived]);
  const starts = useMemo(() => startsOf(head), [head]);
  const call = head.calls.length ? Number(query.get("call") ?? head.calls.at(-1).number) : null;
  if (!store.total) return html`<${Card} title="Tokens"><${Empty}>This completion has no tokens.<//><//>`;
  const choice = column && html`<${ColumnChoice} names=${names} column=${column} />`;
  return html`
    ${head.calls.length > 0 && html`<${Episode} calls=${head.calls} chosen=${call} jump=${select} />`}
    <div class="heat">
      <${Card} title="Tokens" tools=${choice}>
        ${column ? html`<${Legend} column=${column} scale=${scale} values=${store.columns[column]} arrived=${arrived} />` : html`<${Empty}>This step wrote no values of tokens.<//>`}
        ${store.total > MANY && html`<${TokenStrip} store=${store} arrived=${arrived} column=${column} scale=${scale} selected=${at} onSelect=${select} />`}
        ${head.prompt_tokens?.length > 0 && html`<${Fold} label=${`prompt: ${count(head.prompt_tokens.length)} tokens`}><${PromptTokens} tokens=${head.prompt_tokens} /><//>`}
        <${TokenMap} store=${store} arrived=${arrived} column=${column} scale=${scale} selected=${at} onSelect=${select}
          onHover=${(token) => hovered.current(token)} starts=${starts} read=${tokens.read}
          label=${`${store.total} tokens, coloured by ${column ? columnOf(column).label : "nothing"}; arrow keys move`} />
        <${Selected} store=${store} at=${at} column=${column} />
        <${GoTo} total=${store.total} select=${select} />
      <//>
      <aside class="pile">
        <${Inspector} store=${store} at=${at} hovered=${hovered} arrived=${arrived} />
        <${Top} tokens=${tokens} column=${column} select=${select} at=${at} />
      </aside>
    </div>
  `;
}

const ColumnChoice = ({ names, column }) => html`<label class="check">colour
  <select aria-label="Column" value=${column} onChange=${(event) => setQuery({ column: event.target.value })}>
    ${ordered(names).map((name) => html`<option key=${name} value=${name} selected=${name === column}>${columnOf(name).label}</option>`)}
  </select>
</label>`;

/** What the colours mean: the ends of the scale, or the names of values. */
function Legend({ column, scale, values, arrived }) {
  const shown = useMemo(() => (columnOf(column).names ? present(column, values) : []), [column, arrived]);
  const { help, names, plain } = columnOf(column);
  const swatch = (value) =>
    html`<span class="patch" style=${{ backgroundColor: colourOf(column, scale, value) }}></span>`;
  const versions = html`<span class="faint">solid and dashed lines: one weight version and the next · ↵ a line feed of the text</span>`;
  if (names)
    return html`<div class="meaning"><span>${help}:</span>
      ${shown.map((value) => html`<span key=${value}>${swatch(value)} ${names[value]}${value === plain ? " (no colour)" : ""}</span>`)} ${versions}</div>`;
  const ends = endsOf(scale);
  const steps = Array.from({ length: 11 }, (_, i) => {
    if (!scale.log) return scale.low + ((scale.high - scale.low) * i) / 10;
    return scale.low * (scale.high / scale.low) ** (i / 10);
  });
  return html`<div class="meaning"><span>${help}</span>
    <span class="ramp" aria-label=${`from ${ends[0]} to ${ends.at(-1)}`}>
      <span>${ends[0]}</span><span class="patches">${steps.map((value, i) => html`<span key=${i} style=${{ backgroundColor: colourOf(column, scale, value) }}></span>`)}</span><span>${ends.at(-1)}</span>
    </span> ${versions}</div>`;
}

const PromptTokens = ({ tokens }) =>
  html`<div class="tokens prompt">${tokens.map(({ id, text }, i) => html`<span key=${i} class="token" title=${id}>${visible(shownToken(text, id))}</span>`)}</div>`;

/** The selected token and its value in a line, which screen readers read out when it changes. */
function Selected({ store, at, column }) {
  const text = store.texts[at];
  return html`<p class="selected-line" aria-live="polite"><span class="faint">token ${count(at)}</span>
    ${text !== undefined && html` <code>${text === null ? `⟨${store.ids[at]}⟩` : visible(JSON.stringify(text))}</code>`}
    ${text !== undefined && column && html` <span class="faint">${columnOf(column).label}</span> <b class="numeric">${valueText(column, store.columns[column][at])}</b>`}
  </p>`;
}

function GoTo({ total, select }) {
  const go = (event) => {
    event.preventDefault();
    const at = Number(new FormData(event.target).get("at"));
    if (Number.isInteger(at)) select(Math.max(0, Math.min(total - 1, at)));
  };
  return html`<form class="tools goto" onSubmit=${go}>
    <label class="check">token <input name="at" inputmode="numeric" size="8" aria-label="Go to token" /></label><button>Go</button>
    <span class="faint">of ${count(total)} · arrows, Page Up and Page Down move · n, p: next and previous completion</span>
  </form>`;
}

/** All columns of one token: of the one under the pointer, else of the selected one. */
function Inspector({ store, at, hovered }) {
  const [over, setOver] = useState(null);
  hovered.current = setOver;
  const shown = over ?? at;
  const version = store.versionAt(shown);
  const call = store.head.calls.find((each) => shown >= each.start && shown < each.end);
  const text = store.texts[shown];
  return html`<${Card} title=${`Token ${count(shown)}`}>
    <div class="inspected">
      ${
        text === undefined
          ? html`<${Empty}>Being read …<//>`
          : html`<div class="token-text"><code>${text === null ? "its text is not known" : visible(JSON.stringify(text))}</code> <span class="faint">id ${store.ids[shown]}</span></div>
            <dl class="values">
              ${ordered(Object.keys(store.columns)).map((name) => html`<div key=${name}><dt>${columnOf(name).label}</dt><dd class="numeric">${valueText(name, store.columns[name][shown])}</dd></div>`)}
              <div><dt>weight version</dt><dd class="numeric">${version < 0 ? "–" : store.head.versions[version][0]}</dd></div>
              ${call && html`<div><dt>call</dt><dd class="numeric">#${call.number}</dd></div>`}
            </dl>`
      }
    </div>
  <//>`;
}

/** The tokens with the greatest part of the loss, or the farthest out in the column that is shown. */
function Top({ tokens, column, select, at }) {
  const { store, arrived, reading, readAll } = tokens;
  const choices = [...new Set(["token_losses", column])].filter((name) => store.columns[name] && !columnOf(name).names);
  const [chosen, choose] = useState(choices[0]);
  const by = choices.includes(chosen) ? chosen : choices[0];
  const found = useMemo(() => (by ? extremes(by, store.columns[by]) : []), [by, arrived]);
  if (!by) return null;
  const tools = html`<select aria-label="By" value=${by} onChange=${(event) => choose(event.target.value)}>
    ${choices.map((name) => html`<option key=${name} value=${name} selected=${name === by}>${name === "token_losses" ? "share of the loss" : columnOf(name).label}</option>`)}
  </select>`;
  const missing = !store.isWhole;
  return html`<${Card} title="Largest" tools=${tools}>
    ${
      missing &&
      html`<p class="faint">Of the ${count(Math.min(store.total, store.windows.size * WINDOW))} tokens that were read.
        <button disabled=${reading} onClick=${readAll}>${reading ? `Reading ${percent(store.windows.size / store.count)} …` : `Read all ${count(store.total)}`}</button></p>`
    }
    ${
      found.length
        ? html`<ol class="top">${found.map(
            ({ at: token, value, share }) => html`<li key=${token}>
              <button class="plain" aria-current=${token === at ? "true" : undefined} onClick=${() => select(token)}>
                <span class="faint">${count(token)}</span> <code>${visible(shownToken(store.texts[token], store.ids[token])).trimEnd() || "␣"}</code>
                <span class="numeric">${valueText(by, value)}</span> <span class="numeric faint">${percent(share)}</span>
              </button>
            </li>`,
          )}</ol>`
        : html`<${Empty}>All values are equal to the middle.<//>`
    }
  <//>`;
}

function Episode({ calls, chosen, jump }) {
  return html`<div class="episode">
    <${Card} title=${`${calls.length} calls`}><${CallTree} calls=${calls} chosen=${chosen} choose=${(call) => setQuery({ call })} /><//>
    <${Card} title=${`The conversation up to call #${chosen}`}><${Conversation} key=${chosen} calls=${calls} chosen=${chosen} jump=${jump} /><//>
  </div>`;
}
