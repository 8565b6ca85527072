// The page: finds the view of the address, and draws the frame around it.

import { navigate, useAddress } from "./address.js";
import { useData } from "./api.js";
import { Failure, State } from "./components/basics.js";
import { apiPath, viewAddress } from "./components/links.js";
import { follow } from "./follow.js";
import { visible } from "./format.js";
import { useTheme } from "./theme.js";
import { html, render, useEffect, useErrorBoundary } from "./vendor/preact.js";
import { Compare } from "./views/compare.js";
import { Group } from "./views/group.js";
import { Metrics } from "./views/metrics.js";
import { Overview } from "./views/overview.js";
import { Prompts } from "./views/prompts.js";
import { Runs } from "./views/runs.js";
import { System } from "./views/system.js";
import { Timeline } from "./views/timeline.js";
import { Trajectory } from "./views/trajectory.js";

/** The views of a run, by the part of the address that follows the run: label, and the component. */
const TABS = [
  ["", "Overview", Overview],
  ["metrics", "Metrics", Metrics],
  ["prompts", "Prompts", Prompts],
  ["timeline", "Timeline", Timeline],
  ["system", "System", System],
];

/** The titles of the views that belong to no run, by the first part of the address. */
const TITLES = { "": "Runs", compare: "Compare" };

const decoded = (part) => {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // no text is encoded so, and no run has this name
  }
};

/** Returns what an address shows: `{View, run, tab, params}`. A view gets `run`, `params` and `query` (URLSearchParams). */
function route(path) {
  const [first, run, tab = "", ...rest] = path.split("/").slice(1).map(decoded);
  if (!first) return { View: Runs };
  if (first === "compare") return { View: Compare };
  if (first !== "runs" || !run) return { View: null };
  if (tab === "groups" && rest.length === 1) return { View: Group, run, tab: "prompts", params: { group: rest[0] } };
  if (tab === "groups" && rest.length === 2)
    return { View: Trajectory, run, tab: "prompts", params: { group: rest[0], index: Number(rest[1]) } };
  const found = rest.length === 0 && TABS.find(([name]) => name === tab);
  return found ? { View: found[2], run, tab } : { View: null };
}

function App() {
  const { path, query } = useAddress();
  const { View, run, tab, params = {} } = route(path);
  const [theme, setTheme] = useTheme();
  const title = [run && visible(run), TABS.find(([name]) => run && name === tab)?.[1] ?? TITLES[path.split("/")[1]]]
    .filter(Boolean)
    .join(" · ");
  useEffect(() => follow(navigate), []);
  useEffect(() => {
    document.title = `${title} · Headrace`;
  }, [title]);
  return html`
    <header class="bar">
      <a class="brand" href="/" aria-label="All runs">
        <img src="/static/icon.svg" width="20" height="20" alt="" /> Headrace
      </a>
      ${run && html`<${RunName} run=${run} />`}
      <nav class="tabs" aria-label="Views">
        ${
          run &&
          TABS.map(
            ([name, label]) =>
              html`<a
                key=${name}
                href=${viewAddress(run, name)}
                aria-current=${name === tab ? "page" : undefined}
                >${label}</a
              >`,
          )
        }
      </nav>
      <button class="plain" onClick=${() => setTheme(theme === "dark" ? "light" : "dark")} title="Light or dark">
        ${theme === "dark" ? "☀" : "☾"}
      </button>
    </header>
    <main>
      <h1 class="unseen">${title}</h1>
      ${
        View
          ? html`<${Guarded} key=${path}><${View} run=${run} params=${params} query=${query} /><//>`
          : html`<${Failure} error=${`There is no view at ${path}.`} />`
      }
    </main>
  `;
}

/** The run's name and state, beside the tabs. */
function RunName({ run }) {
  const { data } = useData(apiPath(run), {}, { every: 5 });
  return html`<a class="run" href=${viewAddress(run)}><b>${visible(run)}</b></a>
    ${data && html`<${State} run=${data.run} />`}`;
}

/** Shows an error of a view in its place, so that the rest of the page goes on. */
function Guarded({ children }) {
  const [error, reset] = useErrorBoundary();
  return error ? html`<${Failure} error=${String(error.stack ?? error)} retry=${reset} />` : children;
}

render(html`<${App} />`, document.getElementById("page"));
