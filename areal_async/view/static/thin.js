/* Fewer points for a line of very many: pure functions.

What always holds: the smallest and the largest value of each stretch stay, and gaps stay gaps, so a line looks as with
all of its points; whoever comes near enough sees each. */

export const MOST_POINTS = 2_000; // of a line: about two for each pixel of a figure

/** [first, behind the last] of what lies in the range, with a point more at each side; xs ascend. */
function within(xs, range) {
  if (!range) return [0, xs.length];
  const from = xs.findIndex((x) => x >= range[0]);
  if (from < 0) return [xs.length - 1, xs.length];
  const after = xs.findIndex((x, at) => at >= from && x > range[1]);
  return [Math.max(0, from - 1), after < 0 ? xs.length : after + 1];
}

/** Where the smallest and the largest value of a stretch are, and the first gap in it, in order. */
function extremes(ys, from, to) {
  let [low, high, gap] = [-1, -1, -1];
  for (let at = from; at < to; at += 1) {
    const y = ys[at];
    if (y === null || y === undefined) {
      if (gap < 0) gap = at;
      continue;
    }
    if (low < 0 || y < ys[low]) low = at;
    if (high < 0 || y > ys[high]) high = at;
  }
  return [...new Set([low, high, gap])].filter((at) => at >= 0).sort((a, b) => a - b);
}

/** Of a part of a line: which points are drawn. Those of a stack are the same for all of its lines. */
function chosen(ys, stacked, from, to, most) {
  const many = to - from;
  if (many <= most) return Array.from({ length: many }, (_, at) => from + at);
  const parts = Math.floor(most / 2);
  const kept = [from];
  for (let part = 0; part < parts; part += 1) {
    const [begin, end] = [from + Math.floor((part * many) / parts), from + Math.floor(((part + 1) * many) / parts)];
    kept.push(...(stacked ? [begin, begin + ((end - begin) >> 1)] : extremes(ys, begin, end)));
  }
  return [...new Set([...kept, to - 1])];
}

/** The traces of a figure with about `most` points a line in the range of its x axis, and fewer outside: those keep the y
 * axis, which fits all. */
export function thinned(traces, range, most = MOST_POINTS) {
  return traces.map((trace) => {
    const { x, y } = trace;
    if (trace.type !== "scatter" || !Array.isArray(x) || x.length <= most) return trace;
    const [from, to] = within(x, range);
    const part = (begin, end, many) => chosen(y, Boolean(trace.stackgroup), begin, end, many);
    const places = [...part(0, from, most / 4), ...part(from, to, most), ...part(to, x.length, most / 4)];
    return { ...trace, x: places.map((at) => x[at]), y: places.map((at) => y[at]) };
  });
}
