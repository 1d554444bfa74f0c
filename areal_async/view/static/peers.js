/* The trainer, the servers and the reward workers of a run: what each does, since when, how busy it is, its last words.

What always holds: cards stay where they are while their numbers change; what can't be known isn't shown as zero. */

import { address, bytes, clock, duration, el, get, isLive, number, of, openStory, percent, register, visible } from "./common.js";
import { runData } from "./store.js";
import { long, verdict } from "./text.js";

const KINDS = [["trainer", "Trainer"], ["server", "Servers"], ["worker", "Reward workers"]];
const SIGNS = {
  idle: ["○", "calm"], serving: ["●", "good"], working: ["●", "good"], training: ["●", "good"],
  publishing: ["◐", "busy"], checkpointing: ["◐", "busy"], updating: ["◐", "busy"], pausing: ["◐", "busy"], evaluating: ["●", "good"],
  starting: ["◌", "busy"], lost: ["✕", "bad"], quarantined: ["✕", "bad"],
};
const END_PIXELS = 24; // so near to the end of its output a reader follows it

let shown = null; // {run, cards: by label, parts}

/** A peer's card; what is inside it changes, it itself stays. */
class Card {
  constructor(run, row) {
    this.run = run;
    this.before = null;
    this.state = el("span", { class: "peer-state" });
    this.facts = el("dl", { class: "facts" });
    this.lines = el("pre", { class: "stderr", tabindex: "0", dir: "ltr", "aria-label": `last lines of ${row.label}` });
    this.count = el("span", { class: "dim" });
    this.output = el("details", { ontoggle: () => this.#tail(true) }, el("summary", {}, "stderr ", this.count), this.lines);
    this.loss = el("div", { class: "loss" });
    const story = el("button", { type: "button", class: "link", onclick: () => openStory(run, row.thing) }, "story");
    const links = row.thing ? el("span", { class: "links" }, story, " ", el("a", { href: address(run, "timeline", { lane: row.label }) }, "timeline")) : "";
    this.element = el("article", { class: "card peer", "aria-label": row.label }, el("header", {}, el("h3", {}, visible(row.label)), this.state, el("span", { class: "space" }), links), this.facts, this.loss, this.output);
  }

  /** live: what is told is of now; else it is what was told last. */
  update(row, at, live) {
    const [sign, kind] = SIGNS[row.state.split(":", 1)[0]] ?? ["●", "calm"];
    const since = `since ${clock(row.since, 1)} of the run clock`;
    this.state.className = `peer-state ${live ? kind : "calm"}`;
    this.state.replaceChildren(
      el("span", { "aria-hidden": "true" }, live ? sign : "○"), ` ${live ? "" : "last "}${row.state} `,
      el("span", { class: "dim", title: since }, live ? `for ${duration(Math.max(0, at - row.since))}` : `since ${clock(row.since)}`),
    );
    this.facts.replaceChildren(...this.#facts(row, at).map(([name, about, ...value]) => el("div", {}, el("dt", { title: about }, name), el("dd", {}, ...value))));
    this.#why(row);
    this.stderr = row.stderr;
    this.count.textContent = row.stderr.length ? `the last ${row.stderr.length} line${row.stderr.length === 1 ? "" : "s"}` : "nothing";
    this.#tail(false);
    this.before = { at, cpu_s: row.cpu_s, pid: row.pid };
  }

  #facts(row, at) {
    const facts = [];
    const add = (value, ...fact) => value !== null && value !== undefined && facts.push(fact);
    add(row.version, "version", "of the weights that it holds", `v${row.version}`);
    add(row.load, "samples", "placed there and not finished", number(row.load, 9));
    add(row.running, "running", "requests in the engine's batches", number(row.running, 9));
    add(row.waiting, "waiting", "requests that wait for a place in the engine", number(row.waiting, 9));
    if (row.kind === "server") add(row.cache, "KV cache", "share in use", cache(row.cache));
    add(row.restarts || null, "restarts", "so far", number(row.restarts, 9));
    add(row.pid, "pid", "of its first process", String(row.pid));
    add(row.cpu_s, "CPU", "of all its processes, so far; cores since the last look", this.#cpu(row, at));
    add(row.resident, "memory", "resident, of all its processes", bytes(row.resident));
    return facts;
  }

  #cpu(row, at) {
    const { before } = this;
    const cores = before && before.pid === row.pid && typeof before.cpu_s === "number" && at > before.at ? (row.cpu_s - before.cpu_s) / (at - before.at) : null;
    return cores === null || cores < 0 ? duration(row.cpu_s) : `${duration(row.cpu_s)}, ${cores.toFixed(1)} cores`;
  }

  #why({ why }) {
    if (why === this.why) return;
    this.why = why;
    const [first, ...rest] = why.split("\n");
    if (!why) this.loss.replaceChildren();
    else if (!rest.join("").trim()) this.loss.replaceChildren(el("p", {}, el("strong", {}, "last lost: "), visible(first)));
    else this.loss.replaceChildren(el("details", {}, el("summary", {}, el("strong", {}, "last lost: "), visible(first)), long(rest.join("\n"))));
  }

  /** The output's end; a reader who stands there follows it. */
  #tail(opened) {
    if (!this.output.open) return;
    const text = this.stderr.join("\n");
    const follows = opened || this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < END_PIXELS;
    if (text !== this.text) {
      this.text = text;
      this.lines.replaceChildren(text ? visible(text) : el("span", { class: "dim" }, "It has written nothing, or its file isn't in this folder."));
    }
    if (follows) this.lines.scrollTop = this.lines.scrollHeight;
  }
}

function cache(share) {
  const bar = el("span", { class: "bar-of", role: "img", "aria-label": percent(share) }, el("span", {}));
  bar.firstElementChild.style.width = `${Math.min(100, 100 * share)}%`;
  return [bar, ` ${percent(share)}`];
}

function counts(verdicts) {
  if (verdicts === null) return [el("span", { class: "dim" }, "How checks ended isn't known: no log was read.")];
  const entries = Object.entries(verdicts).sort(([, a], [, b]) => b - a);
  const all = entries.reduce((sum, [, each]) => sum + each, 0);
  if (!all) return [el("span", { class: "dim" }, "No check has ended yet.")];
  const words = entries.map(([word, each]) => el("a", { href: address(shown.run, "samples", { verdict: word }), title: "its samples" }, verdict(word), ` ${number(each, 9)} `, el("span", { class: "dim" }, percent(each / all))));
  return [el("span", { class: "dim", title: "as far as the log was read" }, `${number(all, 9)} checks:`), ...words];
}

function draw({ run, parts, cards }, peers) {
  const live = isLive(runData(run).latest?.run.state);
  parts.problem.hidden = !peers.problem;
  parts.problem.replaceChildren(visible(peers.problem));
  parts.verdicts.replaceChildren(...counts(peers.verdicts));
  const there = new Set();
  for (const row of peers.peers) {
    const key = `${row.label} ${row.thing ? "" : "starting"}`;
    there.add(key);
    if (!cards.has(key)) {
      cards.set(key, new Card(run, row));
      parts.groups[row.kind].append(cards.get(key).element);
    }
    cards.get(key).update(row, peers.at, live);
  }
  for (const [key, card] of cards) {
    if (there.has(key)) continue;
    card.element.remove();
    cards.delete(key);
  }
  for (const [kind, title] of KINDS) {
    const many = parts.groups[kind].childElementCount;
    parts.sections[kind].hidden = !many && kind !== "worker";
    parts.sections[kind].classList.toggle("many", many > 1);
    parts.headings[kind].textContent = many > 1 ? `${title} (${many})` : title;
  }
}

async function ask(mine, options) {
  const peers = await get(of(mine.run, "peers"), {}, options);
  if (shown === mine) draw(mine, peers);
}

register("peers", "Servers & workers", {
  async show(container, run) {
    const parts = { problem: el("p", { class: "missing", role: "status", hidden: true }), verdicts: el("p", { class: "verdicts" }), groups: {}, headings: {}, sections: {} };
    for (const [kind] of KINDS) {
      parts.headings[kind] = el("h2");
      parts.groups[kind] = el("div", { class: "peers" });
      parts.sections[kind] = el("section", { class: "peer-kind", hidden: true }, parts.headings[kind], kind === "worker" ? parts.verdicts : "", parts.groups[kind]);
    }
    const mine = { run, parts, cards: new Map() };
    shown = mine;
    container.append(parts.problem, el("div", { class: "peer-kinds" }, Object.values(parts.sections)));
    await ask(mine, {});
  },

  hide() {
    shown = null;
  },

  async refresh() {
    if (shown) await ask(shown, { quiet: true });
  },
});
