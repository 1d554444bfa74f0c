/* A run's configuration as text, with search. */

import { el, get, of, place, register, setParams } from "./common.js";

let asked = 0;

function filtered(lines, wanted) {
  // A line that fits is shown below the keys that it belongs to: those above it that stand further left.
  if (!wanted) return lines.map((text, at) => ({ text, at, fits: false }));
  const above = [];
  const shown = new Map();
  lines.forEach((text, at) => {
    const depth = text.search(/[^ ]/);
    while (above.length && above.at(-1).depth >= depth) above.pop();
    above.push({ depth, at, text });
    const path = above.map(({ text: key }) => key.trim().replace(/:.*/, "")).join(".");
    if (!text.toLowerCase().includes(wanted) && !path.toLowerCase().includes(wanted)) return;
    for (const key of above) if (!shown.has(key.at)) shown.set(key.at, { text: key.text, at: key.at, fits: false });
    shown.get(at).fits = true;
  });
  return [...shown.values()];
}

function line({ text, at, fits }, wanted) {
  const found = wanted ? text.toLowerCase().indexOf(wanted) : -1;
  const parts = fits && found >= 0
    ? [text.slice(0, found), el("mark", {}, text.slice(found, found + wanted.length)), text.slice(found + wanted.length)]
    : [text];
  return el("div", { class: fits || !wanted ? "line" : "line dim" }, el("span", { class: "line-number", "aria-hidden": "true" }, at + 1), ...parts, "\n");
}

register("config", "Configuration", {
  async show(container, run, params) {
    const mine = ++asked;
    const text = await get(of(run, "config"));
    if (mine !== asked) return;
    const lines = text.replace(/\n$/, "").split("\n");
    const body = el("pre", { class: "config", tabindex: "0", "aria-label": "configuration" });
    const found = el("span", { class: "dim", role: "status" });
    const search = el("input", { type: "search", "data-search": true, placeholder: "search, e.g. max_staleness or train.lr", "aria-label": "search in the configuration", value: params.q ?? "" });
    const draw = () => {
      const wanted = search.value.trim().toLowerCase();
      const left = filtered(lines, wanted);
      body.replaceChildren(...left.map((one) => line(one, wanted)));
      found.textContent = wanted ? `${left.filter((one) => one.fits).length} of ${lines.length} lines` : `${lines.length} lines, as the run took them (config.yaml)`;
    };
    search.addEventListener("input", () => {
      setParams({ ...place().params, q: search.value });
      draw();
    });
    container.append(el("div", { class: "tools" }, search, found), el("div", { class: "card" }, body));
    draw();
  },
});
