import { Empty } from "../components/basics.js";
import { html } from "../vendor/preact.js";

export const Group = () => html`<${Empty}>Not written yet.<//>`;
