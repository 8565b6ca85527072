// What of a run's files could not be read.

import { visible } from "../format.js";
import { html } from "../vendor/preact.js";

/** Says what is missing in an answer of the server, and why. */
export const Problems = ({ of: answer }) =>
  (answer?.problems ?? []).map(
    (problem) => html`<p key=${problem} class="problem" role="note">${visible(problem)}</p>`,
  );
