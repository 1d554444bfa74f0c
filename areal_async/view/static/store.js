/* What is known of a run: the newest `Overview`, and all rows of metrics.jsonl that came so far.

What always holds: one question at a time a run, which asks only for what is new; rows are in the order of the file. */

import { embedded, get, isLive, of } from "./common.js";

const MANY_ROWS = 100; // more may lie behind an answer with so many

class RunData {
  constructor(key) {
    this.key = key;
    this.rows = [];
    this.latest = null;
    this.next = 0;
    this.asking = null;
  }

  /** Asks for what is new; those who ask meanwhile share the answer. */
  update(options = {}) {
    this.asking ??= this.#ask(options).finally(() => (this.asking = null));
    return this.asking;
  }

  async #ask(options) {
    if (embedded && this.latest) return this;
    let answer = await get(of(this.key, "overview"), { since: this.next }, options);
    if (answer.next < this.next || (this.next > 0 && answer.file !== this.latest?.file)) {
      // Another file: another run has taken this folder's name.
      this.rows = [];
      answer = await get(of(this.key, "overview"), { since: 0 }, options);
    }
    for (;;) {
      this.rows.push(...answer.rows);
      this.next = answer.next;
      if (embedded || answer.rows.length < MANY_ROWS) break;
      answer = await get(of(this.key, "overview"), { since: this.next }, options); // an answer has an end
    }
    this.latest = answer;
    return this;
  }

  /** Whether more may come. */
  get live() {
    return !embedded && (this.latest === null || isLive(this.latest.run.state) || !this.latest.reading.done);
  }
}

const known = new Map();

/** The one `RunData` of this run. */
export function runData(key) {
  if (!known.has(key)) known.set(key, new RunData(key));
  return known.get(key);
}
