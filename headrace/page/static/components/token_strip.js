// A whole trajectory as a strip: a pixel for several tokens.

import { styleOf } from "../theme.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { position } from "./colour.js";
import { columnOf } from "./columns.js";

const HEIGHT = 26;

/** Returns for each of `pixels` columns of a strip the strongest position of its tokens; null where none was read. */
function strongest(values, total, pixels, scale, plain) {
  const per = total / pixels;
  return Array.from({ length: pixels }, (_, pixel) => {
    let best = null;
    const end = Math.max(Math.floor(pixel * per) + 1, Math.floor((pixel + 1) * per));
    for (let at = Math.floor(pixel * per); at < end; at += 1) {
      if (!Number.isFinite(values[at])) continue;
      const here = scale.kind === "names" ? Number(values[at] !== plain) : position(scale, values[at]);
      if (best === null || Math.abs(here) > Math.abs(best)) best = here;
    }
    return best;
  });
}

function draw(canvas, { store, column, scale, selected }) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const [low, high, back, line, text] = ["--heat-low", "--heat-high", "--raised", "--line", "--text"].map(styleOf);
  context.fillStyle = back;
  context.fillRect(0, 0, width, HEIGHT);
  const values = store.columns[column] ?? [];
  const pixels = Math.max(1, Math.min(width, store.total));
  const wide = width / pixels;
  strongest(values, store.total, pixels, scale, columnOf(column ?? "").plain).forEach((at, i) => {
    if (!at) return;
    context.globalAlpha = Math.max(0.12, Math.abs(at));
    context.fillStyle = at < 0 ? low : high;
    context.fillRect(i * wide, 0, Math.ceil(wide), HEIGHT - 5);
  });
  context.globalAlpha = 1;
  store.head.versions.forEach(([, start, end], i) => {
    context.fillStyle = i % 2 ? text : line;
    context.fillRect((start / store.total) * width, HEIGHT - 4, ((end - start) / store.total) * width, 3);
  });
  context.strokeStyle = text;
  context.lineWidth = 2;
  context.strokeRect(Math.max(1, (selected / store.total) * width - 3), 1, 6, HEIGHT - 2);
}

/** The strip. A click on it selects a token; the field below the text is its counterpart for the keyboard. */
export function TokenStrip({ store, arrived, column, scale, selected, onSelect }) {
  const canvas = useRef(null);
  const [sized, setSized] = useState(0);
  useEffect(() => {
    const again = () => setSized((before) => before + 1);
    const resize = new ResizeObserver(again);
    resize.observe(canvas.current);
    addEventListener("theme", again);
    return () => {
      resize.disconnect();
      removeEventListener("theme", again);
    };
  }, []);
  useEffect(() => draw(canvas.current, { store, column, scale, selected }), [arrived, column, scale, selected, sized]);
  const clicked = (event) => {
    const box = canvas.current.getBoundingClientRect();
    onSelect(Math.min(store.total - 1, Math.floor(((event.clientX - box.left) / box.width) * store.total)));
  };
  return html`<canvas ref=${canvas} class="token-strip" role="img" aria-label="All tokens in a strip; the frame is where the selected one is" onClick=${clicked}></canvas>`;
}
