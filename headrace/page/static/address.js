// The address of the view, and going to another one without loading the page anew.

import { useEffect, useState } from "./vendor/preact.js";

const read = () => ({ path: location.pathname, query: new URLSearchParams(location.search) });

/** Goes to an address of this page. `replace` leaves no entry in the browser's history, for changes of a filter. */
export function navigate(address, { replace = false } = {}) {
  const url = new URL(address, location.href);
  if (url.origin !== location.origin) return;
  if (url.href !== location.href) history[replace ? "replaceState" : "pushState"](null, "", url);
  dispatchEvent(new PopStateEvent("popstate"));
  if (!replace) scrollTo(0, 0);
}

/** Returns `{path, query}` of the address, always the current one. Links to this page don't load it anew. */
export function useAddress() {
  const [address, setAddress] = useState(read);
  useEffect(() => {
    const moved = () => setAddress(read());
    const clicked = (event) => {
      const link = event.target.closest?.("a[href]");
      if (!link || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
      if (link.origin !== location.origin || link.target || link.hasAttribute("download")) return;
      event.preventDefault();
      navigate(link.href);
    };
    addEventListener("popstate", moved);
    addEventListener("click", clicked);
    return () => {
      removeEventListener("popstate", moved);
      removeEventListener("click", clicked);
    };
  }, []);
  return address;
}

/** Returns the address of this view with some query parameters changed; null or "" removes one. */
export function withQuery(changes) {
  const next = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") next.delete(name);
    else next.set(name, String(value));
  }
  const text = next.toString();
  return location.pathname + (text && `?${text}`);
}

/** Changes query parameters of the address in place. */
export const setQuery = (changes) => navigate(withQuery(changes), { replace: true });

/** Returns the range in a query as [first, last], or null. */
export function rangeOf(query) {
  const [first, last] = ["first", "last"].map((name) => Number.parseFloat(query.get(name)));
  return Number.isFinite(last - first) && first < last ? [first, last] : null;
}
