/* The top of the overview: what a person needs first at 2 a.m.

What always holds: what is drawn adds up, and says so: the four shares of time to 100 %, the ledger to all that was
admitted; if it doesn't, that is told as an error. */

import { clock, count, duration, el, has, isLive, number, of, openStory, percent, prose, visible } from "./common.js";
import { swatch } from "./board.js";
import { branches, busyOf } from "./lines.js";
import { BUSY } from "./traces.js";

const RECENT_STEPS = 10;
const TROUBLES_SHOWN = 6;
const SAME_S = 1e-3; // moments that differ by less are one

const sum = (values) => values.reduce((all, value) => all + value, 0);
const card = (title, ...children) => el("section", { class: "card" }, el("h2", {}, title), ...children);

/** Fills `container` anew. data: a RunData. eta: `max_staleness`, or null while it isn't known. */
export function drawNow(container, data, eta) {
  const { latest } = data;
  const { kept } = branches(data.rows, latest);
  const problems = [latest.run.problem, latest.reading.problem, ...latest.problems].filter(Boolean);
  const focused = [...container.querySelectorAll("button")].indexOf(document.activeElement);
  container.replaceChildren(
    ...problems.map((text) => el("p", { class: "problem wide" }, visible(text))),
    tiles(latest, kept, eta),
    el("div", { class: "column" }, waits(latest), balance(latest.balance)),
    el("div", { class: "column" }, busyBar(kept), troubles(data.key, latest.troubles, container)),
  );
  if (focused >= 0) container.querySelectorAll("button")[focused]?.focus();
}

function tile(name, value, ...below) {
  return el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value, el("small", {}, ...below)));
}

const steps = (many) => `${number(many)} step${many === 1 ? "" : "s"}`;

function tiles({ run, evaluations, in_flight: inFlight, ready, phase }, kept, eta) {
  const last = kept.at(-1);
  const recent = kept.slice(-RECENT_STEPS);
  const seconds = sum(recent.map((row) => row.step_s));
  const evaluation = evaluations.at(-1);
  const rate = (name) => (seconds > 0 ? sum(recent.map((row) => row[name])) / seconds : null);
  const left = run.steps && recent.length ? (run.steps - run.version) * (seconds / recent.length) : null;
  const skipped = kept.filter((row) => row.skipped).length;
  const over = recent.length === 0 ? "after the first step" : recent.length === 1 ? "of one step" : `mean of the last ${recent.length} steps`;
  const live = isLive(run.state);
  return el("dl", { class: "card tiles" },
    tile("reward", number(last?.reward_mean, 3), last ? `mean of step ${last.step}; ` : "", evaluation ? `evaluation ${number(evaluation.score, 3)} at version ${evaluation.version}` : "no evaluation so far"),
    tile("lag", last ? steps(last.lag_max) : number(null), last ? `the oldest token of step ${last.step}; mean ${number(last.lag_mean, 3)}` : "", eta === null ? "" : `${last ? "; " : ""}bound η = ${eta}`, last && eta !== null && last.lag_max > eta ? el("span", { class: "problem" }, " – over it") : null),
    tile("generated", count(rate("tokens_generated")), `tokens/s; ${over}`),
    tile("trained", count(rate("tokens_trained")), `tokens/s; ${over}`),
    tile("step time", duration(recent.length ? seconds / recent.length : null), over, live && left ? `; about ${duration(left < 60 ? Math.ceil(left) : left)} left` : ""),
    live
      ? tile("under way", `${number(inFlight)} samples`, `${number(ready)} groups ready to be trained`)
      : tile("took", duration(run.seconds), run.end ? run.end.replaceAll("_", " ") : "no end is told"),
    skipped ? tile("updates skipped", el("span", { class: "problem" }, number(skipped)), kept.findLast((row) => row.skipped).skipped) : null,
    phase && live ? tile("besides", phase) : null);
}

/** "step 4 waits for 2 more ready groups: group 1 (…) <- sample 1.3 on server 0, for 1 s, group 3 …" in short lines. */
export function shortLines(text) {
  const [head, ...rest] = text.split(/: (?=group |sample |server |a |the |check)/);
  const parts = rest.join(": ").split(/, (?=group \d)/);
  return [head, ...parts.filter(Boolean)].map((line) => line.replaceAll("<-", "←"));
}

function waits({ run, waits: lines, phase }) {
  const all = lines.flatMap(shortLines).map((line) => line.replace("steps_done", "all steps are done"));
  const title = isLive(run.state) ? "What is waited for now" : "How it ended";
  const none = phase ? `nothing is waited for; the run is ${phase}` : "nothing is known of it";
  const words = all.some((line) => line.includes("(floor ")) && el("p", { class: "note dim" }, "floor: no token of the group may be of an older version; deadline: the last step that may train it.");
  return card(title, el("ol", { class: "waits" }, (all.length ? all : [none]).map((line) => el("li", {}, visible(line)))), words);
}

function splitBar(label, shares, about) {
  const parts = shares.map(({ share, colour, label: name }) => el("span", { title: `${name}: ${percent(share)}`, style: { "flex": `${share} 1 0`, "background": `var(${colour})` } }));
  return el("div", { class: "split-row" }, el("span", { class: "dim" }, label), el("div", { class: "split", role: "img", "aria-label": about }, parts.filter((_, at) => shares[at].share > 0)));
}

function busyBar(kept) {
  const recent = busyOf(kept.slice(-RECENT_STEPS));
  const all = busyOf(kept);
  if (recent === null || all === null) return card("Who was busy", el("p", { class: "dim" }, "told after the first step"));
  const bar = (label, { shares }) => splitBar(label, BUSY.map((part, at) => ({ ...part, share: shares[at] })), BUSY.map((part, at) => `${part.label} ${percent(shares[at])}`).join(", "));
  const whole = Math.abs(recent.sum - 1) < 1e-6 && Math.abs(all.sum - 1) < 1e-6;
  const shown = rounded(recent.shares);
  return card("Who was busy",
    bar(kept.length > RECENT_STEPS ? `last ${RECENT_STEPS} steps` : "all steps", recent),
    kept.length > RECENT_STEPS ? bar("all steps", all) : null,
    el("div", { class: "parts" }, BUSY.map(({ label, colour }, at) => el("span", { class: "key" }, swatch(colour, "solid", 2, true), label, " ", el("strong", {}, `${shown[at]} %`)))),
    el("p", { class: whole ? "note dim" : "note problem" },
      whole ? `${shown.join(" + ")} = 100 % of ${duration(recent.seconds)}. ` : `These shares don't add up to 100 % (${percent(recent.sum, 3)}): the rows are damaged. `,
      prose("Shares of wall time (`step_s`), mean over servers. The trainer is busy while it trains or publishes; a server while it has something to generate, and not while it stands still for new weights or isn't there.")));
}

/** Percents with one decimal that add up to exactly 100.0: what rounding takes goes to those that it took most from. */
export function rounded(shares) {
  const tenths = shares.map((share) => Math.floor(share * 1000 + 1e-9));
  const missing = 1000 - sum(tenths);
  const byRest = shares.map((share, at) => [share * 1000 - tenths[at], at]).sort(([a], [b]) => b - a);
  for (const [, at] of byRest.slice(0, Math.max(0, missing))) tenths[at] += 1;
  return tenths.map((tenth) => (tenth / 10).toFixed(1));
}

const BALANCE = [
  ["trained", "--series-1", "their step is done"],
  ["training", "--series-6", "handed to the trainer"],
  ["outstanding", "--series-7", "asked for, running, being checked or ready"],
  ["filtered", "--series-3", "all members had the same reward, or too many or too few were right"],
  ["stale", "--series-4", "too old: dropped"],
  ["failed", "--series-2", "given up after errors"],
  ["cancelled", "--series-5", "stopped, after a rollback or at the end"],
];

function balance(all) {
  if (!all || !all.admitted) return card("The ledger", el("p", { class: "dim" }, "nothing was admitted so far"));
  const things = [["groups", ""], ["samples", "samples_"]];
  const missing = things.map(([name, prefix]) => [name, all[`${prefix}admitted`] - sum(BALANCE.map(([state]) => all[prefix + state] ?? 0))]).filter(([, many]) => many !== 0);
  const bar = ([name, prefix]) => splitBar(name,
    BALANCE.map(([state, colour]) => ({ label: `${number(all[prefix + state] ?? 0)} ${state}`, colour, share: (all[prefix + state] ?? 0) / Math.max(1, all[`${prefix}admitted`]) })),
    `${name}: ${BALANCE.map(([state]) => `${all[prefix + state] ?? 0} ${state}`).join(", ")}`);
  const row = ([state, colour, about]) => el("tr", { title: about },
    el("td", {}, swatch(colour, "solid", 2, true), state),
    things.map(([, prefix]) => el("td", { class: "number" }, number(all[prefix + state] ?? 0))),
    el("td", { class: "dim note about" }, about));
  const told = missing.length
    ? el("p", { class: "note problem" }, `This doesn't add up: ${missing.map(([name, many]) => `${many} ${name} are unaccounted for`).join(", ")}. areal-async audit tells more.`)
    : el("p", { class: "note dim" }, "What became of all groups and samples that were admitted. Each is in exactly one line: nothing is lost.");
  return card("The ledger", things.map(bar), told,
    el("div", { class: "scroll" }, el("table", { class: "balance" },
      el("thead", {}, el("tr", {}, el("th", {}, ""), el("th", { class: "number" }, "groups"), el("th", { class: "number" }, "samples"), el("th", { class: "about" }, ""))),
      el("tbody", {}, BALANCE.filter(([state]) => all[state] || all[`samples_${state}`] || state === "trained" || state === "outstanding").map(row)),
      el("tfoot", {}, el("tr", {}, el("td", {}, "admitted"), things.map(([, prefix]) => el("td", { class: "number" }, number(all[`${prefix}admitted`]))), el("td", { class: "dim note about" }, "the sum"))))));
}

/** The story of a thing, at this moment of it. */
async function tell(run, thing, at) {
  await openStory(run, thing);
  const line = [...document.querySelectorAll("#panel tr[data-at]")].find((row) => Number(row.dataset.at) >= at - SAME_S);
  line?.classList.add("here");
  line?.scrollIntoView({ block: "center" });
}

function troubles(run, all, container) {
  const showAll = container.dataset.allTroubles === "yes";
  const newest = [...all].reverse();
  const shown = showAll ? newest : newest.slice(0, TROUBLES_SHOWN);
  const more = () => {
    container.dataset.allTroubles = "yes";
    container.dispatchEvent(new Event("again"));
  };
  const line = ({ at, what, thing, text }) => el("li", {},
    el("span", { class: "dim number" }, clock(at, 1)),
    el("span", {}, thing && has(of(run, "story"), { id: thing })
      ? el("button", { type: "button", class: "link", onclick: () => tell(run, thing, at), title: `the story of ${thing}` }, what.replaceAll("_", " "))
      : what.replaceAll("_", " ")),
    el("span", { class: "text", title: text }, visible(text)));
  return card(all.length ? `What went wrong (${all.length})` : "What went wrong",
    all.length ? el("ol", { class: "troubles" }, shown.map(line)) : el("p", { class: "dim" }, "nothing so far"),
    shown.length < all.length ? el("button", { type: "button", class: "link", onclick: more }, `show all ${all.length}`) : null);
}
