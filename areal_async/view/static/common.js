/* What all pages share: questions to the server, elements, formats, figures, addresses, the panel at the side.

What always holds: text from a run gets into the page as text nodes alone, never as markup; an error is one clear line in
the live region, and the page goes on; where the document has its data inside (an exported report), nothing is asked of
a network.

A page module registers itself when it is imported:
    register("overview", "Overview", { show(container, run, params) {}, hide() {}, refresh() {} });
container: an empty element of its own. run: key of the run, null on the page of all runs. params: what stands behind
"?" of the address, as an object of strings. show may be async. refresh: something may be new (every 2 s of a live run).
hide: it is left. */

// ---------------------------------------------------------------------------------------------------- elements

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "path", "circle", "line", "polyline", "text"]);

/** An element. Attributes: "on…" with a function listens; true sets it empty; false, null and undefined leave it out;
 * "style" and "dataset" take objects. Children: nodes, texts, numbers, arrays of them; null and false are left out. */
export function el(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on") && typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "style" && typeof value === "object") Object.entries(value).forEach(([key, of]) => element.style.setProperty(key, of));
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** Our own sentences, in which `names` stand in backticks: nodes. */
export function prose(text) {
  return text.split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part));
}

// What a browser doesn't show, or what turns the order of others around: controls but newline and tab, bidi marks,
// zero-width characters, the byte order mark, halves of surrogate pairs, tags.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\p{Cs}\u{e0000}-\u{e007f}]/u;

/** Text that others wrote (a model, a program's output): a fragment in which unseen characters are shown as ⟨U+202E⟩. */
export function visible(text) {
  const fragment = document.createDocumentFragment();
  let plain = "";
  for (const character of text) {
    if (!UNSEEN.test(character)) {
      plain += character;
      continue;
    }
    const name = "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    fragment.append(plain, el("span", { class: "unseen", title: `the character ${name}` }, `⟨${name}⟩`));
    plain = "";
  }
  fragment.append(plain);
  return fragment;
}

// --------------------------------------------------------------------------------------------------- questions

/** Data inside the document: window.AREAL_DATA, or <script type="application/json" id="areal-data">. By path, as it
 * would be asked for: {"/api/figures": […], "/api/runs/KEY/overview": {…}, "/api/runs/KEY/config": "text"}; a path with
 * its query is looked for first. */
export const embedded = (() => {
  if (window.AREAL_DATA) return window.AREAL_DATA;
  const script = document.getElementById("areal-data");
  return script ? JSON.parse(script.textContent) : null;
})();

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function query(params) {
  const set = Object.entries(params ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return set.length ? "?" + new URLSearchParams(set.map(([name, value]) => [name, String(value)])) : "";
}

/** Answers that a file with its data inside works out: by path, a function of the params (report.js). */
export const computed = new Map();

/** Whether `get` has an answer without a server. */
export function has(path, params) {
  return !embedded || path + query(params) in embedded || computed.has(path) || path in embedded;
}

async function ask(path, params, signal) {
  if (embedded) {
    const answer = embedded[path + query(params)] ?? computed.get(path)?.(params ?? {}) ?? embedded[path];
    if (answer === undefined) throw new Refused(404, `${decodeURIComponent(path).replace(/^\/api\/runs\/[^/]*\//, "").replace("samples/", "sample ")} isn't in this file; areal-async view shows the whole run`);
    return answer;
  }
  let answer;
  try {
    answer = await fetch(new URL(path.replace(/^\//, "") + query(params), document.baseURI), { signal });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Refused(0, "areal-async view doesn't answer: has it been ended? Start it again; this page goes on trying");
  }
  if (!answer.ok) {
    const said = await answer.json().catch(() => null);
    throw new Refused(answer.status, said?.error ?? `${path}: the server answered ${answer.status}`);
  }
  return (answer.headers.get("content-type") ?? "").startsWith("application/json") ? answer.json() : answer.text();
}

/** The answer to GET path: parsed JSON, or text. Throws `Refused` with one line after it has been shown in the page.
 * params: null, undefined and "" are left out. options: {signal, quiet: don't show the error}. */
export async function get(path, params = {}, options = {}) {
  try {
    return await ask(path, params, options.signal);
  } catch (problem) {
    if (problem instanceof Refused && !options.quiet) showError(problem.message);
    throw problem;
  }
}

/** Path of a run's answer: of(run, "samples", "17.3"). */
export function of(run, ...parts) {
  return ["/api/runs", run, ...parts].map((part, at) => (at ? encodeURIComponent(part) : part)).join("/");
}

/** One line in the live region of the page; "" takes it away. */
export function showError(message) {
  const region = document.getElementById("error");
  if (!region || region.textContent === message) return;
  region.replaceChildren(visible(message));
  region.hidden = message === "";
}

// --------------------------------------------------------------------------------------------------- addresses

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a "%" that somebody typed
  }
}

/** {run, page, params} of "#/RUN/page?a=b". */
export function place(hash = location.hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [run = "", page = ""] = path.split("/").map(decoded);
  return { run: run || null, page: page || (run ? "overview" : "runs"), params: Object.fromEntries(new URLSearchParams(search)) };
}

/** An address inside this page, for href. */
export function address(run, page, params = {}) {
  return (run ? `#/${encodeURIComponent(run)}/${page}` : "#/") + query(params);
}

/** Writes params into the address, so that a link can be sent, without showing the page anew. */
export function setParams(params) {
  const { run, page } = place();
  history.replaceState(null, "", address(run, page, params));
}

export const pages = new Map();

export function register(name, title, page) {
  pages.set(name, { title, ...page });
}

// ----------------------------------------------------------------------------------------------------- formats

const NONE = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** 0.9531, 12.5, 1,234, 1.2e-6: about `digits` digits. */
export function number(value, digits = 4) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  if (Number.isInteger(value) || size >= 10 ** (digits - 1)) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

/** 950, 12.3 k, 4.5 M: of tokens, samples, requests. */
export function count(value) {
  if (!known(value)) return NONE;
  for (const [unit, of] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= of * 10 || (of > 1e3 && Math.abs(value) >= of)) return `${number(value / of, 3)} ${unit}`;
  }
  return number(value, 3);
}

/** Of a share in 0 … 1. */
export function percent(value, digits = 1) {
  return known(value) ? `${(100 * value).toFixed(digits)} %` : NONE;
}

/** How long: 3.2 ms, 0.46 s, 12.3 s, 4 min 05 s, 2 h 07 min, 3 d 4 h. */
export function duration(value) {
  if (!known(value)) return NONE;
  if (value > 0 && value < 0.0995) return `${Number((1000 * value).toPrecision(2))} ms`;
  if (value < 59.95) return `${Number(value.toFixed(value < 10 ? 2 : 1))} s`;
  const all = Math.round(value);
  const two = (part) => String(part).padStart(2, "0");
  if (all < 3600) return `${Math.floor(all / 60)} min ${two(all % 60)} s`;
  const minutes = Math.floor(all / 60);
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

/** A moment of the run clock: 1:23:45.6 since it began. */
export function clock(value, digits = 0) {
  if (!known(value)) return NONE;
  const unit = 10 ** digits;
  const all = Math.round(value * unit);
  const whole = Math.floor(all / unit);
  const two = (part) => String(part).padStart(2, "0");
  const rest = digits ? "." + String(all % unit).padStart(digits, "0") : "";
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}${rest}`;
}

/** A moment in the reader's own time: 2026-11-30 08:09:39. since_1970: seconds. */
export function date(since_1970) {
  if (!known(since_1970)) return NONE;
  const at = new Date(since_1970 * 1000);
  return new Date(at - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 19).replace("T", " ");
}

export function bytes(value) {
  if (!known(value)) return NONE;
  for (const [unit, of] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= of) return `${number(value / of, 3)} ${unit}`;
  return `${value} bytes`;
}

/** How a run is: a word with a sign of its own, so that nobody needs the colour. */
const STATES = {
  starting: ["◌", "starting"],
  running: ["●", "running"],
  silent: ["◐", "silent"],
  ended: ["✓", "ended"],
  died: ["✕", "died"],
  unreadable: ["?", "unreadable"],
};
const STATE_ABOUT = {
  starting: "its first step hasn't begun",
  running: "it told something in the last 10 s",
  silent: "its process lives, and has told nothing for 10 s",
  ended: "it told its end",
  died: "it told no end, and its process is gone",
  unreadable: "its folder can't be read",
};

export function badge(state) {
  const [sign, word] = STATES[state] ?? ["?", state];
  return el("span", { class: "badge", dataset: { state }, title: STATE_ABOUT[state] }, el("span", { "aria-hidden": "true" }, sign), " ", word);
}

export const isLive = (state) => state === "starting" || state === "running" || state === "silent";

// ------------------------------------------------------------------------------------------------------ panel

/** Opens the panel at the side. Its first heading takes the focus; Esc closes it, and the focus goes back. */
export function openPanel(title, ...children) {
  const panel = document.getElementById("panel");
  if (panel.hidden) panel.opener = document.activeElement;
  const heading = el("h2", { tabindex: "-1" }, title);
  const close = el("button", { type: "button", class: "quiet", "aria-label": "close", onclick: closePanel }, "✕");
  panel.replaceChildren(el("header", {}, heading, close), el("div", { class: "panel-body" }, ...children));
  panel.hidden = false;
  heading.focus({ preventScroll: true });
  return panel.lastChild;
}

export function closePanel() {
  const panel = document.getElementById("panel");
  if (!panel || panel.hidden) return false;
  panel.hidden = true;
  panel.replaceChildren();
  panel.opener?.focus?.();
  return true;
}

/** What happened to one thing ("sample 17.3", "group 17", "server 0", "step 12"), in words, in the panel. above: what
 * stands there before it. */
export async function openStory(run, thing, ...above) {
  const body = el("div", {}, el("p", { class: "dim" }, "reading its story …"));
  openPanel(thing, ...above, body);
  try {
    const story = await get(of(run, "story"), { id: thing }, { quiet: true });
    if (!body.isConnected) return;
    const lines = story.lines.map((line) => el("tr", { dataset: { at: line.at } }, el("td", { class: "at" }, clock(line.at, 2)), el("td", {}, visible(line.text))));
    body.replaceChildren(lines.length ? el("table", { class: "story" }, el("tbody", {}, lines)) : el("p", {}, "nothing is told of it"));
  } catch (problem) {
    if (body.isConnected) body.replaceChildren(el("p", { class: "problem" }, visible(problem.message)));
  }
}

export * from "./plot.js";
