// The calls of an episode: as a tree, and as the conversation that leads to one of them.

import { count, visible } from "../format.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Badge } from "./basics.js";
import { firstLine, Message, textOf, toolCall } from "./messages.js";

/**
 * Returns a row for each call, in their order: its `lane`, the lane `from` which it branches off (null if it continues its lane or is a
 * root), the lanes that pass by (`through`), and whether its lane goes on below. A lane is free for others once nothing continues it, so a
 * long chain with many short branches stays narrow.
 */
function layout(calls) {
  const until = new Map();
  for (const { number, parent } of calls) if (parent >= 0) until.set(parent, Math.max(number, until.get(parent) ?? -1));
  const lanes = [];
  const laneOf = new Map();
  return calls.map((call) => {
    const parentLane = call.parent >= 0 ? laneOf.get(call.parent) : null;
    const continues = parentLane !== null && parentLane !== undefined && lanes[parentLane]?.tip === call.parent;
    let lane = continues ? parentLane : lanes.findIndex((each) => each.until < call.number);
    if (lane < 0) lane = lanes.length;
    const through = lanes.flatMap((each, i) => (i !== lane && each.until > call.number ? [i] : []));
    const before = continues ? lanes[lane].until : -1;
    lanes[lane] = { tip: call.number, until: Math.max(before, until.get(call.number) ?? -1) };
    laneOf.set(call.number, lane);
    const kind = call.parent < 0 ? (call.number === 0 ? "first" : "root") : continues ? "continues" : "branch";
    return {
      call,
      lane,
      kind,
      from: kind === "branch" ? parentLane : null,
      through,
      goesOn: lanes[lane].until > call.number,
    };
  });
}

/** Returns the calls from the root to call `number`. */
function pathTo(calls, number) {
  const byNumber = new Map(calls.map((call) => [call.number, call]));
  const path = [];
  for (let call = byNumber.get(number); call && path.length <= calls.length; call = byNumber.get(call.parent))
    path.unshift(call);
  return path;
}

/** What a call answered, in a line. */
function summary({ answer = {} }) {
  const tools = (answer.tool_calls ?? []).map((each) => toolCall(each).name);
  const text = textOf(answer.content) || (tools.length ? "" : textOf(answer.reasoning ?? answer.reasoning_content));
  return firstLine(
    [text, tools.length ? `calls ${tools.join(", ")}` : ""].filter(Boolean).join(" · ") || "(an empty answer)",
    80,
  );
}

const ROW = 30;
const LANE = 14;
const LANES = 16;
const x = (lane) => Math.min(lane, LANES) * LANE + 8;

/** The lines of a row of the tree. */
const Lines = ({ row, width }) => html`<svg width=${width} height=${ROW} aria-hidden="true" class="lines">
  ${row.through.map((lane) => html`<line key=${lane} x1=${x(lane)} y1="0" x2=${x(lane)} y2=${ROW} />`)}
  ${row.kind === "continues" && html`<line x1=${x(row.lane)} y1="0" x2=${x(row.lane)} y2=${ROW / 2} />`}
  ${row.from !== null && html`<path d=${`M${x(row.from)} 0 C${x(row.from)} ${ROW / 2} ${x(row.lane)} 0 ${x(row.lane)} ${ROW / 2}`} />`}
  ${row.goesOn && html`<line x1=${x(row.lane)} y1=${ROW / 2} x2=${x(row.lane)} y2=${ROW} />`}
  <circle cx=${x(row.lane)} cy=${ROW / 2} r="4.5" class=${row.call.trained ? "trained" : ""} />
</svg>`;

const KINDS = { root: "new conversation", branch: "branch of" };

/** The calls of an episode in order; lines join each with the call that it continues. `chosen` is the number of a call. */
export function CallTree({ calls, chosen, choose }) {
  const list = useRef(null);
  const [rows] = useState(() => layout(calls));
  const width = x(Math.max(...rows.map((row) => Math.max(row.lane, ...row.through)))) + 10;
  const pressed = (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, Home: -calls.length, End: calls.length, PageDown: 12, PageUp: -12 }[
      event.key
    ];
    if (by === undefined) return;
    event.preventDefault();
    const to = Math.max(0, Math.min(calls.length - 1, calls.findIndex((call) => call.number === chosen) + by));
    choose(calls[to].number);
    list.current.children[to].querySelector("button").focus();
  };
  useEffect(() => {
    const row = list.current.children[calls.findIndex((call) => call.number === chosen)];
    const frame = list.current;
    if (row && (row.offsetTop < frame.scrollTop || row.offsetTop + ROW > frame.scrollTop + frame.clientHeight))
      frame.scrollTop = row.offsetTop - frame.clientHeight / 2;
  }, [chosen]);
  return html`<ol class="tree" ref=${list} onKeyDown=${pressed} aria-label="Calls">
    ${rows.map((row) => {
      const { call } = row;
      const kind = KINDS[row.kind] && `${KINDS[row.kind]}${row.kind === "branch" ? ` #${call.parent}` : ""}`;
      return html`<li key=${call.number}>
        <${Lines} row=${row} width=${width} />
        <button class="plain" tabindex=${call.number === chosen ? 0 : -1} aria-current=${call.number === chosen ? "true" : undefined} onClick=${() => choose(call.number)}>
          <b>#${call.number}</b> ${kind && html`<span class="kind">${kind}</span>`} <span class="what">${visible(summary(call))}</span>
          ${!call.trained && html` <${Badge}>not trained<//>`}${call.finish_reason === "length" && html` <${Badge} tone="warn">truncated<//>`}
          <span class="faint"> ${count(call.end - call.start)} tokens</span>
        </button>
      </li>`;
    })}
  </ol>`;
}

const SHOWN = 12;

/** The conversation that leads to a call, the newest calls of it; `jump(at)` shows a token. */
export function Conversation({ calls, chosen, jump }) {
  const [more, setMore] = useState(0);
  const place = useRef(null);
  useEffect(() => {
    place.current.scrollTop = place.current.lastElementChild.offsetTop;
  }, []);
  const path = pathTo(calls, chosen);
  const from = Math.max(0, path.length - SHOWN - more);
  return html`<div class="conversation" ref=${place} tabindex="0" role="region" aria-label="Conversation">
    ${from > 0 && html`<button onClick=${() => setMore(more + SHOWN)}>Show ${Math.min(SHOWN, from)} of ${from} earlier calls</button>`}
    ${path.slice(from).map(
      (call) => html`<section key=${call.number} aria-label=${`Call ${call.number}`}>
        <header class="faint">call #${call.number} on ${visible(call.replica)} · ${visible(call.finish_reason)} ·
          <button class="plain link" onClick=${() => jump(call.start)}>${count(call.end - call.start)} tokens from ${count(call.start)}</button>
          ${!call.trained && html` · <${Badge}>not trained<//>`}
        </header>
        ${(call.messages ?? []).map((message, i) => html`<${Message} key=${i} message=${message} />`)}
        <${Message} message=${{ role: "assistant", ...call.answer }} />
      </section>`,
    )}
  </div>`;
}
