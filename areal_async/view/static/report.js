/* What is only in an exported file: where it comes from, and the answers that a server would work out.

What always holds: it is in exported files alone, and loaded there before the page (bundle.py); what a question leaves is
chosen among what the file has, and nothing else is told. */

import { address, bytes, computed, date, el, embedded, of, prose, register, visible } from "./common.js";

const report = embedded["/report"];

// --------------------------------------------------------------------------------------------------------- answers

/** Tokens by lag of the steps from … to - 1. */
function lags({ from, to }) {
  const tokens = {};
  let unknown = 0;
  for (const [step, counts, unread] of report.lags) {
    if (step < from || step >= to) continue;
    for (const [lag, many] of Object.entries(counts)) tokens[lag] = (tokens[lag] ?? 0) + many;
    unknown += unread;
  }
  return { tokens, eta: report.eta, unknown };
}

const within = (value, least, most) => (least === undefined || (value !== null && value >= Number(least))) && (most === undefined || (value !== null && value <= Number(most)));

function fits(row, asked) {
  const { step, verdict, outcome, server, group, version, truncated, text } = asked;
  if (step !== undefined && row.step !== Number(step)) return false;
  if (group !== undefined && row.group !== Number(group)) return false;
  if (verdict !== undefined && row.verdict !== verdict) return false;
  if (outcome !== undefined && row.outcome !== outcome) return false;
  if (server !== undefined && row.server !== server) return false;
  if (truncated !== undefined && row.truncated !== (String(truncated) === "true")) return false;
  if (!within(row.reward, asked.reward_min, asked.reward_max) || !within(row.lag, asked.lag_min, asked.lag_max)) return false;
  if (!within(row.length, asked.length_min, asked.length_max) || !within(row.versions, asked.versions_min)) return false;
  const full = embedded[of(report.key, "samples", row.id)];
  const { prompt, response, versions, oldest, newest } = full.record;
  if (version !== undefined && !(versions ?? [oldest, newest]).includes(Number(version))) return false;
  return text === undefined || `${prompt ?? ""}\n${response ?? ""}`.toLowerCase().includes(text.toLowerCase());
}

/** The samples of this file that the filters leave. */
function samples(params) {
  const asked = Object.fromEntries(Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const begun = performance.now();
  const way = String(asked.descending) === "false" ? 1 : -1;
  const by = asked.sort ?? "at";
  const left = report.rows.filter((row) => fits(row, asked));
  left.sort(({ [by]: a }, { [by]: b }) => (a === null ? 1 : b === null ? -1 : way * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b)));
  const offset = Number(asked.offset ?? 0);
  const rows = left.slice(offset, offset + Number(asked.limit ?? left.length));
  return { rows, total: left.length, took_ms: performance.now() - begun, missing: report.missing, reading: embedded[of(report.key, "overview")].reading };
}

computed.set(of(report.key, "lags"), lags);
computed.set(of(report.key, "samples"), samples);

// ------------------------------------------------------------------------------------------------------------ page

const card = (title, ...children) => el("section", { class: "card" }, el("h2", {}, title), ...children);

function facts(pairs) {
  return el("table", { class: "facts-table" }, el("tbody", {}, pairs.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, visible(value))))));
}

function chosen() {
  const line = ({ id, why }) => el("tr", {}, el("td", {}, el("a", { href: address(report.key, "sample", { id }) }, id)), el("td", {}, why));
  const left = report.left_out.length
    ? el("p", { class: "note problem" }, `Left out, since the file would be too large: ${report.left_out.join(", ")}.`)
    : null;
  return card(`Samples in this file (${report.chosen.length} of ${report.samples.toLocaleString("en")})`,
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "sample"), el("th", {}, "why it is here"))), el("tbody", {}, report.chosen.map(line)))),
    left);
}

register("report", "About this file", {
  show(container) {
    const lives = report.lives.map(({ at, facts: told }) => [el("h3", {}, at), facts(told)]);
    container.append(
      card("This file", el("p", {}, "A run of areal-async as it was when this file was written, at ", date(report.written), ". It asks no network for anything. "),
        el("p", {}, prose("The whole run, with its timeline and all samples: "), el("code", {}, report.command), "; whether it kept its promises: ", el("code", {}, report.audit)),
        facts([["run folder", report.folder], ["its log", `${bytes(report.log_bytes)}, ${report.samples.toLocaleString("en")} samples`]])),
      card("What the run was made with", lives.length ? lives : el("p", { class: "dim" }, "its log doesn't say"), report.versions_note ? el("p", { class: "note dim" }, report.versions_note) : null),
      card("What wrote this file", facts(report.here)),
      chosen(),
    );
  },
});
