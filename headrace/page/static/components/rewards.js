// Rewards of a group as a strip of cells, and as a histogram.

import { count, number } from "../format.js";
import { html } from "../vendor/preact.js";
import { cellColour, position, rewardScale } from "./colour.js";

const HEIGHT = 18;

/** The width of each of `n` cells of a strip that is at most `most` wide. */
const cellWidth = (n, most = 132) => Math.max(2, Math.min(12, Math.floor(most / Math.max(1, n))));

/** A cell a reward: its colour and its height follow the value, which hovering tells. One without a reward is an outline. */
export function RewardStrip({ rewards, scale = rewardScale(rewards) }) {
  if (!rewards.length) return null;
  const width = cellWidth(rewards.length);
  const name = `rewards ${rewards.map((each) => number(each)).join(", ")}`;
  return html`<svg class="strip" width=${width * rewards.length} height=${HEIGHT} role="img" aria-label=${name}>
    ${rewards.map((reward, i) => {
      const at = position(scale, reward);
      const tall = at === null ? 0 : Math.round(3 + ((at + 1) / 2) * (HEIGHT - 3));
      const inside = Math.max(1, width - 1);
      return html`<g key=${i}>
        <title>${i}: ${number(reward, 4)}</title>
        <rect class="back" x=${i * width} y="0" width=${inside} height=${HEIGHT} />
        <rect x=${i * width} y=${HEIGHT - tall} width=${inside} height=${tall} style=${{ fill: cellColour(at ?? 0) }} class="fill" />
      </g>`;
    })}
  </svg>`;
}

/** Returns bars `{low, high, count}` of values: one for each distinct value where there are few, else of equal width. */
function histogram(values, most = 12) {
  const known = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!known.length) return [];
  const distinct = [...new Set(known)];
  if (distinct.length <= most)
    return distinct.map((value) => ({ low: value, high: value, count: known.filter((each) => each === value).length }));
  const [low, width] = [known[0], (known.at(-1) - known[0]) / most];
  const bars = Array.from({ length: most }, (_, i) => ({
    low: low + i * width,
    high: low + (i + 1) * width,
    count: 0,
  }));
  for (const value of known) bars[Math.min(most - 1, Math.floor((value - low) / width))].count += 1;
  return bars;
}

/** How many completions got which reward, as lines of text with a bar. */
export function Histogram({ values, label }) {
  const bars = histogram(values);
  const most = Math.max(...bars.map((bar) => bar.count));
  const scale = rewardScale(values);
  return html`<ul class="histogram" aria-label=${label}>
    ${bars.map(
      ({ low, high, count: n }) => html`<li key=${low}>
        <span class="numeric">${low === high ? number(low) : `${number(low)} – ${number(high)}`}</span>
        <span class="bar-of" style=${{ width: `${(n / most) * 100}%`, background: cellColour(position(scale, (low + high) / 2)) }}></span>
        <span>${count(n)}</span>
      </li>`,
    )}
  </ul>`;
}
