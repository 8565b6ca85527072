// Every group that ever was: found by text, row of the data, state and more, in pages that the server sorts.

import { navigate, setQuery, withQuery } from "../address.js";
import { useData } from "../api.js";
import { Badge, Card, Empty, Failure, Loaded } from "../components/basics.js";
import { rewardScale } from "../components/colour.js";
import { apiPath, groupAddress, STATES, toneOf } from "../components/links.js";
import { Problems } from "../components/problems.js";
import { RewardStrip } from "../components/rewards.js";
import { count, duration, number, visible } from "../format.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact.js";

const PAGE = 50;

/** Filters besides the text and the state: name in the address and in the API, label, and an example. */
const FILTERS = [
  ["row", "row of a file", "train.jsonl:17"],
  ["step", "step", "12"],
  ["environment", "environment", ""],
  ["task", "task", ""],
  ["reason", "reason", "ValueError"],
  ["replica", "replica", ""],
  ["build", "build", ""],
];

/** Returns the parameters of the API call for the filters in an address. Text of the form FILE:LINE is a row. */
function parametersOf(query) {
  const text = (query.get("text") ?? "").trim();
  const isRow = !query.get("row") && /^[^\s:]+\.(jsonl?|parquet|csv)(\.gz)?:\d+$/.test(text);
  const parameters = { text: isRow ? "" : text, state: query.get("state"), lane: query.get("lane") };
  for (const [name] of FILTERS) parameters[name] = query.get(name);
  if (isRow) parameters.row = text;
  const offset = Math.max(0, Math.floor(Number(query.get("offset")) || 0));
  return { ...parameters, sort: query.get("sort") ?? "order", offset, limit: PAGE };
}

/** Returns the row, and the offset of the page, that a key moves to from row `at`; null for other keys. */
function moveRow(key, at, rows, offset, total) {
  const last = rows - 1;
  if (key === "ArrowDown")
    return at < last
      ? { at: at + 1, offset }
      : offset + rows < total
        ? { at: 0, offset: offset + PAGE }
        : { at, offset };
  if (key === "ArrowUp")
    return at > 0
      ? { at: at - 1, offset }
      : offset > 0
        ? { at: PAGE - 1, offset: Math.max(0, offset - PAGE) }
        : { at, offset };
  if (key === "Home") return { at: 0, offset };
  if (key === "End") return { at: last, offset };
  if (key === "PageDown") return offset + rows < total ? { at: 0, offset: offset + PAGE } : { at: last, offset };
  if (key === "PageUp") return { at: 0, offset: Math.max(0, offset - PAGE) };
  return null;
}

export function Prompts({ run, query }) {
  const parameters = parametersOf(query);
  const answer = useData(apiPath(run, "groups"), parameters, { every: 10 });
  const change = (changes) => setQuery({ offset: null, ...changes });
  return html`
    <${Filters} query=${query} change=${change} />
    <${Loaded} answer=${answer}>
      ${(data) => html`
        <${States} states=${data.states} query=${query} change=${change} />
        <${Lost} count=${data.lost_events} />
        <${Problems} of=${data} />
        <${Card} title=${`${count(data.total)} group${data.total === 1 ? "" : "s"}`} tools=${html`<${Pages} total=${data.total} offset=${parameters.offset} />`}>
          ${
            data.groups.length
              ? html`<div class=${answer.loading ? "stale" : ""}><${GroupTable} run=${run} query=${query} data=${data} parameters=${parameters} change=${change} /></div>`
              : html`<${Nothing} query=${query} data=${data} />`
          }
          ${data.groups.length > 0 && html`<p class="empty">Keys in the table: arrows, Page Up and Page Down move, Enter opens. A value of a column is a link to the groups that share it.</p>`}
        <//>
      `}
    <//>
  `;
}

const Nothing = ({ query, data }) => {
  if (data.total)
    return html`<${Empty}>This page is behind the last group. <a href=${withQuery({ offset: null })}>First page</a><//>`;
  return query.toString()
    ? html`<${Empty}>No group matches. <a href=${location.pathname}>Show all groups</a><//>`
    : html`<${Empty}>No group yet: the trainer has enqueued no prompt, or the run is older than this record.<//>`;
};

const Lost = ({ count: lost }) =>
  lost > 0 &&
  html`<${Failure} error=${`${count(lost)} events were lost before the trainer wrote them down. The last states of some groups, and parts of their stories, are missing.`} />`;

/** The text field waits for a pause in writing before it asks the server. */
function Filters({ query, change }) {
  const [text, setText] = useState(query.get("text") ?? "");
  const field = useRef(null);
  const asked = query.get("text") ?? "";
  useEffect(() => {
    if (document.activeElement !== field.current) setText(asked);
  }, [asked]);
  useEffect(() => {
    if (text === asked) return undefined;
    const timer = setTimeout(() => change({ text }), 200);
    return () => clearTimeout(timer);
  }, [text]);
  const used = FILTERS.filter(([name]) => query.get(name));
  const [more, setMore] = useState(used.length > 0);
  return html`<form class="filters" role="search" onSubmit=${(event) => event.preventDefault()}>
    <input ref=${field} type="search" class="long" aria-label="Search prompts" placeholder="part of a prompt or answer, an id, or FILE:LINE"
      value=${text} onInput=${(event) => setText(event.target.value)} />
    <button type="button" aria-expanded=${more} onClick=${() => setMore(!more)}>More filters${used.length ? ` (${used.length})` : ""}</button>
    ${
      query.toString() &&
      html`<button type="button" onClick=${() => {
        setText("");
        navigate(location.pathname, { replace: true });
      }}>Clear</button>`
    }
    ${
      more &&
      html`<div class="fields">
        ${FILTERS.map(
          ([name, label, example]) => html`<label key=${name}>${label}
            <input value=${query.get(name) ?? ""} placeholder=${example} inputmode=${name === "step" ? "numeric" : undefined} onChange=${(event) => change({ [name]: event.target.value.trim() })} />
          </label>`,
        )}
        <label>lane
          <select value=${query.get("lane") ?? ""} onChange=${(event) => change({ lane: event.target.value })}>
            <option value="">both</option><option value="train">train</option><option value="validation">validation</option>
          </select>
        </label>
      </div>`
    }
  </form>`;
}

/** The states as filters, each with its number of groups. */
const States = ({ states, query, change }) => {
  const chosen = query.get("state") ?? "";
  const chip = (
    state,
    label,
    n,
  ) => html`<button key=${label} class="chip" aria-pressed=${chosen === state} onClick=${() => change({ state: chosen === state ? null : state })}>
    <span class=${`dot ${state ? toneOf(state) : ""}`}></span>${label} <b>${count(n)}</b>
  </button>`;
  return html`<div class="chips" role="group" aria-label="State">
    ${chip(
      "",
      "all",
      Object.values(states).reduce((sum, n) => sum + n, 0),
    )}
    ${STATES.filter((state) => states[state] || state === chosen).map((state) => chip(state, state, states[state] ?? 0))}
  </div>`;
};

function Pages({ total, offset }) {
  const last = Math.max(0, Math.floor((total - 1) / PAGE) * PAGE);
  const button = (label, sign, to, off) =>
    html`<button aria-label=${label} title=${label} disabled=${off} onClick=${() => setQuery({ offset: to || null })}>${sign}</button>`;
  return html`
    ${button("First page", "«", 0, offset === 0)}${button("Previous page", "‹", Math.max(0, offset - PAGE), offset === 0)}
    <span class="numeric">${count(total ? offset + 1 : 0)}–${count(Math.min(total, offset + PAGE))} of ${count(total)}</span>
    ${button("Next page", "›", offset + PAGE, offset >= last)}${button("Last page", "»", last, offset >= last)}
  `;
}

/** The columns: name, heading, the API's name for sorting by it, whether it holds numbers. */
const COLUMNS = [
  ["prompt", "prompt", "order", false],
  ["state", "state", "", false],
  ["rewards", "rewards", "reward", false],
  ["mean", "mean", "reward", true],
  ["spread", "spread", "spread", true],
  ["step", "step", "step", true],
  ["age", "age", "age", true],
  ["attempts", "attempts", "attempts", true],
  ["took", "took", "", true],
  ["replicas", "replicas", "", false],
  ["environment", "environment", "", false],
  ["build", "build", "", false],
];

function GroupTable({ run, query, data, parameters, change }) {
  const [at, setAt] = useState(0);
  const body = useRef(null);
  const wanted = useRef(null);
  const rows = data.groups;
  const focusRow = (index) => body.current?.children[index]?.focus();
  useLayoutEffect(() => {
    // A key went over the edge of the page: the focus follows once its rows are there, before the next key.
    if (wanted.current === null) return;
    const index = Math.min(wanted.current, rows.length - 1);
    wanted.current = null;
    setAt(index);
    focusRow(index);
  }, [rows]);
  const pressed = (event) => {
    if (!event.target.matches("tr")) return;
    const { offset } = parameters;
    // The row that has the focus, whatever was drawn last: keys may come faster than drawings.
    const here = [...body.current.children].indexOf(event.target);
    if (event.key === "Enter") return navigate(groupAddress(run, rows[here].id));
    const moved = moveRow(event.key, here, rows.length, offset, data.total);
    if (!moved) return;
    event.preventDefault();
    if (moved.offset === offset) focusRow(moved.at);
    else {
      wanted.current = moved.at;
      setQuery({ offset: moved.offset || null });
    }
  };
  // Moving from row to row draws no cell again.
  const cells = useMemo(() => {
    const scale = rewardScale(rows.flatMap((group) => group.rewards));
    return rows.map((group) => html`<${Row} run=${run} group=${group} scale=${scale} />`);
  }, [run, rows, query]);
  return html`<div class="scroll"><table class="groups" aria-label="Groups" aria-rowcount=${data.total}>
    <thead><tr>${COLUMNS.map((column) => html`<${Heading} key=${column[0]} column=${column} sorted=${parameters.sort} change=${change} />`)}</tr></thead>
    <tbody ref=${body} onKeyDown=${pressed}>
      ${rows.map(
        (
          group,
          i,
        ) => html`<tr key=${group.id} tabindex=${i === Math.min(at, rows.length - 1) ? 0 : -1} aria-rowindex=${parameters.offset + i + 2} onFocus=${() => setAt(i)} onDblClick=${() => navigate(groupAddress(run, group.id))}>
          ${cells[i]}
        </tr>`,
      )}
    </tbody>
  </table></div>`;
}

function Heading({ column: [name, label, sort, isNumeric], sorted, change }) {
  const isSorted = sort && sorted.replace("-", "") === sort && name !== "rewards";
  const order = isSorted ? (sorted[0] === "-" ? "descending" : "ascending") : undefined;
  const next = sorted === `-${sort}` || (sort === "order" && sorted !== "order") ? sort : `-${sort}`;
  return html`<th class=${isNumeric ? "numeric" : ""} aria-sort=${order}>
    ${
      sort && name !== "rewards"
        ? html`<button class="plain" onClick=${() => change({ sort: next === "order" ? null : next })}>${label}${order ? (order === "descending" ? " ↓" : " ↑") : ""}</button>`
        : label
    }
  </th>`;
}

/** The cells of a group. Values that several groups share are links that filter by them. */
function Row({ run, group, scale }) {
  const only = (name, value, text = value) =>
    value === null || value === undefined || value === ""
      ? html`<span class="faint">–</span>`
      : html`<a class="only" tabindex="-1" title=${`only ${name} ${visible(value)}`} href=${withQuery({ [name]: value, offset: null })}>${visible(text)}</a>`;
  return html`
    <td class="prompt">
      <a href=${groupAddress(run, group.id)} tabindex="-1">${visible(group.prompt) || "(an empty prompt)"}</a>
      <div class="faint">${visible(group.id)}${group.source && ` · ${visible(group.source.file)}:${group.source.line}`}${group.lane === "validation" ? " · validation" : ""}</div>
    </td>
    <td><${Badge} tone=${toneOf(group.state)}>${group.state}<//>${group.reason && html`<div class="reason" title=${visible(group.reason)}>${visible(group.reason)}</div>`}</td>
    <td><${RewardStrip} rewards=${group.rewards} scale=${scale} /></td>
    <td class="numeric">${number(group.mean)}</td>
    <td class="numeric">${number(group.spread)}</td>
    <td class="numeric">${only("step", group.step, count(group.step))}</td>
    <td class="numeric">${count(group.age)}</td>
    <td class=${`numeric ${group.attempts > 1 ? "several" : ""}`}>${count(group.attempts)}</td>
    <td class="numeric">${group.ended > group.enqueued ? duration(group.ended - group.enqueued) : "–"}</td>
    <td class="names" title=${visible(group.replicas.join(", "))}>${only("replica", group.replicas[0])}${group.replicas.length > 1 && html`<span class="faint"> +${group.replicas.length - 1}</span>`}</td>
    <td class="names">${only("environment", group.environment)}</td>
    <td class="names">${only("build", group.build)}</td>
  `;
}
