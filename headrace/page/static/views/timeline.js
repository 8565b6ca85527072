// Who did what when: a lane for the trainer, each environment and each replica, on the clock.

import { navigate, rangeOf, setQuery } from "../address.js";
import { get, useData } from "../api.js";
import { Card, Empty, Loaded } from "../components/basics.js";
import { COLOURS, describe, LaneCanvas, shade } from "../components/lane_canvas.js";
import { arrange, barsIn, nearest, pan, textOf, within, zoom } from "../components/lanes.js";
import { apiPath, groupAddress, viewAddress } from "../components/links.js";
import { Problems } from "../components/problems.js";
import { clock, count, duration, time, visible } from "../format.js";
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";

const ROWS = 100;

/** Returns the range that is read for one that is shown: the same again on each side, so that moving shows no gap at once. */
const around = ([first, last], whole) => {
  const long = last - first;
  return [Math.max(whole[0], first - long), Math.min(whole[1], last + long)];
};

/** Returns the range of a step by the trainer's bars, with a little on each side; null if they are not there. */
function rangeOfStep(lanes, step) {
  const bars = lanes
    .filter((lane) => lane.kind === "trainer")
    .flatMap((lane) => lane.bars)
    .filter((bar) => bar.step === step);
  if (!bars.length) return null;
  const [first, last] = [Math.min(...bars.map((bar) => bar.start)), Math.max(...bars.map((bar) => bar.end))];
  const more = Math.max(0.1, (last - first) * 0.1);
  return [first - more, last + more];
}

export function Timeline({ run, query }) {
  // The whole of a long run is megabytes.
  const answer = useData(apiPath(run, "timeline"), {}, { every: (data) => (data?.running === false ? 0 : 30) });
  return html`<${Loaded} answer=${answer}>
    ${(data) => {
      if (!data.lanes.some((lane) => lane.bars.length))
        return html`<${Problems} of=${data} /><${Card} title="Timeline"><${Empty}>Nothing has happened yet: no step was trained, and no group was generated.<//><//>`;
      return html`<${Problems} of=${data} /><${Drawn} run=${run} query=${query} data=${data} />`;
    }}
  <//>`;
}

/** The range in use: at once in the view, after a pause in the address, from which what is shown in detail is read. */
function useRange(query, whole) {
  const asked = rangeOf(query);
  const [range, setRange] = useState(() => within(asked ?? whole, whole));
  const timer = useRef(null);
  useEffect(() => () => clearTimeout(timer.current), []);
  const set = (next) => {
    setRange(next);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      const isWhole = next[1] - next[0] >= (whole[1] - whole[0]) * 0.999;
      const [first, last] = isWhole ? [null, null] : next.map((each) => each.toFixed(3));
      setQuery({ first, last });
    }, 250);
  };
  const isFollowing = asked === null;
  useEffect(() => {
    if (isFollowing) setRange(whole);
  }, [whole[0], whole[1], isFollowing]);
  return [range, set];
}

function Drawn({ run, query, data }) {
  const whole = [data.first, Math.max(data.last, data.first + 1)];
  const [range, setRange] = useRange(query, whole);
  const asked = rangeOf(query);
  const wanted = asked && around(within(asked, whole), whole).map((each) => Number(each.toFixed(3)));
  const detail = useData(wanted ? apiPath(run, "timeline") : null, wanted ? { first: wanted[0], last: wanted[1] } : {});
  const isCovered =
    wanted && detail.data && detail.data.first <= range[0] + 0.01 && detail.data.last >= range[1] - 0.01;
  const shown = isCovered ? detail.data : data;
  const lanes = useMemo(() => arrange(shown.lanes), [shown]);
  const [focus, setFocus] = useFocus(query, lanes, range);
  const select = (next) => {
    setFocus(next);
    const bar = lanes[next.lane].bars[next.bar];
    if (bar && (bar.end < range[0] || bar.start > range[1])) {
      const half = (range[1] - range[0]) / 2;
      const middle = (bar.start + bar.end) / 2;
      setRange(within([middle - half, middle + half], whole));
    }
  };
  const open = ({ lane, bar }) => {
    const found = lanes[lane]?.bars[bar];
    if (found?.group) navigate(groupAddress(run, found.group, found.index));
    else if (Number.isFinite(found?.step)) navigate(viewAddress(run, "prompts", { step: found.step }));
  };
  return html`
    <${Card} title=${`${time(range[0])}, ${duration(range[1] - range[0])}`} tools=${html`<${Tools} run=${run} lanes=${lanes} range=${range} whole=${whole} setRange=${setRange} />`}>
      <${Legend} />
      <${LaneCanvas} lanes=${lanes} range=${range} whole=${whole} focus=${focus} onRange=${setRange} onFocus=${select} onOpen=${open} />
      <${Focused} run=${run} lanes=${lanes} focus=${focus} loading=${wanted && !isCovered} />
    <//>
    <${LaneTable} run=${run} lanes=${lanes} range=${range} focus=${focus} select=${select} />
  `;
}

/** The bar in use, in a lane of the address's name. It stays the same bar when the lanes are read again. */
function useFocus(query, lanes, range) {
  const [kept, setKept] = useState(null);
  const named = kept?.name ?? query.get("lane");
  const lane = Math.max(
    0,
    lanes.findIndex((each) => each.name === named),
  );
  const { bars } = lanes[lane];
  const middle = kept?.start ?? (range[0] + range[1]) / 2;
  const same = kept ? bars.findIndex((bar) => bar.start === kept.start && bar.text === kept.text) : -1;
  const focus = { lane, bar: same >= 0 ? same : (nearest(lanes[lane], middle) ?? 0) };
  const set = (next) => {
    const { name, bars: its } = lanes[next.lane];
    setKept({ name, start: its[next.bar]?.start, text: its[next.bar]?.text });
    if (name !== query.get("lane")) setQuery({ lane: name });
  };
  return [focus, set];
}

function Tools({ run, lanes, range, whole, setRange }) {
  const [problem, setProblem] = useState("");
  const middle = (range[0] + range[1]) / 2;
  const goTo = async (event) => {
    event.preventDefault();
    const text = new FormData(event.target).get("step").trim();
    const found = /^\d+$/.test(text) ? await findStep(run, lanes, Number(text)) : null;
    setProblem(found ? "" : `no step ${visible(text)} is known`);
    if (found) setRange(within(found, whole));
  };
  const button = (label, sign, next) =>
    html`<button aria-label=${label} title=${label} onClick=${() => setRange(next())}>${sign}</button>`;
  return html`
    <form class="tools" onSubmit=${goTo}>
      ${problem && html`<span role="alert">${problem}</span>`}
      <label class="check">step <input name="step" inputmode="numeric" size="6" aria-label="Go to step" /></label><button>Go</button>
    </form>
    ${button("Earlier", "‹", () => pan(range, -0.5, whole))}${button("Later", "›", () => pan(range, 0.5, whole))}
    ${button("Zoom in", "+", () => zoom(range, 0.5, middle, whole))}${button("Zoom out", "−", () => zoom(range, 2, middle, whole))}
    <button onClick=${() => setRange(whole)}>Whole run</button>
  `;
}

/** Returns the range of a step: by its bars, or, where these were merged, by the times of its groups. */
async function findStep(run, lanes, step) {
  const range = rangeOfStep(lanes, step);
  if (range) return range;
  const { groups } = await get(apiPath(run, "groups"), { step, limit: 100 }).catch(() => ({ groups: [] }));
  const ends = groups.flatMap((group) => (group.ended ? [group.ended] : []));
  return ends.length ? [Math.min(...groups.map((group) => group.enqueued)), Math.max(...ends) + 1] : null;
}

const Legend = () => html`<div class="meaning">
  ${Object.entries(COLOURS).map(
    ([kind, colour]) => html`<span key=${kind}>
      ${
        kind === "generation"
          ? [0, 1, 2].map(
              (version) =>
                html`<span key=${version} class="patch" style=${{ background: mixed(colour, shade({ what: kind, version })) }}></span>`,
            )
          : html`<span class=${`patch ${kind === "wait" ? "hatched" : ""}`} style=${kind === "wait" ? {} : { background: mixed(colour, shade({ what: kind })) }}></span>`
      } ${kind}${kind === "generation" ? ", shaded by weight version" : ""}
    </span>`,
  )}
  <span class="faint by-mouse">wheel: zoom · drag: choose a range · Shift and drag: move · click: open</span>
  <span class="faint by-touch">drag: move · tap: open</span>
</div>`;

const mixed = (colour, opacity) => `color-mix(in srgb, var(${colour}) ${Math.round(opacity * 100)}%, transparent)`;

/** The bar in use as text, for those who use keys, and for screen readers. */
function Focused({ run, lanes, focus, loading }) {
  const lane = lanes[focus.lane];
  const bar = lane?.bars[focus.bar];
  return html`<p class="focused" aria-live="polite">
    ${bar ? html`${visible(describe(lane, bar))} <span class="faint">${clock(bar.start)} – ${clock(bar.end)}</span> <${BarLink} run=${run} bar=${bar} />` : html`<span class="faint">${visible(lane?.name)}: no bars here</span>`}
    ${loading && html`<span class="faint" aria-busy="true"> · reading details …</span>`}
  </p>`;
}

const BarLink = ({ run, bar }) =>
  bar.group
    ? html`<a href=${groupAddress(run, bar.group)}>${visible(bar.group)}</a>${Number.isFinite(bar.index) && html` <a href=${groupAddress(run, bar.group, bar.index)}>#${bar.index}</a>`}`
    : Number.isFinite(bar.step)
      ? html`<a href=${viewAddress(run, "prompts", { step: bar.step })}>step ${bar.step}</a>`
      : "";

/** The bars of one lane in the range as a table: what the canvas shows, for those who can't see it. */
function LaneTable({ run, lanes, range, focus, select }) {
  const lane = lanes[focus.lane];
  const { bars, total } = useMemo(() => barsIn(lane, range, ROWS), [lane, range[0], range[1]]);
  const choose = (event) => {
    const to = Number(event.target.value);
    select({ lane: to, bar: nearest(lanes[to], (range[0] + range[1]) / 2) ?? 0 });
  };
  const tools = html`<label class="check">lane <select aria-label="Lane" value=${focus.lane} onChange=${choose}>
    ${lanes.map((each, i) => html`<option key=${each.name} value=${i} selected=${i === focus.lane}>${visible(each.name)}</option>`)}
  </select></label>`;
  return html`<${Card} title=${`${visible(lane.name)}: ${count(total)} bar${total === 1 ? "" : "s"} in this range${total > bars.length ? `, the first ${count(bars.length)}` : ""}`} tools=${tools}>
    ${lane.merged && html`<${Empty}>Short bars are merged with their neighbours. Zoom in to see each.<//>`}
    ${
      bars.length
        ? html`<div class="scroll"><table class="bars" aria-label="Bars"><thead><tr><th>start</th><th class="numeric">took</th><th>what</th><th class="numeric">version</th><th>of</th><th>text</th></tr></thead>
          <tbody>${bars.map(
            ({ bar, i }) => html`<tr key=${i} class=${i === focus.bar ? "current" : ""}>
              <td class="numeric left">${clock(bar.start)}</td><td class="numeric">${duration(bar.end - bar.start)}</td>
              <td>${bar.what}${bar.count > 1 ? ` (${bar.count})` : ""}</td><td class="numeric">${bar.version ?? "–"}</td><td><${BarLink} run=${run} bar=${bar} /></td><td>${visible(textOf(bar))}</td>
            </tr>`,
          )}</tbody></table></div>`
        : html`<${Empty}>It did nothing in this range.<//>`
    }
  <//>`;
}
