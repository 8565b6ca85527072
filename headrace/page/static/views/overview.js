import { Empty } from "../components/basics.js";
import { html } from "../vendor/preact.js";

export const Overview = () => html`<${Empty}>Not written yet.<//>`;
