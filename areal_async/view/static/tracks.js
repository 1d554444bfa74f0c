/* The rows of the timeline: where each lane lies, what is drawn in it, and what is there at a place.

What always holds: nothing here touches the page; times are seconds of the run clock, heights are pixels from the top of
the rows; of several spans that lie over each other the one that is seen is the one that is found. */

const ROW = 22; // of a lane with one thing at a time
const SERVER_ROW = 34; // its state below, how many samples it has above
const SMALL_ROW = 16; // of servers, where there are many
const MANY_SERVERS = 24;
const SLOT_ROW = 7;
const GAP = 2; // between rows
const STATE_PART = 0.38; // of a row that also shows how many
const FEW_WORKERS = 8;
const NEAR_PX = 3; // as near as that a pointer need come
const LEAST_PX = 1; // as wide as that everything is drawn

/** Rows from top to bottom: {key, group, label, slot, state, load, slots, top, height, opens}. state, load: lane numbers
 * or null. opens: it has a button that shows the places of its group. opened: groups whose places are shown; those
 * behind the last in which there is something are left out. */
export function rowsOf(lanes, opened, index) {
  const groups = new Map();
  for (const lane of lanes) {
    if (!groups.has(lane.group)) groups.set(lane.group, []);
    groups.get(lane.group).push(lane);
  }
  const servers = [...groups.keys()].filter((group) => group.startsWith("server ")).length;
  const rows = [];
  for (const [group, members] of groups) rows.push(...groupRows(group, members, opened.has(group), servers > MANY_SERVERS, index));
  let top = 0;
  for (const row of rows) {
    row.top = top;
    top += row.height + (row.slot ? 0 : GAP);
  }
  return rows;
}

function groupRows(group, lanes, isOpen, isMany, index) {
  const states = lanes.filter((lane) => lane.kind === "state");
  const places = lanes.filter((lane) => lane.kind === "slot");
  const slots = places.slice(0, places.findLastIndex((lane) => index.spans.has(lane.lane)) + 1);
  const load = lanes.find((lane) => lane.kind === "load") ?? null;
  const row = (lane, label, more = {}) => ({ key: `${group}/${label}`, group, label, slot: false, state: lane, load: null, slots: 0, height: ROW, opens: false, ...more });
  const loaded = load && { load: load.lane, slots: load.slots, opens: true, isOpen, what: load.name };
  const rows = [];
  if (group === "rewards") {
    if (load) rows.push(row(null, "checks", { ...loaded }));
    if (isOpen || states.length <= FEW_WORKERS) rows.push(...states.map((lane) => row(lane.lane, lane.name)));
  } else {
    states.forEach((lane, at) => {
      const main = at === 0;
      const height = load && main ? (isMany ? SMALL_ROW : SERVER_ROW) : isMany ? SMALL_ROW : ROW;
      rows.push(row(lane.lane, main ? labelOf(group) : `${group} ${lane.name}`, { height, ...(main ? loaded : {}) }));
    });
  }
  rows.push(...slots.map((lane) => row(lane.lane, lane.name, { slot: true, height: SLOT_ROW })));
  return rows;
}

const labelOf = (group) => (group === "weights" ? "swaps of weights" : group);

export const heightOf = (rows) => (rows.length ? rows.at(-1).top + rows.at(-1).height : 0);

/** Of a row: where its state is drawn. */
export function statePart(row) {
  const part = row.load === null ? 1 : STATE_PART;
  const height = Math.max(3, Math.round(row.height * part));
  return { top: row.top + row.height - height, height: row.slot ? Math.max(1, height - 1) : height };
}

function loadPart(row) {
  const height = row.state === null ? row.height : row.height - statePart(row).height - 1;
  return { top: row.top, height };
}

/** What is looked up again and again of an answer: spans by lane, loads by lane. */
export function indexed(data) {
  const spans = new Map();
  for (const span of data.spans) {
    if (!spans.has(span[0])) spans.set(span[0], []);
    spans.get(span[0]).push(span);
  }
  return { spans, loads: new Map(data.loads) };
}

/** SVG paths in data coordinates, one for each kind that is there: [kind, path]; window: {begin, end, pixel} in seconds. */
export function spanPaths(rows, index, window) {
  const paths = new Map();
  for (const row of rows) {
    if (row.state === null) continue;
    const { top, height } = statePart(row);
    for (const [, from, to, kind] of index.spans.get(row.state) ?? []) {
      const begin = Math.max(from, window.begin);
      const end = Math.min(Math.max(to, from + LEAST_PX * window.pixel), window.end);
      if (end <= begin) continue;
      if (!paths.has(kind)) paths.set(kind, []);
      paths.get(kind).push(`M${begin.toFixed(6)},${top}H${end.toFixed(6)}V${top + height}H${begin.toFixed(6)}Z`);
    }
  }
  return [...paths].sort(([one], [other]) => one - other).map(([kind, parts]) => [kind, parts.join("")]);
}

/** One path: how many there are at a time, as an area in each row that tells it. A row is filled by the most that any
 * row of its kind has in what is shown. */
export function loadPath(rows, index, data) {
  const parts = [];
  const mosts = new Map();
  for (const row of rows) {
    if (row.load !== null) mosts.set(row.what, (index.loads.get(row.load) ?? []).reduce((one, other) => Math.max(one, other), mosts.get(row.what) ?? 1));
  }
  for (const row of rows) {
    const values = row.load === null ? null : index.loads.get(row.load);
    if (!values?.length) continue;
    const { top, height } = loadPart(row);
    const step = (data.end - data.begin) / values.length;
    const bottom = top + height;
    const most = mosts.get(row.what);
    const y = (value) => (value > 0 ? Math.min(bottom - 0.5, bottom - (value / most) * height) : bottom).toFixed(1);
    let path = `M${data.begin.toFixed(6)},${bottom}`;
    let before = null;
    values.forEach((value, at) => {
      const here = y(value);
      if (here === before) return;
      path += `H${(data.begin + at * step).toFixed(6)}V${here}`;
      before = here;
    });
    parts.push(`${path}H${data.end.toFixed(6)}V${bottom}Z`);
  }
  return parts.join("");
}

/** Names that fit into their spans: {at, y, text}. */
export function labels(rows, index, window, most) {
  const found = [];
  for (const row of rows) {
    if (row.state === null || row.slot) continue;
    const { top, height } = statePart(row);
    if (height < 12) continue;
    for (const [, from, to, , name, , count] of index.spans.get(row.state) ?? []) {
      const begin = Math.max(from, window.begin);
      const room = Math.floor(((Math.min(to, window.end) - begin) / window.pixel - 8) / 6.5);
      const text = name.length > room ? shortOf(name) : name;
      if (count > 1 || text.length > room) continue;
      found.push({ at: begin, y: top + height / 2, text, room });
    }
  }
  return found.sort((one, other) => other.room - one.room).slice(0, most);
}

const shortOf = (name) => name.replace(/ \(branch \d+\)/, "").replace(/^(train step|publish|checkpoint|swapping to|serving|to|group) /, "");

/** The row at this height, or null. */
export function rowAt(rows, y) {
  let low = 0;
  let high = rows.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (y < rows[middle].top) high = middle - 1;
    else if (y >= rows[middle].top + rows[middle].height + (rows[middle].slot ? 0 : GAP)) low = middle + 1;
    else return rows[middle];
  }
  return null;
}

/** What is seen there: {row, span} or {row, load: how many, at} or null. pixel: in seconds. */
export function found(rows, index, data, at, y, pixel) {
  const row = rowAt(rows, y);
  if (row === null) return null;
  const inState = row.state !== null && y >= statePart(row).top - 1;
  const span = inState ? spanAt(index.spans.get(row.state) ?? [], at, pixel) : null;
  if (span) return { row, span };
  const load = loadAt(row, index, data, at);
  return load === null || inState ? (row ? { row } : null) : { row, load, at };
}

function spanAt(spans, at, pixel) {
  const near = NEAR_PX * pixel;
  let best = null;
  let rank = -Infinity;
  for (const span of spans) {
    const away = Math.max(span[1] - at, at - span[2], 0);
    if (away > near) continue;
    const score = (away > 0 ? -1000 * (1 + away / near) : 0) + span[3];
    if (score >= rank) [best, rank] = [span, score];
  }
  return best;
}

export function loadAt(row, index, data, at) {
  const values = row.load === null ? null : index.loads.get(row.load);
  if (!values?.length || at < data.begin || at >= data.end) return null;
  return values[Math.floor(((at - data.begin) / (data.end - data.begin)) * values.length)] ?? null;
}

/** Moments for the axis, at most `most` of them, at round distances. */
export function ticks(begin, end, most) {
  const least = (end - begin) / Math.max(1, most);
  const steps = [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30,
    60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const step = steps.find((each) => each >= least) ?? Math.ceil(least / 86400) * 86400;
  const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  const values = [];
  for (let n = Math.ceil(begin / step); n * step <= end; n += 1) values.push(n * step);
  return { values, digits };
}
