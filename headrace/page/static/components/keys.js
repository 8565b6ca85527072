// Keys that act on a whole view.

import { useLayoutEffect } from "../vendor/preact.js";

/** Whether a key belongs to a field in which a person writes or chooses. */
const isField = (element) =>
  Boolean(element?.closest?.("input, textarea, select, [contenteditable]")) ||
  element?.getAttribute?.("role") === "textbox";

/** Calls `keys[name]()` for a key pressed alone, outside of fields, from the moment at which its view is drawn. */
export function useKeys(keys) {
  useLayoutEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || isField(event.target)) return;
      const act = keys[event.key];
      if (!act) return;
      event.preventDefault();
      act(event);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
}
