// What of a run's files could not be read.

import { html } from "../vendor/preact.js";
import { Failure } from "./basics.js";

/** Says what is missing in an answer of the server, and why. */
export const Problems = ({ of: answer }) =>
  (answer?.problems ?? []).map((problem) => html`<${Failure} key=${problem} error=${problem} />`);
