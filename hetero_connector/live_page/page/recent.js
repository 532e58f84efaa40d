// What was counted in the last five minutes, in bins, by the differences of counters.

import { addAll } from "./units.js";

const BIN_S = 2;
const BINS = 150;
const FEWEST_BINS = 30;

export class Recent {
  #keys;
  #last = new Map();
  #bins = new Map();

  constructor(keys) {
    this.#keys = keys;
  }

  // Take the counters of a process as they are now. It counts from the second time on.
  add(process, now, counters) {
    const before = this.#last.get(process);
    this.#last.set(process, counters);
    if (!before) return;
    const bin = this.#bin(Math.floor(now / BIN_S));
    for (const key of this.#keys) bin[key] += (counters[key] ?? 0) - (before[key] ?? 0);
    const oldest = Math.max(...this.#bins.keys()) - BINS;
    for (const at of this.#bins.keys()) if (at < oldest) this.#bins.delete(at);
  }

  // [times, what was counted in a second by each key], for a chart.
  series(now, keys) {
    const last = Math.floor(now / BIN_S);
    const length = Math.max(FEWEST_BINS, Math.min(BINS, last - Math.min(last, ...this.#bins.keys()) + 1));
    const bins = Array.from({ length }, (_, i) => last - length + 1 + i);
    const rate = (key) => bins.map((at) => Math.max(0, this.#bins.get(at)?.[key] ?? 0) / BIN_S);
    return [bins.map((at) => at * BIN_S), ...keys.map(rate)];
  }

  totals() {
    const totals = Object.fromEntries(this.#keys.map((key) => [key, 0]));
    for (const bin of this.#bins.values()) addAll(totals, bin);
    return totals;
  }

  #bin(at) {
    if (!this.#bins.has(at)) this.#bins.set(at, Object.fromEntries(this.#keys.map((key) => [key, 0])));
    return this.#bins.get(at);
  }
}
