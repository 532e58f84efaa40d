// Elements of the page. All text goes in as text, never as HTML: clients choose names that it shows.

import { bytes, count, share, sum } from "./units.js";

export const byId = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function swatch(color, more = "") {
  const made = element("i", { className: `swatch ${more}` });
  made.style.background = `var(${color})`;
  return made;
}

// A bar of parts [color, share of the whole, opacity, title].
export function bar(parts, more = "") {
  const made = element("div", { className: `bar ${more}` });
  for (const [color, part, opacity, title] of parts) {
    if (!(part > 0)) continue;
    const piece = element("i", { title });
    piece.style.cssText = `width: ${100 * part}%; min-width: 2px; opacity: ${opacity}; background: var(${color})`;
    made.append(piece);
  }
  return made;
}

export function row(...cells) {
  return element("tr", {}, ...cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : element("td", {}, cell))));
}

export const number = (text, title = "") => element("td", { className: "number", title }, text);
export const none = (columns, text) => row(element("td", { className: "empty", colSpan: columns }, text));

// Replace a list's rows, but not while their text is being selected.
export function replace(id, children) {
  const parent = byId(id), selection = getSelection();
  if (selection.isCollapsed || !parent.contains(selection.anchorNode)) parent.replaceChildren(...children);
}

export function tile(title, value, note) {
  return element("div", { className: "tile" }, element("h2", {}, title), element("strong", {}, value), element("span", {}, note));
}

// Show rows of [name, "good" | "warn" | "bad" | "", what it is, what to say of it at the top].
export function showRows(id, rows) {
  replace(id, rows.map(([name, state, text]) => element("li", { className: state }, element("span", {}, name), element("b", {}, text))));
}

const TIERS = { dram: "DRAM", ssd: "SSD", peer: "Peer" };
export const tierName = (tier) => TIERS[tier] ?? tier;
export const tierColor = (tier) => (tier === "ssd" ? "--ssd" : "--dram");

// A tier with its bytes by state type. `columns`: [header, title, what each state type has there] after the bytes.
export function tierCard({ tier, capacity_bytes: capacity, bytes: stored }, columns) {
  const kinds = Object.keys(stored), used = sum(Object.values(stored)), color = tierColor(tier);
  const opacity = (i) => 1 - (0.72 * i) / Math.max(1, kinds.length);
  return element(
    "div", { className: "tier", id: `tier-${tier}` },
    element("h3", {}, tierName(tier), element("span", { title: `${count(used)} of ${count(capacity)} bytes` },
      `${bytes(used)} of ${bytes(capacity)} (${share(used, capacity)})`)),
    bar(kinds.map((kind, i) => [color, stored[kind] / capacity, opacity(i), kind])),
    element("table", {}, element("thead", {}, row(
      element("th", {}, "State type"), element("th", { className: "number" }, "Bytes"),
      ...columns.map(([header, title]) => element("th", { className: "number", title }, header)),
    )), element("tbody", {}, ...kinds.map((kind, i) => {
      const mark = swatch(color);
      mark.style.opacity = opacity(i);
      return row(
        element("td", {}, mark, ` ${kind.replaceAll("_", " ")}`), number(bytes(stored[kind]), `${count(stored[kind])} bytes`),
        ...columns.map(([, , value]) => number(value(kind))),
      );
    }))),
  );
}
