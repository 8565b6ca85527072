// Differences between two texts, by words.

/** Splits a text into words, spaces and single other characters. */
const wordsOf = (text) => String(text).match(/[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) ?? [];

const MOST_CHANGES = 600;

/**
 * Returns the parts `{kind: "same"|"removed"|"added", text}` that turn text `a` into `b` with the fewest words changed (Myers, "An O(ND)
 * difference algorithm"). Where they differ by more than `most` words, the part between their common beginning and end is removed and added
 * as a whole: work and memory are bounded by `most` squared.
 */
export function diffWords(a, b, most = MOST_CHANGES) {
  const [from, to] = [wordsOf(a), wordsOf(b)];
  let start = 0;
  while (start < from.length && start < to.length && from[start] === to[start]) start += 1;
  let end = 0;
  while (end < from.length - start && end < to.length - start && from.at(-1 - end) === to.at(-1 - end)) end += 1;
  const middle = [from.slice(start, from.length - end), to.slice(start, to.length - end)];
  const edits = editsOf(...middle, most) ?? [
    ...middle[0].map((text) => ["removed", text]),
    ...middle[1].map((text) => ["added", text]),
  ];
  const same = (words) => words.map((text) => ["same", text]);
  return join([...same(from.slice(0, start)), ...edits, ...same(from.slice(from.length - end))]);
}

/** Returns the edits [kind, word], or null if there are more than `most`. */
function editsOf(from, to, most) {
  const [n, m] = [from.length, to.length];
  const bound = Math.min(n + m, most);
  const furthest = new Int32Array(2 * bound + 3);
  const rounds = [];
  for (let d = 0; d <= bound; d += 1) {
    rounds.push(furthest.slice(bound + 1 - d - 1, bound + 1 + d + 2));
    for (let k = -d; k <= d; k += 2) {
      const at = bound + 1 + k;
      let x = k === -d || (k !== d && furthest[at - 1] < furthest[at + 1]) ? furthest[at + 1] : furthest[at - 1] + 1;
      while (x < n && x - k < m && from[x] === to[x - k]) x += 1;
      furthest[at] = x;
      if (x >= n && x - k >= m) return backtrack(from, to, rounds, d);
    }
  }
  return null;
}

/** Follows the furthest points of each round back from the ends of both lists. */
function backtrack(from, to, rounds, last) {
  const edits = [];
  let [x, y] = [from.length, to.length];
  for (let d = last; d > 0; d -= 1) {
    const furthest = (k) => rounds[d][k + d + 1];
    const k = x - y;
    const down = k === -d || (k !== d && furthest(k - 1) < furthest(k + 1));
    const before = down ? k + 1 : k - 1;
    const beforeX = furthest(before);
    const beforeY = beforeX - before;
    // The words that follow the change of this round are the same in both.
    for (const changed = down ? beforeX : beforeX + 1; x > changed; x -= 1) edits.push(["same", from[x - 1]]);
    edits.push(down ? ["added", to[beforeY]] : ["removed", from[beforeX]]);
    [x, y] = [beforeX, beforeY];
  }
  while (x > 0) {
    x -= 1;
    edits.push(["same", from[x]]);
  }
  return edits.reverse();
}

/** Joins neighbours of one kind. */
function join(edits) {
  const parts = [];
  for (const [kind, text] of edits) {
    if (parts.at(-1)?.kind === kind) parts.at(-1).text += text;
    else parts.push({ kind, text });
  }
  return parts;
}
