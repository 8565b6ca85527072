// Reading the server's JSON.

import { useEffect, useState } from "./vendor/preact.js";

/** Returns the answer of `path`. `params` values may be arrays; null, undefined and "" are left out. Throws an Error with the reason. */
export async function get(path, params = {}, signal = undefined) {
  const url = new URL(path, location.href);
  for (const [name, value] of Object.entries(params))
    for (const each of Array.isArray(value) ? value : [value])
      if (each !== null && each !== undefined && each !== "") url.searchParams.append(name, String(each));
  const answer = await fetch(url, { signal, headers: { accept: "application/json" } });
  if (answer.ok) return answer.json();
  if (answer.status === 401)
    throw new Error("This browser is not signed in, or no longer: headrace page prints an address that signs it in.");
  const problem = await answer.json().catch(() => ({}));
  throw new Error(typeof problem.detail === "string" ? problem.detail : `${url.pathname}: HTTP ${answer.status}`);
}

/**
 * Returns `{data, error, loading}` of a call, read again when its arguments change, and every `every` seconds while the tab is visible; a
 * function of the last answer, or of null, may say how many. The last answer stays while the next is on its way; an error does not remove it. `path` null reads nothing.
 */
export function useData(path, params = {}, { every = 0 } = {}) {
  const [state, setState] = useState({ data: null, error: null, loading: true });
  const key = JSON.stringify([path, params]);
  const isFixed = typeof every === "number";
  useEffect(() => {
    if (path === null) return undefined;
    const abort = new AbortController();
    let timer;
    let data = null;
    const read = async () => {
      if (data === null || !document.hidden) {
        try {
          data = await get(path, params, abort.signal);
          setState({ data, error: null, loading: false });
        } catch (error) {
          if (abort.signal.aborted) return;
          setState((before) => ({ data: before.data, error: error.message, loading: false }));
        }
      }
      const seconds = isFixed ? every : every(data);
      if (seconds && !abort.signal.aborted) timer = setTimeout(read, seconds * 1000);
    };
    setState((before) => ({ ...before, loading: true }));
    read();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [key, isFixed && every]);
  return state;
}
