/* From rows of metrics.jsonl to lines: pure functions.

What always holds: a row that a later one of the same step replaces is of an abandoned branch; what isn't known (null, a
field that an older release hadn't) is a gap, never 0 and never the value before. */

/** {kept: rows by step, abandoned: [rows …]}: each abandoned part begins with the last row before it that was kept.
 * latest: the `Overview`; training may have gone back without a new row yet. */
export function branches(rows, latest = null) {
  const kept = [];
  const abandoned = [];
  const giveUp = (step) => {
    let from = kept.length;
    while (from > 0 && kept[from - 1].step >= step) from -= 1;
    const part = kept.splice(from);
    if (part.length) abandoned.push(from > 0 ? [kept[from - 1], ...part] : part);
  };
  for (const row of rows) {
    giveUp(row.step);
    kept.push(row);
  }
  if (latest && kept.length && latest.branch > kept.at(-1).branch) giveUp(latest.run.version);
  return { kept, abandoned };
}

const finite = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

// Numbers that say nothing where another field is 0: the largest of no tokens.
const ONLY_WHERE = { mismatch_max: "mismatch_tokens", reward_mean: "samples" };
// Fields whose entries are counts: one that is missing in a row is 0 there.
const COUNTED = new Set(["verdicts", "ledger"]);

/** [name, entry]: "verdicts/right"; an entry may have a "/" of its own. */
function parted(field) {
  const at = field.indexOf("/");
  return at < 0 ? [field, undefined] : [field.slice(0, at), field.slice(at + 1)];
}

/** A function from row to value, or null. series: as in api.Series, without "*". */
export function reader({ field, per }) {
  const [name, entry] = parted(field);
  return (row) => {
    if (name in ONLY_WHERE && row[ONLY_WHERE[name]] === 0) return null;
    let value = row[name];
    if (entry !== undefined) value = value?.[entry] ?? (value && COUNTED.has(name) ? 0 : null);
    value = finite(value);
    if (value === null || !per) return value;
    return row[per] > 0 ? value / row[per] : null;
  };
}

const ORDER = ["right", "given", "wrong", "no_answer", "timeout", "crash", "bad_data", "infrastructure"];

/** The series of a figure for these rows: "verdicts/*" becomes one for each entry that any row has. */
export function expand(series, rows) {
  return series.flatMap((one) => {
    if (!one.field.endsWith("/*")) return [one];
    const name = one.field.slice(0, -2);
    const entries = new Set(rows.flatMap((row) => Object.keys(row[name] ?? {})));
    const rank = (entry) => (ORDER.includes(entry) ? ORDER.indexOf(entry) : ORDER.length);
    return [...entries]
      .sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }))
      .map((entry) => ({ ...one, field: `${name}/${entry}`, label: one.label + entryLabel(name, entry) }));
  });
}

const entryLabel = (name, entry) => (name === "lost_by_length" ? String(Number(entry) + 1) : entry.replaceAll("_", " "));

/** Exponential smoothing, weight in 0 … 1 of what was before; the beginning isn't drawn towards 0. Gaps stay gaps. */
export function smoothed(values, weight) {
  if (weight <= 0) return values;
  let sum = 0;
  let all = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    all = weight * all + (1 - weight);
    return sum / all;
  });
}

/** Both, only the trainer, only servers, nobody: shares of a row's time that add up to 1; null if one isn't known. As
 * figures.busy_parts. */
export function busyParts({ trainer_idle_share: trainerIdle, rollout_idle_share: rolloutIdle, both_busy_share: both }) {
  if ([trainerIdle, rolloutIdle, both].some((share) => finite(share) === null)) return null;
  const trainer = 1 - trainerIdle - both;
  const rollout = 1 - rolloutIdle - both;
  return [both, trainer, rollout, 1 - both - trainer - rollout].map((part) => Math.max(0, part));
}

/** The same over several rows, weighted by their time; null if nothing is known. */
export function busyOf(rows) {
  const sums = [0, 0, 0, 0];
  let seconds = 0;
  for (const row of rows) {
    const parts = busyParts(row);
    if (parts === null || !(row.step_s > 0)) continue;
    parts.forEach((part, at) => (sums[at] += part * row.step_s));
    seconds += row.step_s;
  }
  return seconds > 0 ? { shares: sums.map((sum) => sum / seconds), seconds, sum: sums.reduce((a, b) => a + b, 0) / seconds } : null;
}

/** Unit of the time axis for so many seconds: [seconds of a unit, its name]. */
export function timeUnit(seconds) {
  if (seconds < 300) return [1, "s"];
  return seconds < 3 * 3600 ? [60, "min"] : [3600, "h"];
}

/** Values of an evaluation's series: [{step, time_s, value}]. */
export function evaluated(field, evaluations) {
  const [, k] = parted(field);
  return evaluations.map((one) => ({
    step: one.version,
    time_s: one.time_s,
    value: finite(k === undefined ? one.score : one.pass_at?.[k]),
  }));
}

export const isEvaluation = (field) => field.startsWith("eval_");

/** Whether there is anything to see: a value, and one that isn't 0. */
export function says(figure, rows, evaluations) {
  return expand(figure.series, figure.series.some((one) => isEvaluation(one.field)) ? evaluationRows(evaluations) : rows).some((one) => {
    if (isEvaluation(one.field)) return evaluated(one.field, evaluations).some(({ value }) => value !== null);
    const read = reader(one);
    return rows.some((row) => read(row));
  });
}

/** For `expand`: rows that have the entries of evaluations. */
export function evaluationRows(evaluations) {
  return evaluations.map((one) => ({ eval_pass_at: one.pass_at }));
}
