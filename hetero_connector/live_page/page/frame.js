// What is around the figures: the connection, the key, and the sentence at the top.

import { byId, element } from "./elements.js";
import { follow, keepKey } from "./feed.js";
import { clock } from "./units.js";

let name = "";
let seen = 0; // when the newest figures came, in seconds

export function say(sentence, state) {
  const notice = byId("notice");
  if (notice.textContent !== sentence) notice.textContent = sentence;
  notice.className = state;
}

// Say what is wrong: the rows of health that have a trouble to tell, and other sentences of [state, text].
export function sayTroubles(rows, others = []) {
  const troubles = rows.filter(([, state, , trouble]) => trouble && (state === "bad" || state === "warn"));
  const all = [...others, ...troubles.map(([, state, , trouble]) => [state, trouble])];
  say(all.map(([, text]) => text).join(" ") || "All is well.", all.some(([state]) => state === "bad") ? "bad" : all.length ? "warn" : "good");
}

function connection(text, state) {
  const pill = byId("connection");
  pill.textContent = text;
  pill.className = `pill ${state}`;
}

// The figures are new. `title`: for the tab.
export function live(title) {
  seen = Date.now() / 1000;
  byId("key").hidden = true;
  byId("figures").hidden = false;
  byId("figures").classList.remove("old");
  connection("live", "good");
  document.title = `${title} · ${name}`;
}

// There are no new figures. `why`: two words for the pill and the tab.
export function lose(sentences, why = "no connection") {
  byId("key").hidden = true;
  byId("figures").classList.add("old");
  connection(why, "bad");
  document.title = `${why} · ${name}`;
  say(sentences + (seen ? ` The figures are those of ${clock(seen)}.` : ""), "bad");
}

function askKey(wasRefused) {
  byId("key").hidden = false;
  byId("key-problem").textContent = wasRefused ? "The server has refused this key." : "";
  byId("key-text").focus();
  connection("no key", "");
  say("The figures of this server need its API key.", "warn");
  return new Promise((resolve) => {
    byId("key").addEventListener("submit", (event) => {
      event.preventDefault();
      keepKey(byId("key-text").value);
      byId("key-text").value = "";
      resolve();
    }, { once: true });
  });
}

// Fill a choice, and keep what was chosen. Returns it.
export function choose(id, names) {
  const choice = byId(id);
  if (names.join() !== [...choice.options].map((x) => x.value).join()) {
    const chosen = choice.value;
    choice.replaceChildren(...names.map((one) => element("option", { value: one }, one)));
    choice.value = names.includes(chosen) ? chosen : names[0];
  }
  return choice.value;
}

// Show the events of a URL for ever. `show` gets each, and calls `live` or `lose`.
export function start(url, page, show) {
  name = page;
  follow(url, { event: show, lost: lose, broken: (sentence) => lose(sentence, "page broken"), key: askKey });
}
