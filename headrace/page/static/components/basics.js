// Small parts that every view uses.

import { duration, number, visible } from "../format.js";
import { html, useState } from "../vendor/preact.js";

/** What went wrong, in the place of what can't be shown. */
export const Failure = ({ error, retry }) => html`
  <div class="failure" role="alert">
    <p>${visible(error)}</p>
    ${retry && html`<button onClick=${retry}>Try again</button>`}
  </div>
`;

/** Says that there is nothing to show, and why. */
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

/** Shows `children(data)` of a `useData` answer, its error, or that it is being read. */
export function Loaded({ answer, children }) {
  const { data, error } = answer;
  if (data === null)
    return error ? html`<${Failure} error=${error} />` : html`<p class="empty" aria-busy="true">Reading …</p>`;
  return html`${error && html`<${Failure} error=${error} />`}${children(data)}`;
}

const TONES = { running: "good", finished: "calm", stopped: "calm", failed: "bad", killed: "bad", unknown: "calm" };

/** A run's state as a badge; its collapse too. */
export const State = ({ run }) => html`
  <span class=${`badge ${TONES[run.state] ?? "calm"}`} title=${visible(run.reason)}>${run.state}</span>
  ${run.collapse && html`<span class="badge bad" title=${visible(run.collapse)}>collapse</span>`}
`;

/** A short text on a tone: `good`, `bad`, `warn` or `calm`. */
export const Badge = ({ tone = "calm", title, children }) =>
  html`<span class=${`badge ${tone}`} title=${title}>${children}</span>`;

/** A number with its name, and a line below. */
export const Tile = ({ label, value, note, href, tone }) => {
  const inside = html`<span class="label">${label}</span><span class="value">${value}</span>${note && html`<span class="note">${note}</span>`}`;
  return href
    ? html`<a class=${`tile ${tone ?? ""}`} href=${href}>${inside}</a>`
    : html`<div class=${`tile ${tone ?? ""}`}>${inside}</div>`;
};

export const Tiles = ({ children }) => html`<div class="tiles">${children}</div>`;

/** A part of a view with a heading; `tools` stand at its right. */
export const Card = ({ title, tools, children, wide }) => html`
  <section class=${`card ${wide ? "wide" : ""}`}>
    ${(title || tools) && html`<header><h2>${title}</h2><div class="tools">${tools}</div></header>`}
    ${children}
  </section>
`;

/**
 * A table. `columns` are `{name, label, cell(row), numeric, sort}`; a column with `sort` has a button that calls `onSort(sort)`, and `sorted`
 * is the sort in use (with "-" in front: descending). A `tall` one of many rows scrolls below its headings.
 */
export const Table = ({ columns, rows, rowKey, sorted = "", onSort, label, tall = false }) => html`
  <div class=${`scroll ${tall ? "tall" : ""}`} role=${label && "region"} aria-label=${label} tabindex="0">
    <table aria-label=${label}>
      <thead>
        <tr>
          ${columns.map(
            (column) => html`
              <th key=${column.name} class=${column.numeric ? "numeric" : ""} aria-sort=${ariaSort(column, sorted)}>
                ${
                  column.sort && onSort
                    ? html`<button class="plain" onClick=${() => onSort(sorted === `-${column.sort}` ? column.sort : `-${column.sort}`)}>
                        ${column.label}${sorted.replace("-", "") === column.sort ? (sorted[0] === "-" ? " ↓" : " ↑") : ""}
                      </button>`
                    : column.label
                }
              </th>
            `,
          )}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) => html`
            <tr key=${rowKey(row)}>
              ${columns.map((column) => html`<td key=${column.name} class=${column.numeric ? "numeric" : ""}>${column.cell(row)}</td>`)}
            </tr>
          `,
        )}
      </tbody>
    </table>
  </div>
`;

const ariaSort = (column, sorted) =>
  sorted.replace("-", "") === column.sort && column.sort ? (sorted[0] === "-" ? "descending" : "ascending") : undefined;

/** A line without axes of `points` [[x, y], …], as wide as its place. */
export function Sparkline({ points, width = 120, height = 26 }) {
  const known = points.filter(([, y]) => Number.isFinite(y));
  if (known.length < 2) return null;
  const [xs, ys] = [known.map(([x]) => x), known.map(([, y]) => y)];
  const [left, low] = [Math.min(...xs), Math.min(...ys)];
  const [across, high] = [Math.max(...xs) - left || 1, Math.max(...ys) - low || 1];
  const place = ([x, y]) =>
    `${(((x - left) / across) * (width - 4) + 2).toFixed(1)},${(height - 3 - ((y - low) / high) * (height - 6)).toFixed(1)}`;
  return html`<svg class="sparkline" width=${width} height=${height} aria-hidden="true"><polyline points=${known.map(place).join(" ")} /></svg>`;
}

/** A button that shows or hides `children`. */
export function Fold({ label, open = false, children }) {
  const [isOpen, setOpen] = useState(open);
  return html`<div class="fold">
    <button class="plain" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>${isOpen ? "▾" : "▸"} ${label}</button>
    ${isOpen && children}
  </div>`;
}

/** Text of others, as it is, in a box that keeps its line feeds. */
export const Text = ({ children, tone = "" }) => html`<pre class=${`text ${tone}`}>${visible(children)}</pre>`;

/** One of several choices, as a row of buttons. `choices` are [value, label]. */
export const Choice = ({ label, choices, value, onChange }) => html`
  <span class="choice" role="group" aria-label=${label}>
    ${choices.map(([each, text]) => html`<button key=${each} aria-pressed=${each === value} onClick=${() => onChange(each)}>${text}</button>`)}
  </span>
`;

export const formatBest = (best) => (best ? `${best.metric} ${number(best.value)} at ${best.step}` : "–");
export const formatEta = (run) => (run.eta_s === null || run.eta_s === undefined ? "" : `${duration(run.eta_s)} left`);
