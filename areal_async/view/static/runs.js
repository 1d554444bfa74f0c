/* All runs of a folder: which there are, how they stand, and chosen ones on top of each other.

What always holds: which are chosen, and the filter, stand in the address; a run that can't be read is a line that says
why, and the others can be looked at. */

import { Board, swatch } from "./board.js";
import { DASHES, address, badge, count, date, duration, el, get, number, place, register, setParams, showError, visible } from "./common.js";
import { runData } from "./store.js";

const COLUMNS = [
  ["name", "run", (run) => run.name],
  ["state", "state", (run) => run.state],
  ["version", "steps", (run) => run.version],
  ["reward", "reward", (run) => run.reward ?? -Infinity],
  ["seconds", "took", (run) => run.seconds],
  ["began", "began", (run) => run.began ?? 0],
];
const NUMERIC = new Set(["version", "reward", "seconds"]);
const SEVERAL = 6; // as many colours and dashes there are that can be told apart

let page = null;

const fits = (run, wanted) => [run.name, run.key, run.state, run.end].join(" ").toLowerCase().includes(wanted);

function draw() {
  const { runs, chosen, search, body, found, sort, params } = page;
  const wanted = search.value.trim().toLowerCase();
  const value = COLUMNS.find(([key]) => key === sort.key)[2];
  const left = runs.filter((run) => fits(run, wanted)).sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y) * (sort.down ? -1 : 1);
  });
  found.textContent = wanted ? `${left.length} of ${runs.length}` : runs.length === 1 ? "1 run" : `${count(runs.length)} runs`;
  const focused = body.contains(document.activeElement) ? document.activeElement : null;
  body.replaceChildren(...left.map((run) => line(run, chosen)));
  if (focused) [...body.querySelectorAll(focused.localName)].find(({ dataset }) => dataset.run === focused.dataset.run)?.focus();
  for (const head of page.heads) head.setAttribute("aria-sort", head.dataset.key === sort.key ? (sort.down ? "descending" : "ascending") : "none");
  setParams({ ...place().params, ...params, q: search.value, chosen: [...chosen].join(","), sort: sort.key === "began" && sort.down ? null : `${sort.down ? "-" : ""}${sort.key}` });
}

function line(run, chosen) {
  const readable = run.state !== "unreadable";
  const at = [...chosen].indexOf(run.key);
  const full = at < 0 && chosen.size >= SEVERAL;
  const pick = el("input", {
    type: "checkbox", dataset: { run: run.key }, checked: at >= 0, disabled: !readable || full, "aria-label": `compare ${run.name}`,
    title: full ? `${SEVERAL} at a time can be told apart` : "compare",
    onchange: (event) => {
      if (event.target.checked) chosen.add(run.key);
      else chosen.delete(run.key);
      draw();
      overlay();
    },
  });
  const other = run.name === run.key || run.key.startsWith(`${run.name}-`) ? null : el("small", { class: "dim" }, " ", el("bdi", {}, run.name));
  return el("tr", {},
    el("td", { class: "pick" }, el("label", {}, pick, at >= 0 ? swatch(`--series-${(at % 7) + 1}`, DASHES[at % DASHES.length]) : null)),
    el("td", {}, readable ? el("a", { href: address(run.key, "overview"), title: run.folder, dataset: { run: run.key } }, el("bdi", {}, run.key)) : el("bdi", {}, run.key), other, run.problem ? el("div", { class: "problem note" }, visible(run.problem)) : null),
    el("td", {}, badge(run.state), run.end ? el("small", { class: "dim" }, " ", run.end.replaceAll("_", " ")) : null),
    el("td", { class: "number" }, run.steps ? `${run.version} of ${run.steps}` : number(run.version)),
    el("td", { class: "number" }, number(run.reward, 3)),
    el("td", { class: "number" }, duration(run.seconds)),
    el("td", { class: "number" }, date(run.began)));
}

/** Figures of the chosen runs. */
async function overlay() {
  const mine = page;
  const turn = ++mine.turn;
  const data = [];
  for (const key of mine.chosen) {
    try {
      data.push(await runData(key).update());
    } catch {
      mine.chosen.delete(key); // its error is shown; the others are drawn
      draw();
    }
    if (page !== mine || turn !== mine.turn) return;
  }
  const figures = data.length ? await get("/api/figures") : [];
  if (page !== mine || turn !== mine.turn) return;
  mine.board?.close();
  mine.board = null;
  const keys = el("div", { class: "parts" }, data.map(({ latest }, at) => el("span", { class: "key" }, swatch(`--series-${(at % 7) + 1}`, DASHES[at % DASHES.length]), latest.run.key)));
  mine.figures.replaceChildren(data.length ? el("h2", {}, data.length > 1 ? "Compared" : "Chosen") : el("p", { class: "dim" }, "Choose runs in the table to see their figures on top of each other."), keys);
  if (data.length) mine.board = new Board(mine.figures, figures, data, place().params);
}

register("runs", "All runs", {
  async show(container, _, params) {
    const { runs } = await get("/api/runs");
    const sort = { key: (params.sort ?? "-began").replace("-", ""), down: (params.sort ?? "-began").startsWith("-") };
    if (!COLUMNS.some(([key]) => key === sort.key)) sort.key = "began";
    const known = new Set(runs.map((run) => run.key));
    const chosen = new Set((params.chosen ?? "").split(",").filter((key) => known.has(key)).slice(0, SEVERAL));
    const search = el("input", { type: "search", "data-search": true, placeholder: "filter by name or state", "aria-label": "filter runs", value: params.q ?? "", oninput: () => draw() });
    const found = el("span", { class: "dim", role: "status" });
    const order = (key) => () => {
      page.sort = { key, down: page.sort.key === key ? !page.sort.down : NUMERIC.has(key) || key === "began" };
      draw();
    };
    const heads = COLUMNS.map(([key, title]) => el("th", { class: NUMERIC.has(key) || key === "began" ? "number" : null, dataset: { key } }, el("button", { type: "button", class: "sort", onclick: order(key) }, title)));
    const body = el("tbody");
    const figures = el("section", { class: "compared" });
    page = { runs, chosen, search, found, body, heads, figures, sort, params: {}, board: null, turn: 0 };
    container.append(
      el("div", { class: "tools" }, search, found),
      runs.length ? el("div", { class: "card scroll flush" }, el("table", { class: "runs" }, el("thead", {}, el("tr", {}, el("th", { "aria-label": "compare" }), heads)), body)) : el("p", {}, "There is no run in this folder yet."),
      figures);
    draw();
    await overlay();
  },

  async refresh() {
    const mine = page;
    const { runs } = await get("/api/runs");
    if (page !== mine || !mine) return;
    showError("");
    if (JSON.stringify(runs) !== JSON.stringify(mine.runs)) {
      mine.runs = runs;
      draw();
    }
    if (!mine.board) return;
    const told = () => mine.board.runs.map((run) => `${run.next} ${run.latest.evaluations.length} ${run.latest.reading.events}`).join();
    const before = told();
    for (const run of mine.board.runs) if (run.live) await run.update();
    if (page === mine && told() !== before) mine.board.update();
  },

  hide() {
    page?.board?.close();
    page = null;
  },
});
