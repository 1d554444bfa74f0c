/* Which page is shown, the header above it, the keys, and when to ask again.

What always holds: a page that is left hears of it (`hide`); a live run is asked every 2 s, one question at a time, and
not while the window is hidden; a run that has ended, and whose log is read, isn't asked again. */

import { address, badge, clock, closePanel, date, el, embedded, get, pages, place, showError, visible } from "./common.js";
import { runData } from "./store.js";

const POLL_MS = 2_000;
const POLL_RUNS_MS = 5_000; // a folder of runs: others may come
const POLL_AFTER_ERRORS_MS = 15_000; // at most: somebody may start the server again

const REPORT = embedded?.["/report"]; // of an exported file: which pages it has, and of when it is
const NAVIGATION = [
  ["overview", "Overview", "o"],
  ["timeline", "Timeline", "t"],
  ["samples", "Samples", "s"],
  ["peers", "Servers & workers", "p"],
  ["config", "Configuration", "c"],
  ["report", "About this file", "a"],
].filter(([page]) => (REPORT ? REPORT.pages.includes(page) : page !== "report"));
const PAGES = new Set([...NAVIGATION.map(([page]) => page), "sample", ...(REPORT ? [] : ["runs"])]);
const KEYS = [
  ...NAVIGATION.map(([, title, letter]) => [`g ${letter}`, title.toLowerCase()]),
  ...(REPORT ? [] : [["g r", "all runs"]]), ["/", "search"], ["↑ ↓", "rows of the table of samples"], ["← →", "tokens of an answer; with shift versions"], ["d", "dark or light"], ["?", "these keys"], ["Esc", "close"],
];

const byId = (id) => document.getElementById(id);
let shown = { page: null, run: null };
let turn = 0; // of the newest address: a page that came too late isn't shown
let failures = 0;
let timer = 0;
let severalRuns = false; // the viewer was opened for a folder of runs

// ------------------------------------------------------------------------------------------------------- pages

async function route() {
  const mine = ++turn;
  clearTimeout(timer);
  closePanel();
  let { run, page, params } = place();
  if (run === null) {
    const runs = await get("/api/runs").catch(() => null);
    if (mine !== turn) return;
    if (runs === null) return later();
    showError("");
    if (runs.single && runs.runs.length) return location.replace(address(runs.runs[0].key, "overview"));
  }
  await leave();
  const asked = run === null ? null : runData(run).update({ quiet: true });
  asked?.catch(() => {}); // its error is met below
  if (!PAGES.has(page)) return noPage(mine, run, page, asked);
  try {
    await import(`./${page}.js`);
  } catch (problem) {
    if (mine !== turn) return;
    byId("main").replaceChildren(el("p", { class: "problem" }, `The page "${page}" can't be loaded (${problem.message}).`));
    return reloadWhenBack(mine);
  }
  if (mine !== turn) return;
  const container = el("div", { class: `page page-${page}` });
  byId("main").replaceChildren(container);
  window.scrollTo(0, 0);
  shown = { page: pages.get(page), run, name: page };
  header();
  try {
    if (run !== null) {
      await asked;
      if (mine !== turn) return;
      showError("");
      header();
    }
    await shown.page.show(container, run, params);
    failures = 0;
  } catch (problem) {
    if (mine !== turn) return;
    shown.failed = !(problem.status >= 400 && problem.status < 500); // the same question may get an answer later
    failures += shown.failed;
    if (!container.childElementCount) container.append(el("p", { class: "problem" }, visible(problem.message)), embedded ? "" : el("p", {}, el("a", { href: "#/" }, "all runs")));
    if (problem.status === undefined) console.error(problem);
  }
  if (mine !== turn) return;
  header();
  later();
}

/** An address that somebody typed, or that is of another release. */
async function noPage(mine, run, page, asked) {
  await asked?.catch(() => {});
  if (mine !== turn) return;
  shown = { page: null, run, name: "" };
  header();
  const links = NAVIGATION.map(([name, title]) => el("li", {}, el("a", { href: address(run, name) }, title)));
  byId("main").replaceChildren(el("p", { class: "problem" }, visible(`There is no page "${page}" of this run. There are:`)), el("ul", {}, links));
}

/** A module that couldn't be fetched stays failed for the browser until the document is loaded anew. */
async function reloadWhenBack(mine) {
  let wasAway = false;
  while (mine === turn) {
    const there = await get("/api/runs").then(() => true, () => false);
    if (there) return wasAway ? location.reload() : undefined; // the server is there, and has no such page
    wasAway = true;
    await new Promise((resolve) => setTimeout(resolve, POLL_RUNS_MS));
  }
}

async function leave() {
  const left = shown;
  shown = { page: null, run: null };
  await left.page?.hide?.();
}

// ----------------------------------------------------------------------------------------------------- polling

function later() {
  clearTimeout(timer);
  if (embedded) return;
  const again = shown.run === null || runData(shown.run).live || failures > 0;
  const every = shown.run === null ? POLL_RUNS_MS : POLL_MS;
  if (again) timer = setTimeout(poll, Math.min(every * 2 ** failures, POLL_AFTER_ERRORS_MS));
}

async function poll() {
  if (document.hidden) return; // visibilitychange begins again
  const mine = turn;
  if (shown.page === null || shown.failed) return route();
  try {
    if (shown.run !== null) await runData(shown.run).update();
    if (mine !== turn) return;
    header();
    await shown.page.refresh?.();
    if (failures > 0) showError("");
    failures = 0;
  } catch (problem) {
    failures += 1;
    if (problem.status === undefined) console.error(problem);
  }
  if (mine === turn) later();
}

// ------------------------------------------------------------------------------------------------------ header

function header() {
  const { run, name } = shown;
  const latest = run === null ? null : runData(run).latest;
  const row = latest?.run;
  const here = `${run} ${name}`;
  if (byId("pages").dataset.here !== here) navigation(run, name, here);
  const title = run === null ? "all runs" : row?.name ?? run;
  const key = run !== null && !run.startsWith(title) ? el("small", { class: "dim" }, ` ${run}`) : "";
  byId("run-name").replaceChildren(el("bdi", {}, title), key);
  document.title = `${title} – areal-async`;
  const state = el("span", {}, row ? [badge(row.state), row.end ? el("span", { class: "dim" }, " ", row.end.replaceAll("_", " ")) : null] : null);
  if (byId("run-state").textContent !== state.textContent) byId("run-state").replaceChildren(state); // readers say it once
  byId("run-step").textContent = row ? (row.steps ? `step ${row.version} of ${row.steps}` : `step ${row.version}`) : "";
  byId("run-clock").textContent = row ? `${clock(row.seconds)} run clock` : "";
  const share = row?.steps ? Math.min(1, row.version / row.steps) : null;
  byId("progress").hidden = share === null;
  if (share !== null) {
    byId("progress").setAttribute("aria-valuenow", String(Math.round(100 * share)));
    byId("progress").firstElementChild.style.width = `${100 * share}%`;
  }
  const reading = latest?.reading;
  const part = reading && reading.of > 0 ? Math.floor((100 * reading.nbytes) / reading.of) : 0;
  byId("run-reading").textContent = REPORT ? `as of ${date(REPORT.written)}` : reading && !reading.done && part < 100 ? `reading the log: ${part} %` : "";
}

/** Made anew where the page is another one only, so that a focused link stays focused. */
function navigation(run, name, here) {
  const links = NAVIGATION.map(([page, title]) => {
    const current = page === name || (page === "samples" && name === "sample");
    return el("a", { href: address(run, page), "aria-current": current ? "page" : null }, title);
  });
  byId("pages").hidden = run === null;
  byId("pages").dataset.here = here;
  byId("pages").replaceChildren(...links);
  const current = links.find((link) => link.getAttribute("aria-current"));
  if (current) byId("pages").scrollLeft = current.offsetLeft - byId("pages").clientWidth / 2 + current.offsetWidth / 2;
  byId("all-runs").textContent = run !== null && severalRuns ? "‹ all runs" : "areal-async";
}

// -------------------------------------------------------------------------------------------------------- keys

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("areal-theme", root.dataset.theme);
  } catch {
    // No storage: it holds for this window alone.
  }
  window.dispatchEvent(new Event("theme"));
}

function showKeys() {
  const dialog = byId("keys");
  dialog.replaceChildren(
    el("h2", { id: "keys-title" }, "Keys"),
    el("dl", {}, KEYS.map(([keys, what]) => [el("dt", {}, keys.split(" ").map((key) => el("kbd", {}, key))), el("dd", {}, what)])),
    el("form", { method: "dialog" }, el("button", {}, "close")),
  );
  dialog.showModal();
}

let wentAt = -Infinity; // when "g" was pressed, milliseconds
const GO_MS = 1_500;

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  if (event.key === "Escape") {
    if (closePanel()) event.preventDefault();
    return;
  }
  if (event.target.closest("input:not([type=range], [type=checkbox]), textarea, select, [contenteditable]")) return;
  const { run } = place();
  const page = NAVIGATION.find(([, , letter]) => letter === event.key)?.[0];
  if (event.timeStamp - wentAt < GO_MS && (event.key === "r" || (page && run !== null))) {
    location.hash = event.key === "r" ? "#/" : address(run, page);
  } else if (event.key === "/") {
    const search = document.querySelector("#main [data-search]");
    if (!search) return;
    search.focus();
    search.select?.();
  } else if (event.key === "?") {
    showKeys();
  } else if (event.key === "d") {
    switchTheme();
  } else {
    wentAt = event.key === "g" ? event.timeStamp : -Infinity;
    return;
  }
  wentAt = -Infinity;
  event.preventDefault();
}

document.addEventListener("keydown", key);
byId("theme-button").addEventListener("click", switchTheme);
byId("keys-button").addEventListener("click", showKeys);
window.addEventListener("hashchange", route);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && shown.page !== null) poll();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // "#main" is no address of a page
  byId("main").focus();
});
route();
if (!embedded) {
  get("/api/runs", {}, { quiet: true }).then(({ single }) => {
    severalRuns = !single;
    byId("pages").dataset.here = "";
    if (shown.page !== null) header();
  }, () => {}); // the page says it itself, where it asks
}
