// Lanes of bars on a canvas: drawing, and what pointers and keys do.

import { duration, visible } from "../format.js";
import { styleOf } from "../theme.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { AXIS, find, heightOf, kindOf, laneAt, moveBar, pan, textOf, ticks, tickText, within, zoom } from "./lanes.js";

/** The kinds of bars: the colour of each in style.css. */
export const COLOURS = {
  generation: "--series-1",
  training: "--series-3",
  refit: "--series-4",
  scoring: "--series-7",
  validation: "--series-2",
  checkpoint: "--series-5",
  wait: "--faint",
  other: "--series-8",
};
/** How opaque bars are, so that text on them can be read in both themes. Consecutive weight versions differ. */
const SHADES = [0.38, 0.55, 0.85];
const OTHERS = 0.42;

export const shade = (bar) =>
  kindOf(bar.what) === "generation" && Number.isFinite(bar.version) ? SHADES[bar.version % SHADES.length] : OTHERS;

/** Pixels of a tick, with room for a time of day. */
const TICK_PX = 60;

const gutterOf = (width) => (width < 600 ? 84 : 150);

/** A pattern of slanted lines, by which waits differ from work. */
function hatch(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = 6;
  tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const x of [-3, 0, 3, 6]) {
    pen.moveTo(x, 6);
    pen.lineTo(x + 6, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

function drawLane(context, lane, place, paints) {
  const { x, width, gutter, y } = place;
  const [top, row] = [lane.top - y + 3, lane.row];
  const tall = Math.max(1.5, row - (row > 4 ? 1 : 0));
  lane.bars.forEach((bar, i) => {
    const [from, to] = [Math.max(gutter, x(bar.start)), Math.min(width, x(bar.end))];
    if (to < gutter || from > width || x(bar.end) < gutter) return;
    const kind = kindOf(bar.what);
    const wide = Math.max(1, to - from - (to - from > 4 ? 0.5 : 0));
    // Bars that lie on one another must not add up to another shade.
    context.globalAlpha = 1;
    context.fillStyle = paints.surface;
    context.fillRect(from, top + lane.of[i] * row, wide, tall);
    context.globalAlpha = kind === "wait" ? 0.8 : shade(bar);
    context.fillStyle = paints[kind];
    context.fillRect(from, top + lane.of[i] * row, wide, tall);
    if (tall < 11 || wide < 34) return;
    context.globalAlpha = 1;
    context.fillStyle = kind === "generation" && shade(bar) > 0.7 ? paints.onBar : paints.text;
    const text = labelOf(bar);
    if (context.measureText(text).width < wide - 6) context.fillText(text, from + 3, top + lane.of[i] * row + tall / 2);
  });
  context.globalAlpha = 1;
}

/** The text on a bar, if it fits. */
const labelOf = (bar) =>
  kindOf(bar.what) === "generation"
    ? `v${bar.version ?? "?"}`
    : kindOf(bar.what) === "training" && Number.isFinite(bar.step)
      ? `${bar.what} ${bar.step}`
      : bar.what;

function outline(context, lane, bar, { x, width, gutter, y }, colour) {
  const box = lane.bars[bar];
  if (!box) return;
  const [from, to] = [Math.max(gutter, x(box.start)), Math.min(width, x(box.end))];
  if (to < gutter || from > width) return;
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.strokeRect(
    from - 1,
    lane.top - y + 2 + lane.of[bar] * lane.row,
    Math.max(3, to - from + 2),
    Math.max(4, lane.row + 1),
  );
}

function drawAxis(context, range, place, paints) {
  const { x, width, gutter, height } = place;
  const { step, times } = ticks(range, Math.max(2, Math.floor((width - gutter) / TICK_PX)));
  let free = 0;
  for (const time of times) {
    context.fillStyle = paints.grid;
    context.fillRect(x(time), AXIS - 4, 1, height);
    context.fillStyle = paints.faint;
    const text = tickText(time, step);
    const end = x(time) + 3 + context.measureText(text).width;
    if (end > width || x(time) < free) continue;
    context.fillText(text, x(time) + 3, AXIS / 2);
    free = end + 4;
  }
}

function draw(canvas, { lanes, range, focus, hover, drag, y }) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const paints = Object.fromEntries(Object.entries(COLOURS).map(([kind, name]) => [kind, styleOf(name)]));
  paints.wait = hatch(context, paints.wait);
  Object.assign(paints, {
    text: styleOf("--text"),
    onBar: styleOf("--on-bar"),
    faint: styleOf("--faint"),
    grid: styleOf("--grid"),
    surface: styleOf("--surface"),
  });
  const gutter = gutterOf(width);
  const x = (time) => gutter + ((time - range[0]) / (range[1] - range[0])) * (width - gutter);
  const place = { x, width, height, gutter, y };
  context.textBaseline = "middle";
  context.font = "11px system-ui, sans-serif";
  drawAxis(context, range, place, paints);
  context.save();
  context.beginPath();
  context.rect(0, AXIS, width, height - AXIS);
  context.clip();
  lanes.forEach((lane, i) => {
    if (lane.top - y > height || lane.top + lane.height - y < AXIS) return;
    context.fillStyle = paints.grid;
    context.fillRect(0, lane.top - y + lane.height - 1, width, 1);
    drawLane(context, lane, place, paints);
    context.fillStyle = paints.surface;
    context.fillRect(0, lane.top - y, gutter - 4, lane.height - 1);
    context.fillStyle = focus?.lane === i ? styleOf("--accent") : paints.text;
    context.fillText(fit(context, visible(lane.name), gutter - 10), 2, lane.top - y + lane.height / 2);
  });
  for (const each of [hover, focus])
    if (each && lanes[each.lane])
      outline(context, lanes[each.lane], each.bar, place, each === focus ? styleOf("--accent") : paints.text);
  context.restore();
  if (drag) {
    context.globalAlpha = 0.2;
    context.fillStyle = styleOf("--accent");
    context.fillRect(Math.min(...drag), 0, Math.abs(drag[1] - drag[0]), height);
  }
}

/** A text that is not wider than `width`: cut off in its middle, since names of replicas differ at their ends. */
function fit(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  for (let keep = text.length - 1; keep > 4; keep -= 1) {
    const short = `${text.slice(0, Math.ceil(keep / 2))}…${text.slice(text.length - Math.floor(keep / 2))}`;
    if (context.measureText(short).width <= width) return short;
  }
  return "…";
}

/** Draws again, in the next frame, whatever changed. */
function useDrawing(canvas, scroller, state) {
  const newest = useRef(state);
  newest.current = state;
  const frame = useRef(0);
  const again = () => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(
      () => canvas.current && draw(canvas.current, { ...newest.current, y: scroller.current.scrollTop }),
    );
  };
  useEffect(again);
  useEffect(() => {
    const resize = new ResizeObserver(again);
    resize.observe(canvas.current);
    addEventListener("theme", again);
    scroller.current.addEventListener("scroll", again);
    return () => {
      resize.disconnect();
      removeEventListener("theme", again);
      cancelAnimationFrame(frame.current);
    };
  }, []);
}

/** Over the bars the wheel zooms about the pointer, and moves along with Shift or sideways; over the names it scrolls. */
function useWheel({ canvas, where, range, whole, onRange }) {
  const wheel = (event) => {
    const { x, gutter, time, perPixel } = where(event);
    if (x < gutter) return;
    event.preventDefault();
    const along = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    const isAlong = event.shiftKey || Math.abs(along) > Math.abs(event.deltaY);
    if (isAlong) onRange(within([range[0] + along * perPixel, range[1] + along * perPixel], whole));
    else onRange(zoom(range, 1.0015 ** event.deltaY, time, whole));
  };
  useEffect(() => {
    const place = canvas.current;
    place.addEventListener("wheel", wheel, { passive: false });
    return () => place.removeEventListener("wheel", wheel);
  });
}

/** Returns what pointers do: the wheel zooms, a drag chooses a range (with Shift, or by touch, it moves), a click opens. */
function usePointers({ canvas, scroller, lanes, range, whole, onRange, onFocus, onOpen }) {
  const [hover, setHover] = useState(null);
  const [drag, setDrag] = useState(null);
  const from = useRef(null);
  const where = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const gutter = gutterOf(box.width);
    const x = event.clientX - box.left;
    const perPixel = (range[1] - range[0]) / (box.width - gutter);
    return {
      x,
      gutter,
      perPixel,
      time: range[0] + (x - gutter) * perPixel,
      y: event.clientY - box.top + scroller.current.scrollTop,
    };
  };
  const at = (event) => {
    const { x, y, gutter, time, perPixel } = where(event);
    return x < gutter || event.clientY - canvas.current.getBoundingClientRect().top < AXIS
      ? null
      : find(lanes, time, y, 3 * perPixel);
  };
  useWheel({ canvas, where, range, whole, onRange });
  const down = (event) => {
    if (event.button !== 0) return;
    canvas.current.setPointerCapture(event.pointerId);
    from.current = { ...where(event), range, moves: event.shiftKey || event.pointerType === "touch" };
  };
  const move = (event) => {
    const start = from.current;
    const { x, y, gutter, perPixel } = where(event);
    // names may be cut off
    canvas.current.title = x < gutter ? visible(lanes[laneAt(lanes, y)]?.name) : "";
    if (!start) return setHover(withPlace(at(event), event, canvas.current));
    if (start.moves) {
      const by = (start.x - x) * perPixel;
      return onRange(within([start.range[0] + by, start.range[1] + by], whole));
    }
    return setDrag([Math.max(start.gutter, start.x), Math.max(start.gutter, x)]);
  };
  const up = (event) => {
    const start = from.current;
    from.current = null;
    setDrag(null);
    if (!start) return;
    const { x, time } = where(event);
    if (Math.abs(x - start.x) > 4) {
      if (!start.moves)
        onRange(
          within(
            [start.time, time].sort((a, b) => a - b),
            whole,
          ),
        );
      return;
    }
    const found = at(event);
    if (!found) return;
    onFocus(found);
    onOpen(found);
  };
  const leave = () => setHover(null);
  const cancel = () => {
    from.current = null;
    setDrag(null);
    leave();
  };
  return {
    hover,
    drag,
    handlers: {
      onPointerDown: down,
      onPointerMove: move,
      onPointerUp: up,
      onPointerCancel: cancel,
      onPointerLeave: leave,
    },
  };
}

/** A found bar with where its text is shown: left of the pointer where there is no room to the right. */
function withPlace(found, event, canvas) {
  if (!found) return null;
  const box = canvas.getBoundingClientRect();
  const isRight = event.clientX - box.left > box.width - 340;
  return {
    ...found,
    left: isRight ? undefined : event.clientX - box.left + 14,
    right: isRight ? box.right - event.clientX + 14 : undefined,
    top: event.clientY - box.top + 14,
  };
}

/** What a bar is, in a line. */
export function describe(lane, bar) {
  const isGeneration = kindOf(bar.what) === "generation" && Number.isFinite(bar.version);
  const parts = [
    `${lane.name}: ${textOf(bar)}`,
    duration(bar.end - bar.start),
    isGeneration ? `version ${bar.version}` : "",
    bar.count > 1 ? `${bar.count} together` : "",
  ];
  return parts.filter(Boolean).join(", ");
}

/** Returns what a key does in the lanes, or undefined. */
function keyAction(event, { lanes, range, whole, focus, onRange, onFocus, onOpen }) {
  const here = lanes[focus.lane]?.bars[focus.bar];
  const middle =
    here && here.start >= range[0] && here.end <= range[1] ? (here.start + here.end) / 2 : (range[0] + range[1]) / 2;
  if (event.shiftKey && ["ArrowLeft", "ArrowRight"].includes(event.key))
    return () => onRange(pan(range, event.key === "ArrowLeft" ? -0.25 : 0.25, whole));
  const others = {
    "+": () => onRange(zoom(range, 0.5, middle, whole)),
    "=": () => onRange(zoom(range, 0.5, middle, whole)),
    "-": () => onRange(zoom(range, 2, middle, whole)),
    0: () => onRange(whole),
    Enter: () => onOpen(focus),
  };
  const moved = moveBar(event.key, lanes, focus);
  return others[event.key] ?? (moved && (() => onFocus(moved)));
}

/** The lanes. `focus` is `{lane, bar}` (numbers); `onOpen` gets one; `onRange` gets the next range. */
export function LaneCanvas({ lanes, range, whole, focus, onRange, onFocus, onOpen }) {
  const [canvas, scroller] = [useRef(null), useRef(null)];
  const { hover, drag, handlers } = usePointers({ canvas, scroller, lanes, range, whole, onRange, onFocus, onOpen });
  useDrawing(canvas, scroller, { lanes, range, focus, hover, drag });
  const pressed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = keyAction(event, { lanes, range, whole, focus, onRange, onFocus, onOpen });
    if (!act) return;
    event.preventDefault();
    act();
  };
  useEffect(() => {
    const [lane, frame] = [lanes[focus.lane], scroller.current];
    if (!lane) return;
    if (lane.top - AXIS < frame.scrollTop) frame.scrollTop = lane.top - AXIS;
    else if (lane.top + lane.height > frame.scrollTop + frame.clientHeight)
      frame.scrollTop = lane.top + lane.height - frame.clientHeight;
  }, [focus.lane]);
  const height = heightOf(lanes) + 2;
  const hovered = hover && lanes[hover.lane]?.bars[hover.bar];
  return html`<div class="lanes-place">
    <div class="lanes" ref=${scroller} tabindex="0" role="application" aria-roledescription="timeline" onKeyDown=${pressed}
      aria-label=${`${lanes.length} lanes; left and right go from bar to bar, up and down from lane to lane, plus and minus zoom, 0 shows all, Enter opens`}
      style=${{ height: `${height}px` }}>
      <div style=${{ height: `${height}px` }}><canvas ref=${canvas} style=${{ height: `min(${height}px, 100%)` }} ...${handlers}></canvas></div>
    </div>
    ${hovered && html`<div class="tip" style=${{ left: px(hover.left), right: px(hover.right), top: px(hover.top) }}>${visible(describe(lanes[hover.lane], hovered))}</div>`}
  </div>`;
}

const px = (value) => (value === undefined ? "auto" : `${value}px`);
