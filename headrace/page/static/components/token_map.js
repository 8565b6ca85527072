// Tokens as a heat map over their text. Only those near the visible part are in the page.

import { count, visible } from "../format.js";
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { colourOf, shownToken } from "./columns.js";
import { WINDOW } from "./token_store.js";

/** Tokens of a block, which is in the page or not as a whole. */
const BLOCK = 256;
const HEIGHT = 440;

/** The token that a key moves to from token `at`; null for other keys, and for those that need the lines of the text. */
function moveToken(key, at, total, isControl = false) {
  const to = {
    ArrowLeft: at - 1,
    ArrowRight: at + 1,
    PageUp: at - BLOCK,
    PageDown: at + BLOCK,
    Home: isControl ? 0 : null,
    End: isControl ? total - 1 : null,
  }[key];
  return to === undefined || to === null ? null : Math.max(0, Math.min(total - 1, to));
}

/** The token above or below that of an element: in the next line, nearest to it. */
function nextLine(element, direction) {
  const all = [...element.closest(".tokens").querySelectorAll("[data-at]")];
  const [from, box] = [all.indexOf(element), element.getBoundingClientRect()];
  let best = null;
  for (let i = from + direction; i >= 0 && i < all.length; i += direction) {
    const each = all[i].getBoundingClientRect();
    if (Math.abs(each.top - box.top) < 4) continue;
    if (best && Math.abs(each.top - best.top) > 4) break;
    const away = Math.abs(each.left - box.left);
    if (!best || away < best.away) best = { at: Number(all[i].dataset.at), away, top: each.top };
  }
  return best?.at ?? null;
}

function spans(store, block, column, scale, selected, starts) {
  const parts = [];
  const values = store.columns[column];
  for (let at = block * BLOCK; at < Math.min(store.total, (block + 1) * BLOCK); at += 1) {
    const version = store.versionAt(at);
    if (starts.calls.has(at))
      parts.push(html`<span class="call-mark" key=${`c${at}`}>call ${starts.calls.get(at)}</span>`);
    if (starts.versions.has(at))
      parts.push(html`<span class="version-mark" key=${`v${at}`}>v${starts.versions.get(at)}</span>`);
    parts.push(html`<span
      key=${at}
      data-at=${at}
      class=${`token v${version % 2} ${at === selected ? "selected" : ""}`}
      style=${{ backgroundColor: values ? colourOf(column, scale, values[at]) : "transparent" }}
    >${visible(shownToken(store.texts[at], store.ids[at]))}</span>`);
  }
  return parts;
}

/** A block of tokens, or a place as high as it was or will be. */
function Block({ store, block, isNear, column, scale, selected, starts, heights, read }) {
  const place = useRef(null);
  const window = Math.floor((block * BLOCK) / WINDOW);
  const isHere = store.windows.has(window);
  const isShown = isNear && isHere;
  useEffect(() => {
    if (isNear && !isHere) read(window);
  }, [isNear, isHere]);
  useEffect(() => {
    if (isShown) heights.set(block, place.current.offsetHeight);
  });
  const tokens = useMemo(
    () => (isShown ? spans(store, block, column, scale, selected, starts) : null),
    [isShown, column, scale, selected, starts],
  );
  const height = isShown ? undefined : `${heights.get(block) ?? heights.typical()}px`;
  return html`<div ref=${place} class="block" data-block=${block} style=${{ height: height ?? "auto" }}>
    ${isShown ? tokens : isNear ? html`<span class="faint">Reading tokens from ${count(block * BLOCK)} …</span>` : null}
  </div>`;
}

/** The heights of blocks that were in the page, and what others are likely to have. */
class Heights extends Map {
  typical() {
    return this.size ? Math.round([...this.values()].reduce((a, b) => a + b, 0) / this.size) : HEIGHT;
  }
}

/** The numbers of blocks that are near the visible part of `place`. */
function useNear(place, total) {
  const [near, setNear] = useState(() => new Set());
  useEffect(() => {
    const observer = new IntersectionObserver(
      (entries) =>
        setNear((before) => {
          const next = new Set(before);
          for (const { target, isIntersecting } of entries)
            isIntersecting ? next.add(Number(target.dataset.block)) : next.delete(Number(target.dataset.block));
          return next;
        }),
      { root: place.current, rootMargin: "600px 0px" },
    );
    for (const block of place.current.querySelectorAll(".block")) observer.observe(block);
    return () => observer.disconnect();
  }, [total]);
  return near;
}

/** Brings a token into the middle of the view, once its block is in the page. */
function useReveal(place, at, arrived, near) {
  const wanted = useRef(null);
  const last = useRef(null);
  if (last.current !== at) {
    last.current = at;
    wanted.current = at;
  }
  useEffect(() => {
    if (wanted.current === null) return;
    const scroller = place.current;
    const token = scroller.querySelector(`[data-at="${wanted.current}"]`);
    const target = token ?? scroller.querySelector(`[data-block="${Math.floor(wanted.current / BLOCK)}"]`);
    const [box, frame] = [target.getBoundingClientRect(), scroller.getBoundingClientRect()];
    const isSeen = box.top >= frame.top + 4 && box.bottom <= frame.bottom - 4;
    if (!isSeen || !token) scroller.scrollTop += box.top - frame.top - (token ? frame.height / 2 : 0);
    if (token) wanted.current = null;
  }, [at, arrived, near]);
}

/**
 * The text with a colour behind each token. `selected` is the token that keys move; `onSelect(at)` and `onHover(at)` tell of others.
 * `starts` has the tokens at which weight versions and calls begin.
 */
export function TokenMap({ store, arrived, column, scale, selected, onSelect, onHover, starts, read, label }) {
  const place = useRef(null);
  const [heights] = useState(() => new Heights());
  const near = useNear(place, store.total);
  useReveal(place, selected, arrived, near);
  const atOf = (event) => event.target.closest?.("[data-at]")?.dataset.at;
  const pressed = (event) => {
    if (event.altKey || event.metaKey) return;
    let to = moveToken(event.key, selected, store.total, event.ctrlKey);
    const lines = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const element = lines && place.current.querySelector(`[data-at="${selected}"]`);
    if (element) to = nextLine(element, lines);
    if (to === null || to === undefined) return;
    event.preventDefault();
    onSelect(to);
  };
  return html`<div
    ref=${place}
    class="tokens"
    tabindex="0"
    role="application"
    aria-roledescription="heat map of tokens"
    aria-label=${label}
    onKeyDown=${pressed}
    onMouseOver=${(event) => onHover(atOf(event) === undefined ? null : Number(atOf(event)))}
    onMouseLeave=${() => onHover(null)}
    onClick=${(event) => atOf(event) !== undefined && onSelect(Number(atOf(event)))}
  >
    ${Array.from(
      { length: Math.ceil(store.total / BLOCK) },
      (_, block) => html`<${Block}
        key=${block}
        store=${store}
        block=${block}
        isNear=${near.has(block)}
        column=${column}
        scale=${scale}
        selected=${Math.floor(selected / BLOCK) === block ? selected : -1}
        starts=${starts}
        heights=${heights}
        read=${read}
      />`,
    )}
  </div>`;
}
