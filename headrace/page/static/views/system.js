// What a run runs on: its services and environments now, its logs, its configuration with origins, and how it was started.

import { setQuery } from "../address.js";
import { useData } from "../api.js";
import { Badge, Card, Choice, Empty, Loaded, Table } from "../components/basics.js";
import { Environments, Replicas, Runners } from "../components/fleet.js";
import { apiPath } from "../components/links.js";
import { ago, bytes, clock, count, time, visible } from "../format.js";
import { html, useEffect, useMemo, useRef } from "../vendor/preact.js";

export function System({ run, query }) {
  const system = useData(apiPath(run, "system"), {}, { every: 30 });
  const overview = useData(apiPath(run), {}, { every: 2 });
  // hundreds of rows that a letter in a search doesn't change
  const services = useMemo(
    () => html`<${Loaded} answer=${overview}>${(data) => html`<${Services} run=${data.run} now=${data.now} />`}<//>`,
    [overview],
  );
  return html`
    <div class="pile">${services}</div>
    <div class="pile">
      <${Loaded} answer=${system}>
        ${(data) => html`
          <${Logs} run=${run} query=${query} services=${data.logs} />
          <div class="columns"><${Start} system=${data} /><${Versions} system=${data} /></div>
          <${Configuration} query=${query} keys=${data.config} />
        `}
      <//>
    </div>
  `;
}

/** Replicas, runners and environments with all that is known of them, and how old that is. */
function Services({ run, now }) {
  if (!now)
    return html`<${Card} title="Services"><${Empty}>${run.state === "running" ? "The trainer has not written its state yet." : `Not live: this run is ${run.state}. Its services are gone.`}<//><//>`;
  const { replicas = [], runners = [], environments = [] } = now;
  const age = html`<span class="faint">${run.state === "running" ? `as of ${ago(now.time)}` : `last known, ${ago(now.time)}`}</span>`;
  return html`
    <${Card} title=${`Replicas: ${count(replicas.length)}`} tools=${age}><${Replicas} replicas=${replicas} full /><//>
    ${runners.length > 0 && html`<${Card} title=${`Runners: ${count(runners.length)}`} tools=${age}><${Runners} runners=${runners} /><//>`}
    <${Card} title=${`Environments: ${count(environments.length)}`} tools=${age}><${Environments} environments=${environments} full /><//>
  `;
}

const LEVELS = ["", "DEBUG", "INFO", "WARNING", "ERROR"].map((level) => [level, level ? level.toLowerCase() : "all"]);
/** Lines of a page of logs. */
const LINES = 200;
const TONES = { WARNING: "warn", ERROR: "bad", CRITICAL: "bad" };

/** The logs of all services, merged: a page of lines that follows the end, or one further back (`before` in the address). */
function Logs({ run, query, services }) {
  const [service, level, text, before] = ["service", "level", "text", "before"].map((name) => query.get(name) ?? "");
  const follows = !before;
  const answer = useData(
    apiPath(run, "logs"),
    { service, level, text, before, limit: LINES },
    { every: follows ? 2 : 0 },
  );
  const choose = (changes) => setQuery({ before: null, ...changes });
  const tools = html`
    <select aria-label="Service" value=${service} onChange=${(event) => choose({ service: event.target.value })}>
      <option value="">all services</option>
      ${services.map(({ name, bytes: size }) => html`<option key=${name} value=${name}>${`${visible(name)} (${bytes(size)})`}</option>`)}
    </select>
    <${Choice} label="Level" choices=${LEVELS} value=${level} onChange=${(value) => choose({ level: value })} />
    <input type="search" aria-label="Text in the logs" placeholder="text" value=${text} onInput=${(event) => choose({ text: event.target.value })} />
  `;
  return html`<${Card} title="Logs" tools=${tools}>
    <${Loaded} answer=${answer}>
      ${({ lines, more }) => html`
        <div class="tools between paging">
          <button disabled=${!more || !lines.length} onClick=${() => setQuery({ before: lines[0].time })}>← Older</button>
          <span class="faint" role="status">${said(lines)}</span>
          <button aria-pressed=${follows} disabled=${follows} onClick=${() => setQuery({ before: null })}>${follows ? "Following the end" : "To the end →"}</button>
        </div>
        ${lines.length ? html`<${Lines} lines=${lines} follows=${follows} />` : html`<${Empty}>${services.length ? "No line matches." : "This run has no logs."}<//>`}
      `}
    <//>
  <//>`;
}

/** Says which lines are shown. */
const said = (lines) =>
  lines.length ? `${count(lines.length)} lines, ${time(lines[0].time)} – ${time(lines.at(-1).time)}` : "";

/** The lines in a box that stays at its end while it follows, unless the person has scrolled back. */
function Lines({ lines, follows }) {
  const box = useRef(null);
  const atEnd = useRef(true);
  useEffect(() => {
    if (follows && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines, follows]);
  const scrolled = ({ target }) => {
    atEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < 30;
  };
  return html`<ol class="log" tabindex="0" aria-label="Lines of the logs" ref=${box} onScroll=${scrolled}>
    ${lines.map(
      (line, i) => html`<li key=${i} class=${TONES[line.level] ?? ""}>
        <time title=${time(line.time)}>${clock(line.time)}</time><span class="who">${visible(line.service)}</span><span class="level">${visible(line.level)}</span><span class="said">${visible(line.text)}</span>
      </li>`,
    )}
  </ol>`;
}

function Start({ system }) {
  const { command, started_in } = system;
  return html`<${Card} title="Start">
    ${command ? html`<pre class="text">${visible(command)}</pre>` : html`<${Empty}>The command is not recorded.<//>`}
    ${started_in && html`<p class="faint">in <code>${visible(started_in)}</code></p>`}
  <//>`;
}

function Versions({ system }) {
  const { versions = {}, git } = system;
  const rows = Object.entries(versions);
  return html`<${Card} title="Versions">
    <dl class="versions">
      ${git && html`<dt>commit</dt><dd><code>${visible(git.commit)}</code> ${git.dirty && html`<${Badge} tone="warn" title="Files differed from the commit">with changes<//>`}</dd>`}
      ${rows.map(([name, version]) => html`<dt key=${name}>${visible(name)}</dt><dd><code>${visible(version)}</code></dd>`)}
    </dl>
    ${!git && !rows.length && html`<${Empty}>No versions are recorded.<//>`}
  <//>`;
}

/** Returns the keys of the configuration that have all words of `text` in key, value or origin; `changed`: without defaults. */
function findKeys(keys, text, changed) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const where = ({ key, value, origin, file }) => [key, written(value), origin, file ?? ""].join(" ").toLowerCase();
  return keys.filter(
    (each) => (!changed || each.origin !== "default") && words.every((word) => where(each).includes(word)),
  );
}

const written = (value) => (typeof value === "string" ? value : JSON.stringify(value));

const KEY_COLUMNS = [
  { name: "key", label: "key", cell: ({ key }) => html`<code>${visible(key)}</code>` },
  { name: "value", label: "value", cell: ({ value }) => html`<code class="setting">${visible(written(value))}</code>` },
  {
    name: "origin",
    label: "origin",
    cell: ({ origin, file }) =>
      html`<${Badge} tone=${origin === "default" ? "calm" : "good"}>${visible(origin)}<//> ${file && origin !== "default" ? html`<span class="faint">${visible(file)}</span>` : ""}`,
  },
];

function Configuration({ query, keys }) {
  const [text, changed] = [query.get("key") ?? "", query.get("keys") === "changed"];
  const found = useMemo(() => findKeys(keys, text, changed), [keys, text, changed]);
  const table = useMemo(
    () => html`<${Table} label="Configuration" tall columns=${KEY_COLUMNS} rows=${found} rowKey=${({ key }) => key} />`,
    [found],
  );
  const tools = html`
    <${Choice} label="Keys" choices=${[["all", "all"], ["changed", "not defaults"]]} value=${changed ? "changed" : "all"} onChange=${(value) => setQuery({ keys: value === "all" ? null : value })} />
    <input type="search" aria-label="Search the configuration" placeholder="key, value or origin" value=${text} onInput=${(event) => setQuery({ key: event.target.value })} />
  `;
  return html`<${Card} title=${`Configuration: ${count(found.length)} of ${count(keys.length)} keys`} tools=${tools}>
    ${found.length ? table : html`<${Empty}>${keys.length ? "No key matches." : "The configuration is not recorded."}<//>`}
  <//>`;
}
