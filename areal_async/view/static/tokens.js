/* An answer token by token: each is shaded by the version that wrote it, or by what the trainer thought of it; one of
them is told in full.

What always holds: every token of the answer is an element of its own, in order from left to right whatever its text (one
of Arabic or Hebrew letters is written from right to left by itself, and turns no other); what is no training data (loss
mask 0) is told apart by its form, not by colour alone; switching the shades changes one attribute, so answers of 32,000
tokens stay usable. */

import { el, number, percent, visible } from "./common.js";
import { isRightToLeft, quoted, signed, spaced } from "./text.js";

const CHUNK_TOKENS = 120; // browsers don't lay out a block that isn't seen; blocks end only where a line does
const VERSION_SHADES = 6; // in style: neighbours differ in hue and, in turn, in lightness
const PROBABILITIES = [0.99, 0.9, 0.5, 0.1, 0.01]; // lower ends of shades b0 … b4; b5 is below
const RATIOS = [0.5, 0.8, 0.95, 1.05, 1.25, 2]; // upper ends of shades r0 … r5; r6 is above

export const SHADES = [
  ["version", "version"],
  ["behaviour", "log π_behav"],
  ["ratio", "π_prox / π_behav"],
];

function steps(bounds, format) {
  return [`below ${format(bounds[0])}`, ...bounds.slice(1).map((end, at) => `${format(bounds[at])} – ${format(end)}`), `${format(bounds.at(-1))} and more`];
}

/** answer: {texts, ids, versions, logprobs, prox, mask, advantage, step}: arrays by token; prox may be null.
 * Returns {text, legend, detail: elements; shade(name), spaces(shown)}. */
export function tokenView(answer) {
  return new TokenView(answer);
}

class TokenView {
  constructor(answer) {
    this.answer = answer;
    this.current = -1;
    this.order = [...new Set(answer.versions.filter((version) => version >= 0))].sort((a, b) => a - b);
    this.masked = answer.mask.filter((mask) => mask === 0).length;
    this.spans = answer.texts.map((text, at) => this.#token(text, at));
    this.text = el(
      "div",
      { class: "tokens", tabindex: "0", dir: "ltr", role: "group", "aria-label": "the answer, token by token: left and right walk through it, with shift to the next version" },
      this.#chunks(),
    );
    this.legend = el("div", { class: "legend", "aria-label": "what the shades mean" });
    this.detail = el("dl", { class: "token-detail", "aria-live": "polite" });
    this.text.addEventListener("pointerover", (event) => this.#tell(this.#at(event.target)));
    this.text.addEventListener("pointerleave", () => this.#tell(this.current));
    this.text.addEventListener("click", (event) => {
      if (getSelection()?.isCollapsed ?? true) this.walkTo(this.#at(event.target));
    });
    this.text.addEventListener("keydown", (event) => this.#key(event));
    this.shade("version");
    this.#tell(-1);
  }

  // ------------------------------------------------------------------------------------------------- elements

  #token(text, at) {
    const { versions, mask, logprobs, prox } = this.answer;
    const classes = ["t"];
    if (mask[at] === 0) classes.push("masked");
    if (isRightToLeft(text)) classes.push("rtl");
    if (versions[at] >= 0) {
      classes.push(`v${this.order.indexOf(versions[at]) % VERSION_SHADES}`);
      const probability = Math.exp(logprobs[at]);
      const lower = PROBABILITIES.findIndex((end) => probability >= end);
      classes.push(`b${lower < 0 ? PROBABILITIES.length : lower}`);
      const ratio = this.#ratio(at);
      if (ratio !== null) {
        const upper = RATIOS.findIndex((end) => ratio < end);
        classes.push(`r${upper < 0 ? RATIOS.length : upper}`);
      }
      if (this.#changes(at)) classes.push("first");
    }
    const span = el("span", { class: classes.join(" ") });
    span.dataset.at = at;
    fill(span, text, false);
    return span;
  }

  /** Whether another version begins here. */
  #changes(at) {
    const { versions } = this.answer;
    let before = at - 1;
    while (before >= 0 && versions[before] < 0) before -= 1;
    return before < 0 || versions[before] !== versions[at];
  }

  #chunks() {
    const { texts, versions } = this.answer;
    const chunks = [el("div", { class: "chunk" })];
    let inside = 0;
    this.spans.forEach((span, at) => {
      if (span.classList.contains("first")) chunks.at(-1).append(el("span", { class: "from", "aria-hidden": "true" }, `v${versions[at]}`));
      chunks.at(-1).append(span);
      inside += 1;
      if (inside >= CHUNK_TOKENS && texts[at].endsWith("\n") && at + 1 < texts.length) {
        chunks.push(el("div", { class: "chunk" }));
        inside = 0;
      }
    });
    return chunks;
  }

  /** π_prox / π_behav of a token, null where it wasn't kept. */
  #ratio(at) {
    const prox = this.answer.prox?.[at];
    return typeof prox === "number" ? Math.exp(prox - this.answer.logprobs[at]) : null;
  }

  // --------------------------------------------------------------------------------------------------- shades

  /** What shades the tokens: a name of `SHADES`. */
  shade(name) {
    this.text.dataset.shade = name;
    const legends = { version: () => this.#versions(), behaviour: () => this.#behaviour(), ratio: () => this.#ratios() };
    const masked = this.masked ? [el("span", { class: "key" }, el("span", { class: "t masked" }, "abc"), ` loss mask 0: no training data (${number(this.masked, 9)})`)] : [];
    this.legend.replaceChildren(...legends[name](), ...masked);
    this.legend.dataset.shade = name;
  }

  /** Whether spaces, tabs and ends of lines have signs. */
  spaces(shown) {
    this.text.classList.toggle("spaces-shown", shown);
    this.spans.forEach((span, at) => fill(span, this.answer.texts[at], shown));
  }

  #versions() {
    const { versions } = this.answer;
    return this.order.map((version, at) => {
      const count = versions.filter((each) => each === version).length;
      const go = () => this.walkTo(versions.indexOf(version), true);
      const sample = el("span", { class: `t v${at % VERSION_SHADES} first` }, `v${version}`);
      return el("button", { type: "button", class: "key", title: `to the first token of version ${version}`, onclick: go }, sample, ` ${number(count, 9)} token${count === 1 ? "" : "s"}`);
    });
  }

  #behaviour() {
    const names = steps([...PROBABILITIES].reverse(), (value) => percent(value, 0)).reverse();
    return ["probability when it was sampled:", ...names.map((name, at) => el("span", { class: "key" }, el("span", { class: `t b${at}` }, name)))];
  }

  #ratios() {
    const missing = this.answer.texts.filter((_, at) => this.answer.versions[at] >= 0 && this.#ratio(at) === null).length;
    const names = steps(RATIOS, (value) => String(value));
    const keys = names.map((name, at) => el("span", { class: "key" }, el("span", { class: `t r${at}` }, name)));
    return [...keys, ...(missing ? [el("span", { class: "dim" }, `not kept: ${number(missing, 9)} tokens`)] : [])];
  }

  // ------------------------------------------------------------------------------------------------ one token

  #at(target) {
    const span = target.closest?.(".t");
    return span?.dataset.at === undefined ? this.current : Number(span.dataset.at);
  }

  /** Makes a token the current one; -1: none. */
  walkTo(at, focus = false) {
    this.spans[this.current]?.classList.remove("current");
    this.current = at;
    const span = this.spans[at];
    span?.classList.add("current");
    span?.scrollIntoView({ block: "nearest" });
    if (focus) this.text.focus({ preventScroll: true });
    this.#tell(at);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.spans.length - 1;
    const to = {
      ArrowRight: () => (event.shiftKey ? this.#change(1) : Math.min(last, this.current + 1)),
      ArrowLeft: () => (event.shiftKey ? this.#change(-1) : Math.max(0, this.current - 1)),
      Home: () => 0,
      End: () => last,
      Escape: () => -1,
    }[event.key];
    if (!to || (event.key === "Escape" && this.current < 0)) return;
    event.preventDefault();
    event.stopPropagation();
    this.walkTo(to());
  }

  /** The nearest token in this direction at which another version begins. */
  #change(way) {
    for (let at = this.current + way; at >= 0 && at < this.spans.length; at += way) {
      if (this.spans[at].classList.contains("first")) return at;
    }
    return Math.max(0, this.current);
  }

  #tell(at) {
    if (at === this.told) return;
    this.told = at;
    if (at < 0) {
      this.detail.replaceChildren(el("p", { class: "dim" }, "Point at a token, or walk with ", el("kbd", {}, "←"), el("kbd", {}, "→"), " (", el("kbd", {}, "shift"), " to the next version)."));
      return;
    }
    this.detail.replaceChildren(...this.#facts(at).map(([name, ...value]) => el("div", {}, el("dt", {}, name), el("dd", {}, ...value))));
  }

  #facts(at) {
    const { texts, ids, versions, logprobs, prox, mask, advantage, step } = this.answer;
    const written = versions[at] >= 0;
    const ratio = written ? this.#ratio(at) : null;
    const missing = el("span", { class: "dim" }, written ? "not kept" : "–");
    return [
      ["token", `${number(at + 1, 9)} of ${number(texts.length, 9)}`],
      ["id", String(ids[at])],
      ["text", el("code", {}, quoted(texts[at]))],
      ["version", written ? `v${versions[at]}` : "not the model's"],
      ["lag", written && step !== null ? String(step - versions[at]) : "–"],
      ["log π_behav", written ? told(logprobs[at]) : "–"],
      ["log π_prox", ratio === null ? missing : told(prox[at])],
      ["π_prox / π_behav", ratio === null ? missing.cloneNode(true) : number(ratio, 4)],
      ["advantage", mask[at] === 0 ? "–" : signed(advantage)],
      ["loss mask", mask[at] === 0 ? "0, no training data" : "1"],
    ];
  }
}

/** A log-probability, and the probability. */
function told(value) {
  const probability = Math.exp(value);
  return `${logarithm(value)} (${percent(probability, probability >= 0.9995 ? 0 : 1)})`;
}

function logarithm(value) {
  if (typeof value !== "number") return "–";
  const digits = value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toFixed(4);
  return digits.replaceAll("-", "−");
}

function fill(span, text, shown) {
  if (text === "") span.replaceChildren(el("i", { class: "nothing", title: "a token without a text of its own" }));
  else if (shown) span.replaceChildren(spaced(text));
  else if (!text.includes("\n")) span.replaceChildren(visible(text));
  // an end of line has no width of its own: its sign shows when the token is pointed at
  else span.replaceChildren(...text.split("\n").flatMap((part, at) => (at ? [el("i", { class: "space newline" }), "\n", visible(part)] : [visible(part)])));
}
