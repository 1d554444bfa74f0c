/* Figures of one run, or of several on top of each other: cards that are drawn when they come into view, with one switch
for all for the x axis, one slider for smoothing, and one zoom.

What always holds: a figure that isn't in view isn't drawn, unless the page is printed; new rows keep the zoom; each card has its title, unit, newest
values and a sentence that explains it. */

import { el, get, number, of, percent, place, plot, prose, setParams, unplot } from "./common.js";
import { branches, says, timeUnit } from "./lines.js";
import { isPrinting, onPaper } from "./printing.js";
import { busy, lags, lines } from "./traces.js";

const COUNTED = /tokens|checks|samples|groups|requests/; // units of which there may be many: 20k; others may be small
const AHEAD_PX = 300; // figures just below the window are drawn already
const COARSE = matchMedia("(pointer: coarse)"); // a finger scrolls, it doesn't zoom

/** Figures of `runs`, a list of RunData, in `container`. figures: of the API. params: of the address. */
export class Board {
  constructor(container, figures, runs, params) {
    this.runs = runs;
    this.byTime = params.x === "time";
    this.smoothing = Math.min(0.98, Math.max(0, Number(params.smooth) || 0));
    this.zoom = null;
    this.frame = null; // in which the slider's move is drawn
    this.resets = 0;
    this.lagsOf = new Map();
    this.onEta = () => {}; // η is known, or another one
    this.overlay = runs.length > 1;
    const fitting = this.overlay ? figures.map(forSeveral).filter(Boolean) : figures;
    this.cards = fitting.map((figure) => new Card(this, figure));
    this.watcher = new IntersectionObserver((seen) => this.#seen(seen), { rootMargin: `${AHEAD_PX}px` });
    this.#build(container);
    this.offPaper = onPaper(() => this.#again());
    this.update();
  }

  #build(container) {
    const main = this.cards.filter((card) => card.figure.main);
    this.more = this.cards.filter((card) => !card.figure.main);
    this.still = el("p", { class: "dim", hidden: true });
    this.moreGrid = el("div", { class: "figures" }, this.more.map((card) => card.element));
    container.append(
      this.#tools(),
      el("div", { class: "figures" }, main.map((card) => card.element)),
      el("details", { class: "more", ontoggle: () => this.update() }, el("summary", {}, `More figures (${this.more.length})`), this.still, this.moreGrid),
    );
    this.cards.forEach((card) => this.watcher.observe(card.element));
  }

  #tools() {
    const choice = (label, byTime) => {
      const press = () => {
        this.byTime = byTime;
        for (const button of this.choice.children) button.setAttribute("aria-pressed", String((button.dataset.x === "time") === byTime));
        this.#address();
        this.setZoom(null);
      };
      return el("button", { type: "button", "aria-pressed": String(this.byTime === byTime), onclick: press, dataset: { x: byTime ? "time" : "step" } }, label);
    };
    this.choice = el("span", { class: "choice", role: "group", "aria-label": "x axis" }, choice("by step", false), choice("by time", true));
    const shown = el("output", { class: "dim" }, this.smoothing.toFixed(2));
    const slide = (event) => {
      this.smoothing = Number(event.target.value);
      shown.value = this.smoothing.toFixed(2);
      this.frame ??= requestAnimationFrame(() => {
        this.frame = null;
        this.update();
      });
    };
    this.back = el("button", { type: "button", hidden: true, onclick: () => this.setZoom(null) }, "whole run");
    this.dotted = el("span", { class: "key dim", hidden: true }, swatch("--dim", "dot"), "dotted: a branch that was abandoned; its steps were trained again from a checkpoint");
    const hint = COARSE.matches ? "" : "Drag in a figure to zoom into all of them; a double click shows the whole run again.";
    return el("div", { class: "tools figure-tools" },
      this.choice,
      el("label", {}, "smoothing", el("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: this.smoothing, oninput: slide, onchange: () => this.#address() }), shown),
      this.back,
      this.dotted,
      el("span", { class: "dim hint" }, hint));
  }

  /** Not at each move of the slider: browsers count changes of the address. */
  #address() {
    const { x, smooth, ...others } = place().params;
    setParams({ ...others, x: this.byTime ? "time" : null, smooth: this.smoothing || null });
  }

  /** range: [from, to] on the x axis, null: all. */
  setZoom(range) {
    if (range === null) this.resets += 1;
    this.zoom = range;
    this.back.hidden = range === null;
    this.update();
    this.data.forEach((one) => this.lags(one)); // whoever prints can't wait for them
  }

  /** Rows may be new: what is in view is drawn again. */
  update() {
    this.data = this.runs.map((run, at) => ({ run, at, evaluations: run.latest.evaluations, rows: run.rows, ...branches(run.rows, run.latest) }));
    this.timeUnit = timeUnit(Math.max(0, ...this.runs.map((run) => run.rows.at(-1)?.time_s ?? 0)));
    this.dotted.hidden = this.data.every(({ abandoned }) => abandoned.length === 0);
    const silent = [];
    for (const card of this.cards) {
      card.dirty = true;
      if (!card.figure.main) {
        card.element.hidden = !this.data.some(({ rows, evaluations }) => says(card.figure, rows, evaluations));
        if (card.element.hidden) silent.push(card.figure.title);
      }
    }
    this.still.hidden = silent.length === 0;
    this.still.textContent = `Not drawn, since always 0 or not known so far: ${silent.join(", ")}.`;
    for (const card of this.cards) card.draw();
  }

  /** All have another size. */
  #again() {
    for (const card of this.cards) {
      card.dirty = true;
      card.draw();
    }
  }

  /** More of the log was read: only what comes from it is drawn again. */
  updateLags() {
    for (const card of this.cards) {
      if (card.figure.kind !== "lags") continue;
      card.dirty = true;
      card.draw();
    }
  }

  #seen(entries) {
    for (const { target, isIntersecting } of entries) {
      const card = this.cards.find(({ element }) => element === target);
      card.inView = isIntersecting;
      card.draw();
    }
  }

  /** Lags of a run for the steps in view; asked for once. */
  async lags({ run, kept }) {
    let [from, to] = [0, (kept.at(-1)?.step ?? -1) + 1];
    if (this.zoom) {
      const inside = kept.filter((row) => this.within(row));
      if (inside.length) [from, to] = [inside[0].step, inside.at(-1).step + 1];
    }
    if (to <= from) return null;
    const asked = `${run.key} ${from} ${to} ${run.latest.reading.events}`;
    if (!this.lagsOf.has(run.key) || this.lagsOf.get(run.key).asked !== asked) {
      this.lagsOf.set(run.key, { asked, answer: get(of(run.key, "lags"), { from, to }, { quiet: true }).catch(() => null) });
    }
    const answer = await this.lagsOf.get(run.key).answer;
    const known = answer && (Object.keys(answer.tokens).length > 0 || answer.unknown > 0); // else nothing was read, η neither
    if (known && !this.overlay && answer.eta !== this.eta) {
      this.eta = answer.eta;
      const bounded = this.cards.find(({ figure }) => figure.key === "lag");
      bounded.dirty = true;
      bounded.draw();
      this.onEta();
    }
    return answer;
  }

  within(row) {
    const [from, to] = this.zoom;
    const x = this.byTime ? row.time_s / this.timeUnit[0] : row.step;
    return x >= from && x <= to;
  }

  close() {
    cancelAnimationFrame(this.frame);
    this.watcher.disconnect();
    this.offPaper();
    this.cards.forEach((card) => unplot(card.plot));
  }
}

const thickness = ([first, ...others]) => `Thick: ${first.label}; thin: ${others.map((one) => one.label).join(", ")}.`;

/** A figure for several runs: stacks can't lie on each other, so who was busy becomes two lines, and others are left. */
function forSeveral(figure) {
  if (figure.kind === "busy") {
    const series = [{ field: "trainer_idle_share", label: "trainer" }, { field: "rollout_idle_share", label: "servers" }];
    const about = `Share of \`step_s\` in which the trainer was idle, and in which a server was (mean over servers). ${thickness(series)}`;
    return { ...figure, kind: "lines", title: "Idle", series, about };
  }
  if (figure.series.some((one) => one.stacked || one.field.startsWith("rollout_idle_by_server"))) return null;
  return { ...figure, about: figure.series.length > 1 ? `${figure.about} ${thickness(figure.series)}` : figure.about };
}

/** Of a figure that has nothing to draw yet. */
const EMPTY = {
  xaxis: { visible: false }, yaxis: { visible: false }, dragmode: false,
  annotations: [{ text: "nothing so far", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { color: "--dim" } }],
};

class Card {
  constructor(board, figure) {
    this.board = board;
    this.figure = figure;
    this.inView = false;
    this.dirty = true;
    this.drawing = 0;
    this.keys = el("div", { class: "keys" });
    this.plot = el("div", { class: "plot", role: "img", "aria-label": figure.title });
    this.note = el("span");
    this.element = el("figure", { class: "card figure-card", id: `figure-${figure.key}` },
      el("header", {}, el("h3", {}, figure.title), this.keys),
      this.plot,
      el("figcaption", { class: "dim" }, prose(figure.about), this.note));
  }

  async draw() {
    if (!this.dirty || this.element.hidden || !(this.inView || this.#isPrinted())) return;
    this.dirty = false;
    const mine = ++this.drawing;
    const drawn = this.figure.kind === "lags" ? await lags(this.board) : this.figure.kind === "busy" ? busy(this.board) : lines(this.board, this.figure);
    if (mine !== this.drawing) return;
    this.#legend(drawn.keys);
    this.note.textContent = drawn.note ? ` ${drawn.note}` : "";
    await plot(this.plot, drawn.traces, drawn.traces.length ? this.#layout(drawn) : EMPTY);
    if (!this.listening && this.plot.on) this.#listen();
  }

  #isPrinted() {
    return isPrinting() && !this.element.closest("details:not([open])");
  }

  #layout({ layout, x }) {
    const { zoom, resets, byTime, timeUnit } = this.board;
    const { unit, log, range } = this.figure;
    const fixed = COARSE.matches;
    const yaxis = { uirevision: resets, showspikes: false, fixedrange: fixed, rangemode: log || range ? "normal" : "tozero", title: unit, ...layout.yaxis };
    if (unit === "%") Object.assign(yaxis, { tickformat: ".3~p", hoverformat: ".2%", title: "" });
    else Object.assign(yaxis, { hoverformat: ".5~g", exponentformat: COUNTED.test(unit) ? "SI" : "power" });
    if (log) Object.assign(yaxis, { type: "log", exponentformat: "power", dtick: 1, hoverformat: ".2~e" });
    if (range) yaxis.range = range;
    const xaxis = { fixedrange: fixed, title: x, unifiedhovertitle: { text: byTime ? `%{x:.1f} ${timeUnit[1]}` : "step %{x}" }, ...layout.xaxis };
    if (!xaxis.categories) Object.assign(xaxis, zoom ? { range: zoom, autorange: false } : { autorange: true }, { uirevision: JSON.stringify([zoom, resets]) });
    delete xaxis.categories;
    return { ...layout, showlegend: false, dragmode: fixed ? false : "zoom", xaxis, yaxis };
  }

  #listen() {
    this.listening = true;
    if (this.figure.kind === "lags") return;
    this.plot.on("plotly_relayout", (change) => {
      const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (from !== undefined && to !== undefined) this.board.setZoom([from, to]);
    });
    this.plot.on("plotly_doubleclick", () => {
      this.board.setZoom(null);
      return false;
    });
  }

  /** keys: [{label, colour, dash, width, value}]; value: the newest, in the figure's unit. */
  #legend(keys) {
    const show = (value) => (this.figure.unit === "%" ? percent(value) : number(value, 3));
    this.keys.replaceChildren(...keys.map(({ label, colour, dash, width, value, block, short }) => el("span", { class: "key", title: short ? label : null },
      swatch(colour, dash, width, block),
      short || label === this.figure.title ? null : el("span", {}, label),
      value === undefined ? null : el("strong", {}, show(value)))));
    const said = keys.filter(({ value }) => value !== undefined).map(({ label, value }) => `${label} ${show(value)}`).join(", ");
    this.plot.setAttribute("aria-label", said ? `${this.figure.title}; newest: ${said}` : this.figure.title);
  }
}

const DASHED = { dash: "5 3", dot: "1.5 3", dashdot: "5 3 1.5 3", longdash: "9 3", longdashdot: "9 3 1.5 3" };

/** A piece of the line, as it is drawn; block: of an area. colour: a name of style.css. */
export function swatch(colour, dash = "solid", width = 2, block = false) {
  const stroke = `var(${colour})`;
  const drawn = block
    ? el("rect", { x: 2, y: 1, width: 14, height: 10, style: { fill: stroke } })
    : el("line", { x1: 0, y1: 6, x2: 20, y2: 6, "stroke-dasharray": DASHED[dash] ?? null, "stroke-width": width, style: { stroke } });
  return el("svg", { class: "swatch", width: 20, height: 12, "aria-hidden": "true" }, drawn);
}
