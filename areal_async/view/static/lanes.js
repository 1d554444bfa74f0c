/* What stands around the timeline's drawing: names of its lanes, and what its colours mean. */

import { colour, el, number, visible } from "./common.js";

/** Name of a kind's colour in timeline.css. */
export const cssOf = (kind) => `--tl-${kind.replaceAll(" ", "-")}`;

/** Names of rows (tracks.js) at their heights below `top` pixels. chosen: key of a row. fold(row): its places are to be
 * opened or closed. Whose button had the focus keeps it. */
export function listNames(container, rows, { top, chosen, fold }) {
  const focused = document.activeElement?.closest(".tl-name");
  const key = container.contains(focused) ? focused.dataset.key : null;
  container.replaceChildren(...rows.map((row) => {
    const button = row.opens && el("button", { type: "button", "aria-expanded": String(row.isOpen), "aria-label": `each of the ${row.slots} places for ${row.what} of ${row.group}`, onclick: () => fold(row) }, row.isOpen ? "▾" : "▸");
    const most = row.load !== null && el("small", { title: `at most ${row.slots} ${row.what} at a time` }, `≤ ${number(row.slots)}`);
    const inside = row.slot ? "" : [button || el("span", { class: "indent" }), el("span", { title: row.label }, visible(row.label)), most || ""];
    const style = { top: `${top + row.top}px`, height: `${row.height}px` };
    return el("div", { class: ["tl-name", row.slot && "slot", row.key === chosen && "chosen"].filter(Boolean).join(" "), style, dataset: { key: row.key } }, inside);
  }));
  if (key !== null) [...container.children].find((name) => name.dataset.key === key)?.querySelector("button")?.focus({ preventScroll: true });
}

/** Of what is there in an answer: a list item a colour. */
export function colours(data) {
  const there = new Set(data.spans.map((span) => span[3]));
  const items = new Map(); // by colour: some kinds never stand in one lane, and share theirs
  const add = (text, name) => items.set(colour(name), { name, texts: [...(items.get(colour(name))?.texts ?? []), text] });
  data.kinds.forEach((kind, at) => there.has(at) && add(kind, cssOf(kind).slice(2)));
  if (data.loads.length) add("how many at a time", "tl-load");
  return [...items.values()].map(({ name, texts }) => el("li", {}, el("i", { style: { background: `var(--${name})` } }), texts.join(", ")));
}
