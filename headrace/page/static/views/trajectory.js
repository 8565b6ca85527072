import { Empty } from "../components/basics.js";
import { html } from "../vendor/preact.js";

export const Trajectory = () => html`<${Empty}>Not written yet.<//>`;
