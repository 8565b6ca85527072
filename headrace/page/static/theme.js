// Light or dark: as the system says, unless the person has chosen.

import { useEffect, useState } from "./vendor/preact.js";

const system = matchMedia("(prefers-color-scheme: dark)");
const chosen = () => localStorage.getItem("theme") ?? (system.matches ? "dark" : "light");

/** Returns the theme in use, and a function that sets it. Whoever draws on a canvas listens to the window's event `theme`. */
export function useTheme() {
  const [theme, setTheme] = useState(chosen);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    dispatchEvent(new Event("theme"));
  }, [theme]);
  useEffect(() => {
    const changed = () => setTheme(chosen());
    system.addEventListener("change", changed);
    return () => system.removeEventListener("change", changed);
  }, []);
  return [
    theme,
    (next) => {
      localStorage.setItem("theme", next);
      setTheme(next);
    },
  ];
}

// to ask for a style after a change of the page computes all styles anew, and a chart asks for dozens
const known = new Map();
addEventListener("theme", () => known.clear());

/** Returns the value of a colour or another custom property of style.css, for canvases. */
export function styleOf(name) {
  if (!known.has(name)) known.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return known.get(name);
}
