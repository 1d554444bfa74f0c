/* Texts of models and programs, for people: white space made visible, one line of it, long ones cut; verdicts as words.

What always holds: what comes out are text nodes and elements of our own; a text of a megabyte doesn't fill the page
unless somebody asks for it. */

import { el, number, visible } from "./common.js";

const SPACES = /([ \t\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]|\n)/u;
const SIGNS = { " ": "space", "\t": "tab", "\n": "newline" };
const SHOWN_CHARACTERS = 4_000; // of a long text, before it is asked for
const QUOTED_CHARACTERS = 60;

const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

/** Whether it has letters that are written from right to left. */
export function isRightToLeft(text) {
  return RIGHT_TO_LEFT.test(text);
}

/** Text with a sign for each space, tab and line's end (styled by `.spaces-shown`): a fragment. */
export function spaced(text) {
  const fragment = document.createDocumentFragment();
  for (const part of text.split(SPACES)) {
    if (part === "") continue;
    if (SPACES.test(part)) {
      const code = part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      fragment.append(el("i", { class: `space ${SIGNS[part] ?? "wide-space"}`, title: SIGNS[part] ?? `space U+${code}` }, part === "\n" ? "" : part));
      if (part === "\n") fragment.append("\n");
    } else {
      fragment.append(visible(part));
    }
  }
  return fragment;
}

/** A short text in one line, in quotes and with escapes, as programs write it. */
export function quoted(text) {
  const cut = text.length > QUOTED_CHARACTERS ? `${text.slice(0, QUOTED_CHARACTERS)}…` : text;
  return visible(JSON.stringify(cut));
}

/** In one line. */
export function oneLine(text) {
  return visible(text.replace(/\s+/g, " ").trim());
}

/** A text as it is, in a box; of a long one the beginning, and a button for the rest. */
export function long(text, attributes = {}) {
  const box = el("pre", { dir: "ltr", ...attributes });
  if (text.length <= SHOWN_CHARACTERS) {
    box.append(visible(text));
    return box;
  }
  const all = () => box.replaceChildren(visible(text));
  const more = el("button", { type: "button", class: "link more", onclick: all }, `… show all ${number(text.length, 12)} characters`);
  box.append(visible(text.slice(0, SHOWN_CHARACTERS)), more);
  return box;
}

const VERDICTS = {
  right: ["✓", "good"],
  wrong: ["✗", "bad"],
  no_answer: ["∅", "warn"],
  bad_data: ["!", "warn"],
  timeout: ["◷", "warn"],
  crash: ["✕", "warn"],
  infrastructure: ["⚠", "warn"],
  given: ["=", "plain"],
};
export const verdicts = Object.keys(VERDICTS);
export const outcomes = ["trained", "training", "outstanding", "filtered", "stale", "failed", "cancelled"];

/** A verdict as a word with a sign of its own; "–" where there is none yet. */
export function verdict(word) {
  if (!word) return el("span", { class: "dim" }, "–");
  const [sign, kind] = VERDICTS[word] ?? ["?", "plain"];
  return el("span", { class: `verdict ${kind}` }, el("span", { "aria-hidden": "true" }, sign), ` ${word.replace("_", " ")}`);
}

/** With its sign: +0.35, −1.2. */
export function signed(value, digits = 3) {
  if (typeof value !== "number") return "–";
  return (value > 0 ? "+" : "") + number(value, digits).replace("-", "−");
}
