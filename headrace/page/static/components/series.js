// Reading curves of metrics: many charts ask, few requests are sent.

import { get } from "../api.js";
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { apiPath } from "./links.js";

/** Metrics in one request, requests at a time, and milliseconds in which charts that come into view are taken together. */
const TOGETHER = 24;
const AT_ONCE = 2;
const GATHER = 80;

/** Returns `items` in parts of at most `size`. */
const parts = (items, size) =>
  Array.from({ length: Math.ceil(items.length / size) }, (_, i) => items.slice(i * size, (i + 1) * size));

/** Reads series of runs with the same `params` (first, last, points), keeps them, and tells those who listen. */
class SeriesReader {
  constructor(params, read = get) {
    this.params = params;
    this.read = read;
    this.known = new Map();
    this.fresh = new Set();
    this.wanted = new Map();
    this.listeners = new Set();
    this.busy = 0;
    this.abort = new AbortController();
  }

  /** Asks for metrics of a run. `changed({metric: series}, error)` is called with those known, now and whenever more is. Returns an end. */
  listen(run, metrics, changed) {
    const listener = { run, metrics, changed };
    this.listeners.add(listener);
    this.#tell(listener);
    this.#want(
      run,
      metrics.filter((metric) => !this.fresh.has(`${run} ${metric}`)),
    );
    return () => this.listeners.delete(listener);
  }

  /** Reads again what is listened to; what else is known is read again when somebody listens. */
  refresh() {
    this.fresh.clear();
    for (const { run, metrics } of this.listeners) this.#want(run, metrics);
  }

  close() {
    clearTimeout(this.timer);
    this.abort.abort();
  }

  #want(run, metrics) {
    if (!metrics.length) return;
    if (!this.wanted.has(run)) this.wanted.set(run, new Set());
    for (const metric of metrics) this.wanted.get(run).add(metric);
    this.timer ??= setTimeout(() => this.#send(), GATHER);
  }

  #send() {
    this.timer = undefined;
    for (const [run, metrics] of this.wanted) {
      // charts that were scrolled past meanwhile need nothing
      const listened = new Set([...this.listeners].filter((each) => each.run === run).flatMap((each) => each.metrics));
      const left = new Set([...metrics].filter((metric) => listened.has(metric)));
      this.wanted.set(run, left);
      for (const part of parts([...left], TOGETHER)) {
        if (this.busy >= AT_ONCE) return;
        for (const metric of part) left.delete(metric);
        this.#readSome(run, part);
      }
      this.wanted.delete(run);
    }
  }

  async #readSome(run, metrics) {
    let error = null;
    this.busy += 1;
    try {
      const { series } = await this.read(
        apiPath(run, "series"),
        { ...this.params, metric: metrics },
        this.abort.signal,
      );
      for (const each of series) this.known.set(`${run} ${each.metric}`, each);
      for (const metric of metrics) this.fresh.add(`${run} ${metric}`);
    } catch (failed) {
      if (this.abort.signal.aborted) return;
      error = failed.message;
    } finally {
      this.busy -= 1;
    }
    for (const listener of this.listeners)
      if (listener.run === run && listener.metrics.some((metric) => metrics.includes(metric)))
        this.#tell(listener, error);
    if (!this.timer) this.#send();
  }

  #tell({ run, metrics, changed }, error = null) {
    const found = metrics.map((metric) => [metric, this.known.get(`${run} ${metric}`)]).filter(([, series]) => series);
    if (found.length || error) changed(Object.fromEntries(found), error);
  }
}

/** Returns a reader for `params`, and reads again when `version` changes (the newest step). */
export function useReader(params, version) {
  const key = JSON.stringify(params);
  const reader = useMemo(() => new SeriesReader(params), [key]);
  const first = useRef(true);
  useEffect(() => () => reader.close(), [reader]);
  useEffect(() => {
    if (!first.current) reader.refresh();
    first.current = false;
  }, [version]);
  return reader;
}

/**
 * Returns `{found: {run: {metric: series}}, error, params}` of the metrics of `runs` while `active`; `params` are those that the series
 * were read with. The series of before stay until new ones are there.
 */
export function useSeries(reader, runs, metrics, active) {
  const [state, setState] = useState({ found: {}, error: null, params: null });
  useEffect(() => {
    if (!active) return undefined;
    const ends = runs.map((run) =>
      reader.listen(run, metrics, (series, error) =>
        setState((before) => ({ found: { ...before.found, [run]: series }, error, params: reader.params })),
      ),
    );
    return () => {
      for (const end of ends) end();
    };
  }, [reader, JSON.stringify([runs, metrics]), active]);
  return state;
}

/** Shows `children(active)` in a box; `active` while the box is in view or nearly. It keeps its height while it is not. */
export function InView({ height, class: name = "", label, children }) {
  const place = useRef(null);
  const [active, setActive] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver((seen) => setActive(seen.at(-1).isIntersecting), { rootMargin: "400px" });
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  return html`<section class=${name} aria-label=${label} ref=${place} style=${{ minHeight: `${height}px` }}>${children(active)}</section>`;
}
