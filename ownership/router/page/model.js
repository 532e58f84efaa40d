// What the page shows of the router's document: plain values, no document of the browser.

import { addAll, sum } from "./units.js";

export const KINDS = [
  ["exact", "exact", "--hbm"],
  ["degraded", "degraded", "--peer"],
  ["blind", "blind", "--computed"],
  ["unplaced", "by load alone", "--dram"],
  ["refused", "refused", "--bad"],
].map(([key, name, color]) => ({ key, name, color }));

export const ACTIONS = [
  ["colocated_prefill", "local", "--hbm"],
  ["decode_continuation", "stay", "--computed"],
  ["artifact_fetch", "fetch", "--peer"],
  ["tail_recompute", "recompute", "--warn"],
  ["state_migration", "move", "--dram"],
  ["remote_prefill", "prefill elsewhere", "--ssd"],
].map(([key, name, color]) => ({ key, name, color }));

export const total = (rows) => sum(rows.map((x) => x.count));

// What is counted for the chart and since the page is open.
export function countersOf({ counts, router }) {
  const counters = { refused: total(counts.refused), lost: total(counts.cut) + total(counts.retried) };
  for (const { certainty, count } of counts.placements) addAll(counters, { [certainty]: count });
  if (router.policy === "least_loaded") counters.unplaced = total(counts.requests) - counters.refused;
  return counters;
}

// "queue full: 3, no worker: 1", the most frequent first.
export function causes(rows, label) {
  const found = rows.filter((x) => x.count).toSorted((a, b) => b.count - a.count);
  return found.map((x) => `${x[label].replaceAll("_", " ")}: ${x.count}`).join(", ");
}

// The tiers of all workers together, those that have any.
export function mergeTiers(workers) {
  const tiers = {};
  for (const { stored } of workers) {
    for (const [tier, one] of Object.entries(stored?.tiers ?? {})) {
      const all = (tiers[tier] ??= { tier, capacity_bytes: 0, bytes: {} });
      all.capacity_bytes += one.capacity_bytes;
      addAll(all.bytes, one.bytes);
    }
  }
  return Object.values(tiers).filter((x) => x.capacity_bytes).toSorted((a, b) => a.tier.localeCompare(b.tier));
}

export function moved(workers) {
  const bytes = { written: 0 };
  for (const { stored } of workers) {
    addAll(bytes, stored?.read_bytes ?? {});
    bytes.written += stored?.ssd_written_bytes ?? 0;
  }
  return bytes;
}

// Requests under way at a worker: those of all routers if they tell each other, else those of this process.
export const underWay = ({ requests, load }) => (load ? load.prefilling + load.decoding : requests);
export const ofOthers = ({ load }) => (load ? load.others.waiting_requests + load.others.running_requests : null);

// Which workers had how much of each session's prompt when its last turn came.
export function holders(decisions) {
  const found = new Map();
  for (const x of decisions) {
    if (x.session && !found.has(x.session)) found.set(x.session, { tokens: x.holder_tokens, prompt: x.prompt_tokens });
  }
  return found;
}
