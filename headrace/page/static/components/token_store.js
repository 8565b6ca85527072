// The tokens of a trajectory, read in windows as they are looked at.

import { get } from "../api.js";
import { useEffect, useRef, useState } from "../vendor/preact.js";
import { withDerived } from "./columns.js";

/** Tokens of one request. */
export const WINDOW = 2048;
/** Windows of one request when all are read: the server looks through a file for each request. */
const TOGETHER = 8;
/** A trajectory of at most so many tokens is read whole without being asked. */
const WHOLE = TOGETHER * WINDOW;

/** Tokens and columns of the windows that were read. Values that weren't read, or are null, are NaN. */
class TokenStore {
  constructor() {
    this.total = null;
    this.texts = [];
    this.ids = [];
    this.columns = {};
    this.windows = new Set();
    this.head = null;
  }

  /** Takes an answer of the server. */
  add(answer) {
    const { total, first, tokens } = answer;
    this.total = total;
    this.head ??= answer;
    for (const [i, { id, text }] of tokens.entries()) {
      this.texts[first + i] = text;
      this.ids[first + i] = id;
    }
    for (const [name, values] of Object.entries(withDerived(answer.columns))) {
      this.columns[name] ??= new Float32Array(total).fill(Number.NaN);
      const column = this.columns[name];
      for (const [i, value] of values.entries()) column[first + i] = value ?? Number.NaN;
    }
    const last = first + tokens.length;
    // A window that the server cut short is not read yet.
    for (let at = first; at < last && Math.min(total, at + WINDOW) <= last; at += WINDOW)
      this.windows.add(Math.floor(at / WINDOW));
  }

  get count() {
    return this.total === null ? 0 : Math.ceil(this.total / WINDOW);
  }

  get isWhole() {
    return this.total !== null && this.windows.size >= this.count;
  }

  /** The place of a token's weight version in `versions`, -1 if it isn't known. */
  versionAt(at) {
    return this.head.versions.findIndex(([, start, end]) => at >= start && at < end);
  }
}

/**
 * Returns `{store, read, readAll, error, retry, reading}`; the view is drawn again when a window arrives. `read(window)` asks for one,
 * `readAll()` for all others, one after the other. `first`: the token with which reading begins.
 */
export function useTokens(path, first) {
  const [store] = useState(() => new TokenStore());
  const [state, setState] = useState({ arrived: 0, error: null, reading: false });
  const pending = useRef(new Set());
  const failed = useRef(new Set());
  const abort = useRef(new AbortController());
  useEffect(() => () => abort.current.abort(), []);
  const read = async (window, windows = 1) => {
    if (store.windows.has(window) || pending.current.has(window)) return;
    pending.current.add(window);
    try {
      store.add(await get(path, { first: window * WINDOW, count: windows * WINDOW }, abort.current.signal));
      setState((before) => ({ ...before, arrived: before.arrived + 1, error: null }));
    } catch (error) {
      failed.current.add(window);
      if (!abort.current.signal.aborted) setState((before) => ({ ...before, error: error.message }));
      throw error;
    } finally {
      pending.current.delete(window);
    }
  };
  const quietly = (window) => read(window).catch(() => {});
  const readAll = async () => {
    setState((before) => ({ ...before, reading: true }));
    try {
      for (let window = 0; window < store.count; window += 1) await read(window, TOGETHER);
    } catch {
      // `read` has kept the error for the view.
    }
    setState((before) => ({ ...before, reading: false }));
  };
  const start = async () => {
    await read(Math.floor(first / WINDOW));
    if (store.total <= WHOLE) await readAll();
  };
  const retry = () => {
    const again = [...failed.current];
    failed.current.clear();
    if (store.head === null) start().catch(() => {});
    else for (const window of again) quietly(window);
  };
  useEffect(() => {
    start().catch(() => {});
  }, [path]);
  return { store, ...state, read: quietly, readAll, retry };
}
