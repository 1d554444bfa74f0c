/* One sample in full: what became of it, its prompt, its answer token by token, its group, its checks.

What always holds: what is shown of a sample that is still on its way follows the run, and the reader's place in the
answer stays. */

import { address, clock, duration, el, get, has, number, of, openStory, register, setParams, visible } from "./common.js";
import { long, signed, verdict } from "./text.js";
import { SHADES, tokenView } from "./tokens.js";

const TIMES = [
  ["asked", "asked", "its group was asked for"],
  ["started", "started", "its last attempt was sent to a server"],
  ["answered", "answered", "its last token had come"],
  ["scored", "scored", "its reward was known"],
  ["ready", "ready", "all of its group had theirs"],
  ["handed", "in training", "its step began"],
  ["trained", "trained", "its step was done"],
];
const OPEN = ["outstanding", "training"]; // outcomes that aren't the last

let shown = null; // {run, id, params, full, parts}

/** Whether it can be shown: an exported file has only some. */
const there = (run, id) => has(of(run, "samples", id));

// ------------------------------------------------------------------------------------------------------- facts

function fact(name, about, ...value) {
  return el("div", {}, el("dt", { title: about }, name), el("dd", {}, ...value));
}

function facts({ record }, run) {
  const versions = record.oldest === record.newest ? `v${record.oldest}` : `v${record.oldest} – v${record.newest}`;
  const branch = record.branch ? ` (branch ${record.branch})` : "";
  const step = record.step === null ? "–" : el("a", { href: address(run, "samples", { step: record.step }), title: "all samples of this step" }, `${record.step}${branch}`);
  const server = el("button", { type: "button", class: "link", title: "its story", onclick: () => openStory(run, `server ${record.server}`) }, visible(record.server || "–"));
  const group = el("a", { href: address(run, "samples", { group: record.group }), title: "all samples of this group" }, record.group);
  return [
    fact("outcome", "what became of it", record.outcome),
    fact("verdict", "of its check", verdict(record.verdict)),
    fact("reward", "that the check gave", number(record.reward)),
    fact("advantage", "of each of its tokens in training", signed(record.advantage)),
    fact("step", "that trained it", step),
    fact("lag", "step minus the version of its oldest token", record.lag ?? "–"),
    fact("versions", "of its oldest and newest token", versions),
    fact("floor", "no token may be of an older version", record.floor === null ? "–" : `v${record.floor}`),
    fact("tokens", "of prompt + answer", `${number(record.prompt_tokens, 9)} + ${number(record.response_tokens, 9)}`),
    fact("end", "why the answer ended", record.finish === "length" ? "cut at the token limit" : record.finish),
    fact("server", "where it was placed", server),
    fact("group", "the samples of one prompt", group),
    fact("attempt", "from 0: a failed one is tried again", record.attempt),
    fact("row", "of the data, and position in the run's order", record.row === null ? `– (position ${record.position})` : `${record.row} (position ${record.position})`),
  ];
}

function times({ record }) {
  const known = TIMES.filter(([key]) => typeof record.times[key] === "number");
  return known.map(([key, word, about], at) => {
    const now = record.times[key];
    const before = at ? record.times[known[at - 1][0]] : null;
    // what is made of several answers has times that overlap
    const since = before === null ? clock(now, 1) : now >= before ? `+ ${duration(now - before)}` : clock(now, 1);
    return el("li", { title: `${about}: ${clock(now, 2)}` }, el("span", { class: "dim" }, word), ` ${since}`);
  });
}

// ------------------------------------------------------------------------------------------------------ beside

function members({ members: all, record }, run) {
  const rows = all.map((row) => {
    const name = row.id === record.id ? el("strong", { "aria-current": "true" }, row.id) : there(run, row.id) ? el("a", { href: address(run, "sample", { id: row.id }) }, row.id) : row.id;
    const cut = row.truncated ? el("span", { class: "dim", title: "cut at the token limit" }, " cut") : "";
    const versions = row.oldest === row.newest ? `v${row.oldest}` : `v${row.oldest}–${row.newest}`;
    return el("tr", { class: row.id === record.id ? "here" : null },
      el("td", {}, name), el("td", {}, verdict(row.verdict)), el("td", { class: "number" }, number(row.reward, 3)),
      el("td", { class: "number" }, number(row.length, 9), cut), el("td", {}, versions));
  });
  const heads = [["sample"], ["verdict"], ["reward", "number"], ["tokens", "number"], ["versions"]];
  const table = el("table", {}, el("thead", {}, el("tr", {}, heads.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)))), el("tbody", {}, rows));
  return el("section", { class: "card" }, el("h3", {}, `Group ${record.group}`), el("div", { class: "scroll" }, table));
}

function checks({ checks: all, record }) {
  const parts = all.map((check, at) => [
    el("p", { class: "check-line" }, verdict(check.verdict), `  reward ${number(check.reward, 3)}  `, el("span", { class: "dim" }, `${all.length > 1 ? `check ${at + 1}, ` : ""}took ${duration(check.seconds)}`)),
    check.why ? [el("h4", {}, "reason"), long(check.why)] : "",
    check.extracted ? [el("h4", {}, "taken as the answer"), long(check.extracted, { class: "extracted" })] : el("p", { class: "dim" }, "nothing was taken as the answer"),
  ]);
  const none = record.verdict === null ? "It has not been checked." : "Nothing more than the verdict is kept.";
  return el("section", { class: "card" }, el("h3", {}, all.length > 1 ? "Checks" : "Check"), parts.length ? parts : el("p", { class: "dim" }, none));
}

function columns({ columns: all }) {
  const entries = Object.entries(all);
  if (!entries.length) return "";
  const parts = entries.map(([name, text]) => el("details", { open: text.length < 400 }, el("summary", {}, visible(name), el("span", { class: "dim" }, ` ${number(text.length, 9)} characters`)), long(text)));
  return el("section", { class: "card" }, el("h3", {}, "Row of the data"), parts);
}

// ------------------------------------------------------------------------------------------------- prompt, answer

function prompt({ prompt_tokens: texts, record }) {
  const text = texts?.join("") ?? record.prompt;
  const ids = record.prompt_ids ? `token ids: ${record.prompt_ids.join(" ")}` : null;
  const body = text === null ? (ids ? long(ids) : el("p", { class: "dim" }, "not there")) : long(text, { class: "prompt" });
  return el("section", { class: "card" }, el("h3", {}, "Prompt"), body);
}

function answer({ record, tokens, prox }, params) {
  const ids = record.response_ids;
  if (!ids) return el("section", { class: "card" }, el("h3", {}, "Answer"), el("p", { class: "dim" }, `not there: ${record.missing || "its arrays can't be read"}`));
  const view = tokenView({
    texts: tokens ?? ids.map((id) => `⟨${id}⟩`),
    ids,
    versions: record.versions,
    logprobs: record.logprobs,
    prox,
    mask: record.loss_mask,
    advantage: record.advantage,
    step: record.step,
  });
  const buttons = SHADES.map(([name, label]) => {
    const choose = () => {
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === mine)));
      view.shade(name);
      setParams({ ...(shown?.params ?? params), shade: name === "version" ? null : name });
    };
    const mine = el("button", { type: "button", "aria-pressed": "false", onclick: choose }, label);
    return mine;
  });
  const chosen = Math.max(0, SHADES.findIndex(([name]) => name === params.shade));
  view.shade(SHADES[chosen][0]);
  buttons[chosen].setAttribute("aria-pressed", "true");
  const spaces = el("input", { type: "checkbox", onchange: () => view.spaces(spaces.checked) });
  const tools = el("div", { class: "tools" }, el("div", { class: "choice", role: "group", "aria-label": "what shades the tokens" }, buttons), el("label", {}, spaces, "show spaces and ends of lines"));
  return el("section", { class: "card answer" }, el("h3", {}, "Answer"), tools, view.legend, view.text, view.detail);
}

// -------------------------------------------------------------------------------------------------------- page

function head({ record, members: all }, run) {
  const at = all.findIndex((row) => row.id === record.id);
  const link = (row, sign, word) => (row && there(run, row.id) ? el("a", { class: "button", href: address(run, "sample", { id: row.id }), title: `${word} of the group` }, sign, el("span", {}, ` ${row.id}`)) : "");
  return [
    el("h2", {}, `Sample ${record.id}`),
    el("button", { type: "button", onclick: () => openStory(run, `sample ${record.id}`) }, "its story"),
    link(all[at - 1], "←", "the one before"), link(all[at + 1], "→", "the next"),
  ];
}

function draw({ run, full, parts }) {
  parts.head.replaceChildren(...head(full, run));
  parts.facts.replaceChildren(...facts(full, run));
  parts.times.replaceChildren(...times(full));
  parts.missing.replaceChildren(...full.missing.map((line) => el("li", {}, visible(line))));
  parts.missing.hidden = !full.missing.length;
  parts.beside.replaceChildren(members(full, run), checks(full), columns(full));
}

register("sample", "Sample", {
  async show(container, run, params) {
    const id = params.id ?? "";
    if (!id) {
      container.append(el("p", { class: "problem" }, "Which sample? Choose one on the page ", el("a", { href: address(run, "samples") }, "Samples"), "."));
      return;
    }
    const mine = { run, id, params, full: null, parts: null };
    shown = mine;
    container.append(el("p", { class: "dim wait" }, `reading sample ${id} …`));
    const full = await get(of(run, "samples", id), {}, { quiet: true }).catch((problem) => {
      container.replaceChildren(el("p", { class: "problem" }, visible(problem.message)));
      throw problem;
    });
    if (shown !== mine) return;
    mine.full = full;
    mine.parts = {
      head: el("header", { class: "sample-head" }),
      facts: el("dl", { class: "facts" }),
      times: el("ol", { class: "times", "aria-label": "its times" }),
      missing: el("ul", { class: "missing" }),
      beside: el("div", { class: "beside" }),
    };
    draw(mine);
    const { head: top, facts: list, times: line, missing, beside } = mine.parts;
    container.replaceChildren(top, el("section", { class: "card" }, list, line), missing, el("div", { class: "sample-body" }, el("div", { class: "texts" }, prompt(full), answer(full, params)), beside));
  },

  hide() {
    shown = null;
  },

  async refresh() {
    const mine = shown;
    if (!mine?.full || !OPEN.includes(mine.full.record.outcome)) return;
    const full = await get(of(mine.run, "samples", mine.id), {}, { quiet: true });
    if (shown !== mine) return;
    mine.full = full;
    draw(mine);
  },
});
