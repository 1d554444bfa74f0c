/* What Plotly is given for each kind of figure: {traces, layout, keys, x, note}. keys: for the card's legend. note: what
isn't drawn, in words.

What always holds: one run has a colour a series; several runs have a colour and a dash a run, and the first series is
the thickest; what was smoothed lies on its faint raw line, and hover tells the raw values. */

import { DASHES, count, duration } from "./common.js";
import { busyParts, evaluated, evaluationRows, expand, isEvaluation, reader, smoothed } from "./lines.js";

const SINCE = "vh"; // by time, what is told of a step's time holds since the step before
const FEW = 80; // points of which each is marked
const PRESSED = 4; // times as long as all others: a first step that would press them flat
const ENOUGH_STEPS = 5; // to say so
export const BUSY = [
  { label: "both", colour: "--busy-both" },
  { label: "only the trainer", colour: "--busy-trainer" },
  { label: "only servers", colour: "--busy-servers" },
  { label: "nobody", colour: "--busy-nobody" },
];

/** A name in a figure: Plotly takes tags for markup. */
const plain = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const tone = (at) => `--series-${(at % 7) + 1}`;
/** Values of x for rows, and what stands at the axis. */
function axisOf(board) {
  const [unit, name] = board.timeUnit;
  return board.byTime ? [(row) => row.time_s / unit, `run clock, ${name}`] : [(row) => row.step, "step"];
}

/** Rows with null where a step is missing, so that the line has a gap. */
function withGaps(rows) {
  return rows.flatMap((row, at) => (at > 0 && row.step - rows[at - 1].step > 1 ? [null, row] : [row]));
}

export function lines(board, figure) {
  const [xOf, x] = axisOf(board);
  const traces = [];
  const keys = [];
  for (const one of board.data) {
    const series = expand(figure.series, figure.series.some(({ field }) => isEvaluation(field)) ? evaluationRows(one.evaluations) : one.rows);
    series.forEach((wanted, at) => {
      const look = board.overlay
        ? { colour: tone(one.at), dash: DASHES[one.at % DASHES.length], width: at === 0 ? 2 : 1 }
        : { colour: tone(at), dash: "solid", width: 2 };
      const name = board.overlay ? [one.run.key, series.length > 1 ? wanted.label : ""].join(" ").trim() : wanted.label;
      const value = isEvaluation(wanted.field)
        ? points(board, one, wanted, { ...look, name, xOf }, traces)
        : curve(board, figure, one, wanted, { ...look, name, xOf }, traces);
      if (value === undefined || (board.overlay && at > 0)) return;
      keys.push({ ...look, label: name, short: board.overlay, value, dash: isEvaluation(wanted.field) ? "dot" : look.dash, block: wanted.stacked });
    });
  }
  if (figure.unit === "s" && !figure.log) return { traces, keys, x, ...withoutStart(board.data, figure.series) };
  if (figure.key !== "lag" || board.eta === undefined || !traces.length) return { traces, keys, x, layout: {} };
  return { traces, keys: [...keys, bound(board.eta)], x, layout: { shapes: [{ ...BOUND, xref: "paper", x0: 0, x1: 1, y0: board.eta, y1: board.eta }] } };
}

/** The first step waits until the engines have started. Where that would press all others flat, it lies above what is
 * drawn. */
function withoutStart(data, series) {
  const most = (rows) => rows.reduce((all, row) => series.map(reader).reduce((one, read) => Math.max(one, read(row) ?? 0), all), 0);
  const first = most(data.flatMap(({ rows }) => rows.slice(0, 1)));
  const others = most(data.flatMap(({ rows }) => rows.slice(1)));
  const steps = Math.max(...data.map(({ rows }) => rows.length));
  if (steps < ENOUGH_STEPS || !(others > 0) || first < PRESSED * others) return { layout: {} };
  const note = `The first step, in which the engines start, lies above what is drawn (${duration(first)}).`;
  return { layout: { yaxis: { range: [0, 1.05 * others] } }, note };
}

/** The line of a series; its newest value, undefined if there is nothing at all. */
function curve(board, figure, { kept, abandoned }, wanted, { colour, dash, width, name, xOf }, traces) {
  const read = reader(wanted);
  const valueOf = (row) => {
    const value = row === null ? null : read(row);
    return figure.log && value !== null && value <= 0 ? null : value;
  };
  const rows = withGaps(kept);
  const raw = rows.map(valueOf);
  if (raw.every((value) => value === null)) return undefined;
  const x = rows.map((row, at) => (row === null ? xOf(rows[at - 1]) : xOf(row)));
  const base = { type: "scatter", x, connectgaps: false, name: plain(name) };
  const shape = board.byTime && (wanted.stacked || wanted.per || figure.unit === "s") ? SINCE : "linear";
  const marked = (raw.length <= FEW && !board.overlay) || raw.length === 1 || raw.includes(null) ? "lines+markers" : "lines";
  if (wanted.stacked) {
    traces.push({ ...base, y: smoothed(raw, board.smoothing), mode: "lines", stackgroup: "all", line: { color: colour, width: 0.5, shape }, fillcolor: colour });
    return raw.at(-1);
  }
  for (const part of abandoned) {
    traces.push({ ...base, x: part.map(xOf), y: part.map(valueOf), mode: "lines", name: `${plain(name)}, abandoned`, opacity: 0.5, line: { color: colour, width: 1.5, dash: "dot" } });
  }
  const soft = board.smoothing > 0;
  const even = figure.log ? inLog(raw, board.smoothing) : smoothed(raw, board.smoothing);
  traces.push({ ...base, y: raw, mode: soft ? "lines" : marked, opacity: soft ? 0.25 : 1, marker: { size: 4, color: colour }, line: { color: colour, width: soft ? 1 : width, dash, shape } });
  if (soft) traces.push({ ...base, y: even, mode: raw.includes(null) ? marked : "lines", hoverinfo: "skip", marker: { size: 4, color: colour }, line: { color: colour, width, dash, shape } });
  return raw.at(-1);
}

/** On a logarithmic axis the smoothed line is that of the logarithms. */
function inLog(values, weight) {
  return smoothed(values.map((value) => (value === null ? null : Math.log(value))), weight).map((value) => (value === null ? null : Math.exp(value)));
}

/** The points of evaluations. */
function points(board, { evaluations }, wanted, { colour, width, name, xOf }, traces) {
  const known = evaluated(wanted.field, evaluations).filter(({ value }) => value !== null);
  if (!known.length) return undefined;
  traces.push({
    type: "scatter", mode: "lines+markers", name: plain(name), x: known.map(xOf), y: known.map(({ value }) => value),
    marker: { size: 7, symbol: "diamond", color: colour }, line: { color: colour, width: Math.min(width, 1), dash: "dot" },
  });
  return known.at(-1).value;
}

/** What may not be crossed, unless `when_older` is `train`. */
const BOUND = { type: "line", line: { color: "--dim", width: 1.5, dash: "dash" } };
const bound = (eta) => ({ label: `η = ${eta}`, colour: "--dim", dash: "dash", width: 1.5 });

/** Who was busy: four areas up to 100 %; by time their sizes are true. */
export function busy(board) {
  const [xOf, x] = axisOf(board);
  const [first, ...others] = board.data[0].kept;
  if (!first) return { traces: [], keys: [], x, layout: {} };
  // By time the first step has a beginning, too.
  const kept = board.byTime ? [{ ...first, time_s: Math.max(0, first.time_s - first.step_s) }, first, ...others] : [first, ...others];
  const parts = kept.map(busyParts);
  const traces = BUSY.map(({ label, colour }, at) => ({
    type: "scatter", mode: "lines", stackgroup: "all", name: label, x: kept.map(xOf),
    y: smoothed(parts.map((all) => all?.[at] ?? null), board.smoothing), line: { width: 0, shape: board.byTime ? SINCE : "linear" }, fillcolor: colour,
    marker: { color: colour },
  }));
  const keys = BUSY.map(({ label, colour }, at) => ({ label, colour, block: true, value: parts.at(-1)?.[at] }));
  return { traces, keys, x, layout: {} };
}

/** How old trained tokens were. */
export async function lags(board) {
  const answers = await Promise.all(board.data.map((one) => board.lags(one)));
  const traces = [];
  const keys = [];
  let [most, eta] = [0, null];
  board.data.forEach(({ run, at }, index) => {
    const answer = answers[index];
    const tokens = Object.entries(answer?.tokens ?? {}).map(([lag, many]) => [Number(lag), many]).sort(([a], [b]) => a - b);
    const all = tokens.reduce((sum, [, many]) => sum + many, 0);
    if (!all) {
      if (answer?.unknown) keys.push({ label: `of ${count(answer.unknown)} tokens it isn't known`, colour: "--dim", block: true });
      return;
    }
    eta = answer.eta;
    most = Math.max(most, tokens.at(-1)[0]);
    const colours = tokens.map(([lag]) => (board.overlay ? tone(at) : lag > answer.eta ? "--series-2" : "--series-1"));
    traces.push({
      type: "bar", name: plain(run.key), x: tokens.map(([lag]) => lag), y: tokens.map(([, many]) => many / all),
      marker: { color: colours }, customdata: tokens.map(([, many]) => count(many)),
      hovertemplate: "lag %{x}: %{y:.2%}, %{customdata} tokens<extra></extra>",
    });
    keys.push({ label: board.overlay ? run.key : `of ${count(all)} tokens${answer.unknown ? `, of ${count(answer.unknown)} more it isn't known` : ""}`, short: board.overlay, colour: tone(at), block: true });
  });
  if (!traces.length) return { traces, keys, x: "lag, steps", layout: {} };
  const last = Math.max(most, eta);
  const xaxis = { categories: true, range: [-0.6, last + 0.6], title: "lag, steps", ...(last <= 16 ? { dtick: 1 } : {}) };
  const layout = { xaxis, hovermode: "closest", bargap: 0.15 };
  if (board.overlay) return { traces, keys, x: "lag, steps", layout };
  const shapes = [{ ...BOUND, yref: "paper", y0: 0, y1: 1, x0: eta + 0.5, x1: eta + 0.5 }];
  return { traces, keys: [...keys, bound(eta)], x: "lag, steps", layout: { ...layout, shapes } };
}
