// Addresses of the views of groups, and the tones of their states.

const part = encodeURIComponent;

/** The address of a group's view, or of one of its trajectories. */
export const groupAddress = (run, group, index = null) =>
  `/runs/${part(run)}/groups/${part(group)}${index === null ? "" : `/${index}`}`;

/** The address of a view of a run, with query parameters, whose values may be lists; those without a value are left out. */
export function viewAddress(run, view = "", query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query))
    for (const each of [value].flat())
      if (each !== null && each !== undefined && each !== "") parameters.append(name, String(each));
  const text = parameters.toString();
  return `/runs/${part(run)}${view && `/${view}`}${text && `?${text}`}`;
}

/** The path of an API call about a run. */
export const apiPath = (run, ...parts) => ["/api/runs", part(run), ...parts.map(part)].join("/");

/** The states of a group, in the order of its life, then its other ends. */
export const STATES = [
  "queued",
  "open",
  "scoring",
  "ready",
  "reserved",
  "trained",
  "filtered",
  "failed",
  "evaluated",
  "unused",
];

/** The tone of a badge for a group's state. */
export const toneOf = (state) =>
  ({ trained: "good", evaluated: "good", failed: "bad", filtered: "warn" })[state] ?? "calm";
