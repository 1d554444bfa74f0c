/* What the timeline says of a span, in words, and where it leads. */

import { address, clock, duration, el, number } from "./common.js";

/** Names of a run are no markup: Plotly takes some tags for its own. */
export const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

/** What a hover says. */
export function about({ row, span, load, at }, kinds) {
  if (load !== undefined) return `${row.group}: ${number(load, 3)} ${row.what} at ${clock(at, 1)}; at most ${row.slots} at a time`;
  if (!span) return "";
  const [, begin, end, kind, name, , count] = span;
  const when = `${clock(begin, 3)} to ${clock(end, 3)}`;
  if (count > 1) return `${number(count)} spans, mostly ${kinds[kind]}, each shorter than a pixel; ${when}; a click comes nearer`;
  return `${name.startsWith(kinds[kind]) ? name : `${kinds[kind]}: ${name}`}, ${duration(end - begin)}; ${when}`;
}

export function links(run, thing) {
  const [group] = thing.split(".");
  const step = thing.match(/^step (\d+)$/)?.[1];
  const link = (page, params, text) => el("a", { href: address(run, page, params) }, text);
  if (step) return [link("samples", { step }, `samples of step ${step}`)];
  if (/^\d+\.\d+$/.test(thing)) return [link("sample", { id: thing }, `sample ${thing}`), link("samples", { group }, `its group ${group}`)];
  if (/^\d+$/.test(thing)) return [link("samples", { group }, `samples of group ${group}`)];
  return [link("peers", {}, "servers and workers")];
}
