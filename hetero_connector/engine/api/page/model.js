// What the page shows of all engines, or of one: plain values, no document.

export const SOURCES = [
  ["engine_cache", "HBM", "--hbm"],
  ["dram", "DRAM", "--dram"],
  ["ssd", "SSD", "--ssd"],
  ["peer", "Peer", "--peer"],
  ["computed", "Computed", "--computed"],
].map(([key, name, color]) => ({ key, name, color }));

const BIN_S = 2;
const BINS = 150;
const FEWEST_BINS = 30;

// One value for several engines: tokens, tiers and counts add up, and a part works if it does everywhere.
export function merge(engines) {
  const tokens = {}, tiers = {}, counts = {}, health = {};
  for (const one of engines) {
    addAll(tokens, one.tokens);
    for (const tier of one.tiers) {
      const all = (tiers[tier.tier] ??= { tier: tier.tier, capacity_bytes: 0, artifacts: {}, bytes: {}, max_artifacts: {} });
      all.capacity_bytes += tier.capacity_bytes;
      for (const name of ["artifacts", "bytes", "max_artifacts"]) addAll(all[name], tier[name]);
    }
    for (const [name, rows] of Object.entries(one.counts)) (counts[name] ??= []).push(...rows);
    for (const [name, value] of Object.entries(one.health)) {
      if (typeof value === "number") health[name] = (health[name] ?? 0) + value;
      else health[name] = health[name] === undefined || health[name] === null ? value : health[name] && value !== false;
    }
  }
  return {
    tokens,
    tiers: Object.values(tiers),
    counts: splitFailures(counts),
    health,
    draining: engines.some((x) => x.activity.draining),
    now: Math.max(...engines.map((x) => x.now)),
    sessions: engines.flatMap((x) => x.sessions),
    decisions: engines.flatMap((x) => x.decisions).sort((a, b) => b.time - a.time),
  };
}

export const sum = (values) => values.reduce((a, b) => a + b, 0);

export const total = (counts, name) => sum((counts[name] ?? []).map((x) => x.count));

// Causes of a failed load that a tier which is too small or too slow explains, too.
const PRESSURE = new Set(["gone", "no_slot", "congested", "reused", "closed"]);

// The counts of failures with the failed loads in two: faults, and misses under pressure.
export function splitFailures(counts) {
  const failures = counts.heterocache_failures ?? [];
  return {
    ...counts,
    faults: failures.filter((x) => !PRESSURE.has(x.cause)),
    pressure: failures.filter((x) => PRESSURE.has(x.cause)),
  };
}

// Names a counter's rows by their labels: "checksum in ssd: 2".
export function causes(counts, name) {
  const byCause = {};
  for (const { count, ...labels } of counts[name] ?? []) {
    const words = Object.values(labels).map((x) => (x === "gone" ? "evicted" : x.replaceAll("_", " ")));
    addAll(byCause, { [words.join(" in ")]: count });
  }
  return Object.entries(byCause).map(([cause, n]) => (cause ? `${cause}: ${n}` : `${n}`)).join(", ");
}

function addAll(sums, more) {
  for (const [key, value] of Object.entries(more)) sums[key] = (sums[key] ?? 0) + value;
}

// Tokens of each source in the last five minutes, in bins; and what was counted since the page is open.
export class Recent {
  #last = new Map();
  #bins = new Map();

  add(engines) {
    for (const { engine, now, tokens, counts } of engines) {
      const key = `${engine.engine} ${engine.started}`; // another process counts from zero
      const before = this.#last.get(key);
      const named = splitFailures(counts);
      const errors = sum(["faults", "heterocache_hook_errors", "heterocache_directory_failures"].map((x) => total(named, x)));
      this.#last.set(key, { tokens, errors });
      if (!before) continue;
      const bin = this.#bin(Math.floor(now / BIN_S));
      for (const { key: source } of SOURCES) {
        // What is counted as computed may turn out to be restored.
        bin[source] += tokens[source] - before.tokens[source];
      }
      bin.errors += errors - before.errors;
    }
    const oldest = Math.max(...this.#bins.keys()) - BINS;
    for (const at of this.#bins.keys()) if (at < oldest) this.#bins.delete(at);
  }

  // [times, tokens per second of each source], for the chart.
  series(now) {
    const last = Math.floor(now / BIN_S);
    const length = Math.max(FEWEST_BINS, Math.min(BINS, last - Math.min(last, ...this.#bins.keys()) + 1));
    const bins = Array.from({ length }, (_, i) => last - length + 1 + i);
    const rate = (key) => bins.map((at) => Math.max(0, this.#bins.get(at)?.[key] ?? 0) / BIN_S);
    return [bins.map((at) => at * BIN_S), ...SOURCES.map(({ key }) => rate(key))];
  }

  totals() {
    const totals = { errors: 0 };
    for (const bin of this.#bins.values()) addAll(totals, bin);
    return totals;
  }

  #bin(at) {
    if (!this.#bins.has(at)) this.#bins.set(at, Object.fromEntries([...SOURCES.map((x) => [x.key, 0]), ["errors", 0]]));
    return this.#bins.get(at);
  }
}
