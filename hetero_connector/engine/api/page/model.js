// What the page shows of all engines, or of one: plain values, no document.

import { addAll, sum } from "./units.js";

export const SOURCES = [
  ["engine_cache", "HBM", "--hbm"],
  ["dram", "DRAM", "--dram"],
  ["ssd", "SSD", "--ssd"],
  ["peer", "Peer", "--peer"],
  ["computed", "Computed", "--computed"],
].map(([key, name, color]) => ({ key, name, color }));

export const CHOICES = [
  { key: "load", name: "load", color: "--dram" },
  { key: "load_part", name: "load a part", color: "--ssd" },
  { key: "replay", name: "load and replay a window", color: "--peer" },
  { key: "compute", name: "compute", color: "--computed" },
];

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

// What is counted for the chart and since the page is open. What is counted as computed may turn out to be restored.
export function countersOf({ tokens, counts }) {
  const named = splitFailures(counts);
  return { ...tokens, errors: sum(["faults", "heterocache_hook_errors", "heterocache_directory_failures"].map((x) => total(named, x))) };
}
