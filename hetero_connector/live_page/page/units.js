// Numbers as people read them, with their units.

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(Math.round(n));

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) { n /= 1024; at += 1; }
  return `${at && n < 100 ? n.toFixed(n < 10 ? 2 : 1) : Math.round(n)} ${units[at]}`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0.0095) return `${(1e3 * s).toFixed(1)} ms`;
  if (s < 0.9995) return `${Math.round(1e3 * s)} ms`;
  return s < 9.95 ? `${s.toFixed(2)} s` : span(s);
}

// A length of time, roughly.
export function span(s) {
  if (s < 99.5) return `${Math.round(s)} s`;
  if (s < 5970) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${Math.round(s / 86400)} days`;
}

export const share = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "–");

export const clock = (s) => new Date(1e3 * s).toLocaleTimeString("en-GB");

export function median(values) {
  const sorted = values.toSorted((a, b) => a - b), middle = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

export const sum = (values) => values.reduce((a, b) => a + b, 0);

export function addAll(sums, more) {
  for (const [key, value] of Object.entries(more)) sums[key] = (sums[key] ?? 0) + value;
}
