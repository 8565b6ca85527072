// Messages of a conversation, and values that environments attach to a score.

import { count, number, visible } from "../format.js";
import { html, useState } from "../vendor/preact.js";
import { Fold, Text } from "./basics.js";

/** Returns the text of a message's content: a string, or parts of which some have a text. */
export function textOf(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content))
    return content.map((part) => (typeof part === "string" ? part : (part?.text ?? JSON.stringify(part)))).join("\n");
  return JSON.stringify(content, null, 2);
}

/** The name and the arguments of a tool call, whichever of the common forms it has. */
export function toolCall(call) {
  const { name, arguments: given } = call?.function ?? call ?? {};
  return {
    name: String(name ?? "tool"),
    given: typeof given === "string" ? given : JSON.stringify(given ?? {}, null, 2),
  };
}

/** The first line of a text, cut off: what a folded part shows. */
export const firstLine = (text, most = 90) => {
  const line = String(text ?? "")
    .trim()
    .split("\n", 1)[0];
  return line.length > most ? `${line.slice(0, most)}…` : line;
};

/** Text of others of which a long one is cut off at `most` characters until a person asks for all of it: laying out megabytes takes seconds. */
export function LongText({ children, most = 20_000, tone }) {
  const [isWhole, setWhole] = useState(false);
  const text = String(children ?? "");
  if (isWhole || text.length <= most) return html`<${Text} tone=${tone}>${text}<//>`;
  return html`<${Text} tone=${tone}>${text.slice(0, most)}<//>
    <button class="plain link" onClick=${() => setWhole(true)}>Show all ${count(text.length)} characters</button>`;
}

/** One message: its role, its text, and its reasoning and calls of tools, folded. Results of tools are folded too. */
export function Message({ message, open = false }) {
  const text = textOf(message.content);
  const reasoning = message.reasoning ?? message.reasoning_content;
  const isTool = message.role === "tool";
  return html`<div class=${`message ${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other"}`}>
    <div class="role">${visible(message.role)}${message.name ? ` ${visible(message.name)}` : ""}</div>
    ${reasoning && html`<${Fold} open=${open} label=${`reasoning: ${visible(firstLine(textOf(reasoning)))}`}><${LongText} tone="faint">${textOf(reasoning)}<//><//>`}
    ${
      text &&
      (isTool
        ? html`<${Fold} open=${open} label=${`result: ${visible(firstLine(text))}`}><${LongText}>${text}<//><//>`
        : html`<${LongText}>${text}<//>`)
    }
    ${(message.tool_calls ?? []).map((call, i) => {
      const { name, given } = toolCall(call);
      return html`<${Fold} key=${i} open=${open} label=${`calls ${visible(name)} ${visible(firstLine(given, 60))}`}><${LongText}>${given}<//><//>`;
    })}
    ${!text && !reasoning && !message.tool_calls?.length && html`<p class="empty">An empty message.</p>`}
  </div>`;
}

export const Messages = ({ messages, open }) =>
  html`<div class="messages">${messages.map((message, i) => html`<${Message} key=${i} message=${message} open=${open} />`)}</div>`;

/** A value of any shape as nested names and texts: a judge's reasons can be read, not only parsed. */
export function Values({ value, depth = 0 }) {
  if (typeof value === "number") return html`<span class="numeric">${number(value, 4)}</span>`;
  if (value === null || typeof value !== "object" || depth > 5)
    return html`<span class="value">${visible(typeof value === "object" ? JSON.stringify(value) : value)}</span>`;
  const entries = Object.entries(value);
  if (!entries.length) return html`<span class="faint">nothing</span>`;
  return html`<dl class="values">
    ${entries.slice(0, 200).map(([name, each]) => html`<div key=${name}><dt>${visible(name)}</dt><dd><${Values} value=${each} depth=${depth + 1} /></dd></div>`)}
    ${entries.length > 200 && html`<div class="faint">and ${entries.length - 200} more</div>`}
  </dl>`;
}
