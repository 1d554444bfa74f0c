/* The timeline of a run: lanes for prompts, trainer, swaps, servers, checks. A click on a span tells its story.

What always holds: three screens are drawn, and only moved while a gesture lasts, so that panning is smooth; whatever is
shown is asked of the server at the resolution of the screen, the newest question counts, older answers are dropped. Who
stands at the right edge of a live run stays there. */

import { clock, duration, el, get, of, openStory, place as placeOf, plot, register, setParams, showError, unplot, visible } from "./common.js";
import { listen } from "./gestures.js";
import { colours, cssOf, listNames } from "./lanes.js";
import { onPaper } from "./printing.js";
import { runData } from "./store.js";
import { about, links, plain } from "./telling.js";
import { Tip } from "./tip.js";
import { found, heightOf, indexed, labels, loadPath, rowsOf, spanPaths, statePart, ticks } from "./tracks.js";

const AXIS_PX = 28; // height of the time axis above the rows
const SCREENS = 3; // that are drawn: the one that is seen, and one at each side
const EDGE = 0.75; // of a screen moved: it is drawn anew
const ASK_MS = 150; // after the last move
const STRETCHED = 1.5; // as much as a zoom may distort what is drawn, while it lasts
const AT_EDGE = 0.01; // of a screen: so near to the end of a live run it is followed
const LEAST_S = 2e-5; // that a screen shows
const TICK_PX = 110;
const MOST_LABELS = 150; // names inside of spans
const PAN = 0.2; // of a screen, by a key
const ZOOM = 1.6; // by a key
const COME_NEAR = 10; // by a click on spans that are drawn as one

const HINT_MS = 1_500; // how long it is told how to zoom

const WHEEL = `${/^(Mac|iP)/.test(navigator.platform) ? "⌘" : "Ctrl"} + wheel`;
const KEYS = `${WHEEL} or + − zoom · drag or ← → move · ↑ ↓ lane · , . span · Enter its story`;

class Timeline {
  constructor(container, run, params) {
    this.run = run;
    this.view = params.to ? { begin: Number(params.from ?? 0), end: Number(params.to) } : null; // null: the whole run
    this.opened = params.open === undefined ? null : new Set(params.open ? params.open.split(",") : []);
    this.wanted = params.lane ?? "";
    this.data = this.drawn = this.chosen = this.asking = null;
    this.rows = [];
    this.isMoved = false;
    this.timer = this.frame = 0;
    this.#build(container);
    this.end = [listen(this.chart, this)];
    const key = (event) => this.#key(event);
    document.addEventListener("keydown", key);
    const again = () => this.data && this.draw().then(() => this.later());
    const sized = new ResizeObserver(again);
    sized.observe(this.chart);
    this.end.push(() => document.removeEventListener("keydown", key), () => sized.disconnect(), onPaper(again));
  }

  #build(container) {
    const button = (label, about, does) => el("button", { type: "button", title: about, "aria-label": about, onclick: does }, label);
    this.range = el("span", { class: "figure" });
    this.legend = el("ul", { class: "tl-legend", "aria-label": "colours" });
    this.names = el("div", { class: "tl-names" });
    this.plot = el("div", { class: "tl-plot" });
    this.mark = el("div", { class: "tl-chosen", hidden: true });
    this.chart = el("div", { class: "tl-chart", tabindex: "0", role: "application", "aria-label": `timeline; ${KEYS}`, onblur: () => this.leave() }, this.plot, this.mark);
    this.tip = new Tip();
    this.said = el("p", { class: "tl-said", role: "status" });
    container.append(
      el("div", { class: "tl-tools" },
        el("span", { class: "choice" }, button("−", "zoom out (−)", () => this.#zoomed(1 / ZOOM)), button("+", "zoom in (+)", () => this.#zoomed(ZOOM))),
        el("span", { class: "choice" }, button("←", "earlier (←)", () => this.#panned(-PAN)), button("→", "later (→)", () => this.#panned(PAN))),
        button("whole run", "the whole run (0)", () => this.whole()), this.range, el("span", { class: "space" }), el("span", { class: "dim tl-keys" }, KEYS)),
      this.legend, el("div", { class: "tl-frame" }, this.names, this.chart), this.said, this.tip.element);
  }

  close() {
    this.end.forEach((does) => does());
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
    this.asking?.abort();
    unplot(this.plot);
  }

  // ------------------------------------------------------------------------------------------------------- questions

  get width() {
    return Math.max(100, this.chart.clientWidth);
  }

  get seconds() {
    return this.data?.seconds ?? 0;
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask().catch(() => {}), ASK_MS);
  }

  async ask() {
    clearTimeout(this.timer);
    this.asking?.abort();
    const mine = (this.asking = new AbortController());
    const { view } = this;
    const question = { width: this.width, open: this.opened === null ? null : [...this.opened].join(",") || "-" };
    if (view !== null) {
      const span = view.end - view.begin;
      question.from = Math.max(0, view.begin - span);
      question.to = view.end + span;
      question.width = Math.round(((question.to - question.from) / span) * this.width);
    }
    let data;
    try {
      data = await get(of(this.run, "timeline"), question, { signal: mine.signal, quiet: true });
    } catch (problem) {
      if (problem.name === "AbortError" || this.asking !== mine) return;
      showError(problem.message);
      throw problem;
    }
    if (this.asking !== mine) return; // a newer question is on its way
    await this.#take(data);
  }

  async #take(data) {
    const before = this.data;
    const stuck = this.view !== null && before !== null && this.#isAtEdge(before.seconds);
    this.data = data;
    this.index = indexed(data);
    if (this.view === null && !this.isMoved) this.drawn = null;
    else if (stuck) {
      const span = this.view.end - this.view.begin;
      this.view = { begin: Math.max(0, data.seconds - span), end: data.seconds };
    }
    const shown = new Set(data.lanes.filter((lane) => lane.kind === "slot").map((lane) => lane.group));
    this.rows = rowsOf(data.lanes, this.opened ?? shown, this.index);
    listNames(this.names, this.rows, { top: AXIS_PX, chosen: this.chosen?.key, fold: (row) => this.#fold(row) });
    this.#explain();
    if (this.wanted) this.#goTo(this.wanted);
    await this.draw();
  }

  // --------------------------------------------------------------------------------------------------------- drawing

  /** What is seen: {begin, end}. */
  get seen() {
    return this.view ?? { begin: 0, end: Math.max(this.seconds, LEAST_S) };
  }

  async draw() {
    const { begin, end } = this.seen;
    const span = end - begin;
    const width = this.width;
    const window = { begin: begin - span, end: end + span, pixel: span / width };
    const height = AXIS_PX + heightOf(this.rows) + 6;
    const box = (path, fillcolor) => ({ type: "path", path, fillcolor, line: { width: 0 }, layer: "between" });
    const load = loadPath(this.rows, this.index, this.data);
    const shapes = load ? [box(load, "--tl-load")] : [];
    for (const [kind, path] of spanPaths(this.rows, this.index, window)) shapes.push(box(path, cssOf(this.data.kinds[kind])));
    for (const [at] of this.data.marks) if (at > window.begin && at < window.end) shapes.push({ type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", line: { color: "--bad", width: 1, dash: "dot" }, layer: "above" });
    const names = labels(this.rows, this.index, window, MOST_LABELS);
    const marks = ticks(window.begin, window.end, (SCREENS * width) / TICK_PX);
    const trace = { type: "scatter", mode: "text", x: names.map((name) => name.at), y: names.map((name) => name.y), text: names.map((name) => plain(name.text)), textposition: "middle right", textfont: { size: 10, color: "--tl-label" }, hoverinfo: "skip" };
    const layout = {
      width: SCREENS * width, height, margin: { l: 0, r: 0, t: AXIS_PX, b: 0 }, hovermode: false, dragmode: false, showlegend: false, shapes, uirevision: null, autosize: false,
      xaxis: { side: "top", range: [window.begin, window.end], tickvals: marks.values, ticktext: marks.values.map((at) => (at < 1e-9 ? "" : clock(at, Math.min(6, marks.digits)))), automargin: false, zeroline: false },
      yaxis: { range: [height - AXIS_PX, 0], visible: false, automargin: false, fixedrange: true },
    };
    this.drawn = window;
    this.chart.style.height = this.names.style.height = `${height}px`;
    await plot(this.plot, [trace], layout, { staticPlot: true, responsive: false });
    this.#place();
    this.#tellRange();
  }

  /** Moves what is drawn to where it belongs. */
  #place() {
    if (this.drawn === null) return;
    const { begin, end } = this.seen;
    const scale = (this.drawn.end - this.drawn.begin) / SCREENS / (end - begin);
    const x = ((this.drawn.begin - begin) / (end - begin)) * this.width;
    this.plot.style.transform = `translateX(${x}px) scaleX(${scale})`;
    this.#markChosen();
  }

  #move(begin, end) {
    if (this.data === null) return;
    const whole = Math.max(this.seconds, LEAST_S);
    const span = Math.min(whole, Math.max(LEAST_S, end - begin));
    const from = Math.min(Math.max(0, (begin + end - span) / 2), whole - span);
    this.view = span >= whole ? null : { begin: from, end: from + span };
    this.isMoved = true;
    if (!this.frame) this.frame = requestAnimationFrame(() => this.#nextFrame());
    this.later();
  }

  #nextFrame() {
    this.frame = 0;
    const { begin, end } = this.seen;
    const span = end - begin;
    const drawn = (this.drawn.end - this.drawn.begin) / SCREENS;
    const stretched = Math.max(span / drawn, drawn / span);
    const away = Math.abs((begin + end) / 2 - (this.drawn.begin + this.drawn.end) / 2) / drawn;
    if (stretched > STRETCHED || away > EDGE) this.draw();
    else this.#place();
    this.#tellRange();
  }

  whole() {
    this.#move(0, this.seconds);
  }

  #zoomed(factor, x = this.width / 2) {
    const { begin, end } = this.seen;
    const at = begin + (x / this.width) * (end - begin);
    this.#move(at - (at - begin) / factor, at + (end - at) / factor);
  }

  #panned(share) {
    const { begin, end } = this.seen;
    this.#move(begin + share * (end - begin), end + share * (end - begin));
  }

  // -------------------------------------------------------------------------------------------------------- gestures

  pan(pixels) {
    this.leave();
    this.#panned(-pixels / this.width);
  }

  zoom(factor, x) {
    this.leave();
    this.#zoomed(factor, x);
  }

  rest() {
    if (this.data !== null) this.draw();
  }

  hover(x, y) {
    const hit = this.#hit(x, y);
    this.chart.classList.toggle("over-span", Boolean(hit?.span));
    const text = hit && about(hit, this.data.kinds);
    if (text) this.#tip(text, x, y);
    else this.tip.hide();
  }

  #tip(text, x, y, ms = 0) {
    const box = this.chart.getBoundingClientRect();
    this.tip.tell(text, box.left + x, box.top + y, ms);
  }

  scrolled(x, y) {
    this.#tip(`${WHEEL} zooms`, x, y, HINT_MS);
  }

  leave() {
    this.tip.hide();
  }

  click(x, y) {
    this.chart.focus({ preventScroll: true });
    const hit = this.#hit(x, y);
    if (hit === null) return;
    this.#choose(hit.row, hit.span ?? null);
    if (hit.span) this.#open();
    else if (hit.load !== undefined && hit.row.group.startsWith("server ")) openStory(this.run, hit.row.group);
  }

  #hit(x, y) {
    if (this.data === null) return null;
    const { begin, end } = this.seen;
    const pixel = (end - begin) / this.width;
    return found(this.rows, this.index, this.data, begin + x * pixel, y - AXIS_PX, pixel);
  }

  // ------------------------------------------------------------------------------------------------- what is chosen

  #choose(row, span) {
    this.chosen = { key: row.key, span };
    this.#markChosen();
    for (const name of this.names.children) name.classList.toggle("chosen", name.dataset.key === row.key);
    this.said.replaceChildren(visible(span ? `${row.label}: ${about({ row, span }, this.data.kinds)}` : row.label));
  }

  #markChosen() {
    const row = this.chosen && this.rows.find((each) => each.key === this.chosen.key);
    const span = this.chosen?.span;
    this.mark.hidden = !row || !span;
    if (!row || !span) return;
    const { begin, end } = this.seen;
    const x = (at) => ((at - begin) / (end - begin)) * this.width;
    const { top, height } = statePart(row);
    const left = Math.max(-4, x(span[1]) - 2);
    const style = { left: `${left}px`, width: `${Math.max(4, Math.min(this.width + 4, x(span[2]) + 2) - left)}px`, top: `${AXIS_PX + top - 2}px`, height: `${height + 4}px` };
    Object.assign(this.mark.style, style);
    this.mark.hidden = x(span[2]) < -4 || x(span[1]) > this.width + 4;
  }

  /** The story of what is chosen; spans that are drawn as one are come near to instead. */
  #open() {
    const [, begin, end, , , thing, count] = this.chosen.span;
    if (count > 1) {
      const middle = (begin + end) / 2;
      const half = Math.max(end - begin, (this.seen.end - this.seen.begin) / COME_NEAR) / 2;
      return this.#move(middle - half * 1.1, middle + half * 1.1);
    }
    return thing ? openStory(this.run, thing, el("p", {}, visible(about({ span: this.chosen.span }, this.data.kinds))), el("p", { class: "tl-links" }, links(this.run, thing))) : undefined;
  }

  #step(by) {
    const row = this.rows.find((each) => each.key === this.chosen?.key) ?? this.rows.find((each) => each.state !== null);
    const spans = row && row.state !== null ? this.index.spans.get(row.state) ?? [] : [];
    if (!spans.length) return;
    const { begin, end } = this.seen;
    const at = this.chosen?.key === row.key && this.chosen.span ? this.chosen.span[1] : by > 0 ? begin : end;
    const ordered = by > 0 ? spans.filter((span) => span[1] > at) : spans.filter((span) => span[1] < at).reverse();
    const next = ordered[0];
    if (!next) return;
    if (next[1] < begin || next[1] > end) this.#move(next[1] - (end - begin) / 2, next[1] + (end - begin) / 2);
    this.#choose(row, next);
  }

  #lane(by) {
    const at = this.rows.findIndex((row) => row.key === this.chosen?.key);
    const next = this.rows[at < 0 ? 0 : Math.min(this.rows.length - 1, Math.max(0, at + by))];
    if (next) this.#choose(next, null);
    this.names.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog, #panel")) return;
    const isMine = event.target === this.chart;
    const does = {
      "+": () => this.#zoomed(ZOOM), "=": () => this.#zoomed(ZOOM), "-": () => this.#zoomed(1 / ZOOM), 0: () => this.whole(),
      ArrowLeft: () => this.#panned(-PAN), ArrowRight: () => this.#panned(PAN), ",": () => this.#step(-1), ".": () => this.#step(1),
      ...(isMine && { ArrowUp: () => this.#lane(-1), ArrowDown: () => this.#lane(1), Enter: () => this.chosen?.span && this.#open() }),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }

  // ------------------------------------------------------------------------------------------------- lanes, legend

  #fold(row) {
    this.opened = new Set(this.opened ?? this.rows.filter((each) => each.isOpen).map((each) => each.group));
    if (!this.opened.delete(row.group)) this.opened.add(row.group);
    this.later();
    this.#keep();
  }

  #goTo(label) {
    const row = this.rows.find((each) => each.label === label || label.endsWith(` ${each.label}`));
    this.wanted = "";
    if (!row) return;
    this.#choose(row, null);
    this.names.querySelector(".chosen")?.scrollIntoView({ block: "center" });
  }

  #explain() {
    this.legend.replaceChildren(...colours(this.data));
    if (this.chosen !== null) return; // it is told there what is chosen
    const { reading } = this.data;
    const part = reading.done ? "" : `; the log is read up to ${duration(this.seconds)}`;
    this.said.replaceChildren(visible(this.seconds ? `${this.data.total.toLocaleString("en")} spans in ${duration(this.seconds)}${part}${reading.problem ? `; ${reading.problem}` : ""}` : `nothing is recorded yet${reading.problem ? `: ${reading.problem}` : ""}`));
  }

  #tellRange() {
    const { begin, end } = this.seen;
    const digits = end - begin < 10 ? 3 : end - begin < 600 ? 1 : 0;
    this.range.textContent = `${clock(begin, digits)} to ${clock(end, digits)} (${duration(end - begin)})`;
    clearTimeout(this.keeping);
    this.keeping = setTimeout(() => this.#keep(), ASK_MS);
  }

  #isAtEdge(seconds) {
    return this.view.end >= seconds - AT_EDGE * (this.view.end - this.view.begin);
  }

  /** The address says what is seen, so that it can be sent. */
  #keep() {
    if (!this.chart.isConnected || placeOf().page !== "timeline") return;
    const isStuck = this.view === null || (this.#isAtEdge(this.seconds) && runData(this.run).live);
    setParams({ ...(isStuck ? {} : { from: this.view.begin.toFixed(6), to: this.view.end.toFixed(6) }), open: this.opened === null ? null : [...this.opened].join(",") || "-" });
  }
}

let shown = null;

register("timeline", "Timeline", {
  async show(container, run, params) {
    shown = new Timeline(container, run, params);
    await shown.ask();
  },
  hide() {
    shown?.close();
    shown = null;
  },
  refresh() {
    return shown?.ask();
  },
});
