/* All samples of a run in a table, with filters that live in the address.

What always holds: a live run's new samples announce themselves and come when they are asked for, so that no row moves
under the reader; what was typed stays in the address, so that a link to it can be sent. */

import { address, clock, el, get, number, of, register, setParams, visible } from "./common.js";
import { oneLine, outcomes, signed, verdict, verdicts } from "./text.js";

const LIMIT = 50;
const TYPING_MS = 250;
const WIDE = matchMedia("(min-width: 800px)");

const lag = (row) => row.lag ?? "–";
const written = (row) => (row.oldest === row.newest ? `v${row.oldest}` : `v${row.oldest}–${row.newest}`);

/** [sorted by, heading, class, about, cell] */
const COLUMNS = [
  ["id", "sample", "id", "group and member", (row, run) => el("a", { href: address(run, "sample", { id: row.id }) }, row.id)],
  ["at", "at", "number minor", "run clock: its answer had come", (row) => clock(row.at)],
  ["step", "step", "number", "that trained it", (row) => row.step ?? "–"],
  ["outcome", "outcome", "minor", "what became of it", (row) => row.outcome],
  ["verdict", "verdict", "", "of its check", (row) => verdict(row.verdict)],
  ["reward", "reward", "number", "that its check gave", (row) => number(row.reward, 3)],
  ["advantage", "advantage", "number minor", "in training", (row) => signed(row.advantage, 3)],
  ["lag", "lag", "number", "step minus the version of its oldest token", lag],
  ["length", "tokens", "number", "of the answer", (row) => [number(row.length, 9), row.truncated ? el("span", { class: "dim", title: "cut at the token limit" }, " cut") : ""]],
  ["versions", "versions", "", "of its oldest and newest token; sorted by how many there are", written],
  ["server", "server", "minor", "where it was placed", (row) => visible(row.server)],
  [null, "start of the answer", "start", "its first 120 characters", (row) => oneLine(row.start)],
];

/** [name of the parameter(s), label, kind, about] */
const FILTERS = [
  ["step", "step", "number", "that trained it"],
  ["verdict", "verdict", verdicts],
  ["outcome", "outcome", outcomes],
  ["reward", "reward", "range"],
  ["lag", "lag", "range", "step minus the version of the oldest token"],
  ["length", "tokens", "range", "of the answer"],
  ["versions_min", "versions, at least", "number", "different ones in one answer"],
  ["version", "has version", "number", "at least one token is of it"],
  ["truncated", "end", [["true", "cut at the limit"], ["false", "by itself"]]],
  ["server", "server", "text", "where it was placed"],
  ["group", "group", "number", "the samples of one prompt"],
];
const NAMES = FILTERS.flatMap(([name, , kind]) => (kind === "range" ? [`${name}_min`, `${name}_max`] : [name]));

let shown = null; // {run, params, page, parts, turn}
let left = { hash: "", y: 0, id: "" }; // where the reader was when he opened a sample

// ------------------------------------------------------------------------------------------------------ filters

function field(name, kind, label, change) {
  const value = shown.params[name] ?? "";
  const listen = (event) => change(name, event.target.value.trim(), event.type === "input");
  if (Array.isArray(kind)) {
    const options = kind.map((each) => (Array.isArray(each) ? each : [each, each.replace("_", " ")]));
    const select = el("select", { name, onchange: listen }, el("option", { value: "" }, "all"), options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
    return select;
  }
  const whole = name.startsWith("reward") ? "any" : "1";
  return el("input", { name, value, type: kind === "text" ? "text" : "number", step: kind === "text" ? null : whole, "aria-label": label, oninput: listen, autocomplete: "off" });
}

function filters(change) {
  return FILTERS.map(([name, label, kind, about]) => {
    if (kind !== "range") return el("label", { title: about }, el("span", {}, label), field(name, kind, label, change));
    const ends = [field(`${name}_min`, "number", `${label}, at least`, change), field(`${name}_max`, "number", `${label}, at most`, change)];
    return el("div", { class: "range", role: "group", "aria-label": label, title: about }, el("span", {}, label), ends[0], "–", ends[1]);
  });
}

const set = (params) => NAMES.filter((name) => params[name] !== undefined && params[name] !== "").length;

// -------------------------------------------------------------------------------------------------------- table

function sorting(params) {
  return { sort: params.sort || "at", descending: params.descending !== "false" };
}

function head(sortBy) {
  const { sort, descending } = sorting(shown.params);
  return el("tr", {}, COLUMNS.map(([key, title, kind, about]) => {
    if (key === null) return el("th", { scope: "col", class: kind, title: about }, title);
    const here = key === sort;
    const button = el("button", { type: "button", title: `${about}; sort by it`, onclick: () => sortBy(key) }, title, el("span", { class: "arrow", "aria-hidden": "true" }, here ? (descending ? " ↓" : " ↑") : ""));
    return el("th", { scope: "col", class: kind, "aria-sort": here ? (descending ? "descending" : "ascending") : null }, button);
  }));
}

function line(row, run) {
  const open = (event) => {
    if (event.target.closest("a") || !(getSelection()?.isCollapsed ?? true)) return;
    event.currentTarget.querySelector("a").click();
  };
  return el("tr", { onclick: open }, COLUMNS.map(([, title, kind, , cell]) => el("td", { class: kind || null, dataset: { name: title } }, cell(row, run))));
}

/** ↑ and ↓ go from row to row, out of the search into the first one; Enter opens, since it is a link. */
function walk(event) {
  if (!["ArrowUp", "ArrowDown"].includes(event.key) || event.altKey || event.ctrlKey || event.metaKey) return;
  const links = [...shown.parts.body.querySelectorAll("td.id a")];
  const at = links.indexOf(document.activeElement);
  if (at < 0 && document.activeElement !== shown.parts.search && document.activeElement !== document.body) return;
  const to = links[event.key === "ArrowDown" ? at + 1 : at - 1];
  if (at < 0 && event.key === "ArrowUp") return;
  event.preventDefault();
  if (to) to.focus();
  else if (at === 0) shown.parts.search.focus();
}

// ------------------------------------------------------------------------------------------------------- asking

function question({ params }) {
  const asked = Object.fromEntries([...NAMES, "text"].map((name) => [name, params[name]]));
  return { ...asked, ...sorting(params), limit: LIMIT, offset: Number(params.offset) || 0 };
}

function change(changes, typed) {
  const mine = shown;
  Object.assign(mine.params, { offset: null }, changes);
  for (const [name, value] of Object.entries(mine.params)) if (value === null || value === "") delete mine.params[name];
  setParams(mine.params);
  mine.parts.table.setAttribute("aria-busy", "true"); // what it shows isn't what is asked for any more
  clearTimeout(mine.typing);
  mine.typing = setTimeout(() => shown === mine && load(), typed ? TYPING_MS : 0);
}

async function load() {
  const mine = shown;
  const turn = ++mine.turn;
  mine.parts.table.setAttribute("aria-busy", "true");
  const page = await get(of(mine.run, "samples"), question(mine), { quiet: true }).catch((problem) => {
    if (shown === mine && turn === mine.turn) {
      mine.parts.table.removeAttribute("aria-busy");
      mine.parts.found.textContent = "";
      mine.parts.note.replaceChildren(el("p", { class: "problem" }, visible(problem.message)));
    }
    return null;
  });
  if (page === null || shown !== mine || turn !== mine.turn) return;
  mine.page = page;
  draw();
}

function draw() {
  const { page, parts, run, params } = shown;
  parts.table.removeAttribute("aria-busy");
  parts.head.replaceChildren(head((key) => {
    const { sort, descending } = sorting(params);
    const again = key === sort;
    change({ sort: key, descending: String(again ? !descending : true) });
  }));
  parts.body.replaceChildren(...page.rows.map((row) => line(row, run)));
  parts.note.replaceChildren(note(page));
  parts.fresh.hidden = true;
  const offset = Number(params.offset) || 0;
  const total = `${number(page.total, 9)} sample${page.total === 1 ? "" : "s"}`;
  parts.found.textContent = page.rows.length ? `${number(offset + 1, 9)}–${number(offset + page.rows.length, 9)} of ${total}, ${number(page.took_ms, 2)} ms` : `${total}, ${number(page.took_ms, 2)} ms`;
  pager(offset, page.total);
  parts.count.textContent = set(params) ? `Filters (${set(params)})` : "Filters";
  parts.clear.hidden = !set(params) && !params.text;
  parts.search.title = page.missing;
  parts.search.disabled = page.missing !== "" && !params.text;
}

/** What the reader has to know about what he sees; "" if nothing. */
function note({ rows, total, missing, reading }) {
  const lines = [];
  if (missing) lines.push(el("p", { class: "missing" }, visible(missing)));
  if (reading.problem) lines.push(el("p", { class: "problem" }, visible(reading.problem)));
  if (!rows.length) {
    const filtered = set(shown.params) || shown.params.text;
    const none = filtered ? "No sample fits. Take a filter away." : reading.done ? "No answer has come yet." : "The log is being read; samples come as they are found.";
    lines.push(el("p", { class: "dim empty" }, total ? "There is nothing on this page of the list." : none));
  }
  return el("div", {}, lines);
}

function pager(offset, total) {
  const last = Math.max(0, Math.floor((total - 1) / LIMIT) * LIMIT);
  const to = (name, sign, at, off) => el("button", { type: "button", "aria-label": name, title: name, disabled: off, onclick: () => {
    change({ offset: at ? String(at) : null });
    shown.parts.top.scrollIntoView({ block: "nearest" });
  } }, sign);
  shown.parts.pager.replaceChildren(
    to("first page", "⇤", 0, offset === 0), to("page before", "← before", Math.max(0, offset - LIMIT), offset === 0),
    to("next page", "next →", offset + LIMIT, offset >= last), to("last page", "⇥", last, offset >= last),
  );
  shown.parts.pager.hidden = total <= LIMIT;
}

// -------------------------------------------------------------------------------------------------------- page

function build(container) {
  const input = (name, value, typed) => change({ [name]: value }, typed);
  const search = el("input", {
    type: "search", "data-search": true, name: "text", value: shown.params.text ?? "", placeholder: "search prompts and answers", autocomplete: "off",
    "aria-label": "search prompts and answers", oninput: (event) => change({ text: event.target.value }, true),
  });
  const parts = {
    search,
    top: el("div", { class: "tools" }),
    found: el("span", { class: "dim found", role: "status" }),
    fresh: el("button", { type: "button", class: "fresh", hidden: true, onclick: load }),
    count: el("summary", {}, "Filters"),
    clear: el("button", { type: "button", class: "link", hidden: true }, "clear all"),
    fields: el("div", { class: "fields" }, filters(input)),
    head: el("thead"),
    body: el("tbody"),
    note: el("div"),
    pager: el("nav", { class: "pager", "aria-label": "pages of the list", hidden: true }),
  };
  parts.table = el("table", { class: "samples" }, parts.head, parts.body);
  const clear = () => {
    const kept = { sort: shown.params.sort, descending: shown.params.descending };
    shown.params = Object.fromEntries(Object.entries(kept).filter(([, value]) => value));
    parts.fields.replaceChildren(...filters(input));
    search.value = "";
    search.focus();
    change({});
  };
  parts.clear.addEventListener("click", clear);
  parts.top.append(search, parts.found, parts.fresh, parts.clear);
  const details = el("details", { class: "filters", open: WIDE.matches }, parts.count, parts.fields);
  container.addEventListener("keydown", walk);
  container.append(parts.top, details, parts.note, el("div", { class: "scroll" }, parts.table), parts.pager);
  parts.body.addEventListener("click", remember);
  return parts;
}

function remember(event) {
  const row = event.target.closest("tr");
  left = { hash: location.hash, y: scrollY, id: row?.querySelector("td.id a")?.textContent ?? "" };
}

/** The reader comes back from a sample: the table is as he left it, and the focus where it was. */
function returnTo() {
  if (left.hash !== location.hash || !left.id) return;
  const link = [...shown.parts.body.querySelectorAll("td.id a")].find((each) => each.textContent === left.id);
  scrollTo(0, left.y);
  link?.focus({ preventScroll: true });
}

register("samples", "Samples", {
  async show(container, run, params) {
    const mine = { run, params: { ...params }, page: null, parts: null, turn: 0, typing: 0 };
    shown = mine;
    mine.parts = build(container);
    await load();
    if (shown === mine && mine.page) returnTo();
  },

  hide() {
    clearTimeout(shown?.typing);
    shown = null;
  },

  /** How many samples there are by now. They come by themselves only where that moves no row under a reader. */
  async refresh() {
    const mine = shown;
    if (!mine?.page) return;
    const turn = mine.turn;
    const now = await get(of(mine.run, "samples"), { ...question(mine), limit: 1, offset: 0 }, { quiet: true });
    if (shown !== mine || turn !== mine.turn) return;
    const more = now.total - mine.page.total;
    const { parts, page } = mine;
    if (more !== 0 && (!page.rows.length || (!page.reading.done && !parts.body.contains(document.activeElement) && scrollY === 0))) {
      await load();
      return;
    }
    parts.fresh.hidden = more === 0;
    parts.fresh.textContent = more > 0 ? `${number(more, 9)} new: show` : "the list has changed: show";
  },
});
