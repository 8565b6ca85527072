import { Empty } from "../components/basics.js";
import { html } from "../vendor/preact.js";

export const System = () => html`<${Empty}>Not written yet.<//>`;
