// The live page: it follows the server's events and shows the newest.
//
// Clients choose the names of requests. All text goes in as text, never as HTML.

import { CHOICES, timesChart, tokensChart } from "./charts.js";
import { follow, keepKey } from "./feed.js";
import { Recent, SOURCES, causes, merge, sum, total } from "./model.js";
import { bytes, clock, count, median, seconds, share, span } from "./units.js";

const ROWS = 12;
const TIERS = { dram: "DRAM", ssd: "SSD", peer: "Peer" };
const byId = (id) => document.getElementById(id);

const recent = new Recent();
let newest = null; // the newest event of which at least one engine has answered
let seen = 0; // when it came, in seconds

// Elements

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function swatch(color, more = "") {
  const made = element("i", { className: `swatch ${more}` });
  made.style.background = `var(${color})`;
  return made;
}

// A bar of parts [color, share of the whole, opacity, title].
function bar(parts, more = "") {
  const made = element("div", { className: `bar ${more}` });
  for (const [color, part, opacity, title] of parts) {
    if (!(part > 0)) continue;
    const piece = element("i", { title });
    piece.style.cssText = `width: ${100 * part}%; min-width: 2px; opacity: ${opacity}; background: var(${color})`;
    made.append(piece);
  }
  return made;
}

function row(...cells) {
  return element("tr", {}, ...cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : element("td", {}, cell))));
}

const number = (text, title = "") => element("td", { className: "number", title }, text);
const none = (columns, text) => row(element("td", { className: "empty", colSpan: columns }, text));

// Replace a list's rows, but not while their text is being selected.
function replace(id, children) {
  const parent = byId(id), selection = getSelection();
  if (selection.isCollapsed || !parent.contains(selection.anchorNode)) parent.replaceChildren(...children);
}

// Sections

function tile(title, value, note) {
  return element("div", { className: "tile" }, element("h2", {}, title), element("strong", {}, value), element("span", {}, note));
}

function showTiles(view) {
  const now = recent.totals(), prompt = sum(SOURCES.map((x) => now[x.key] ?? 0));
  const all = sum(Object.values(view.tokens)), sinceStart = share(all - view.tokens.computed, all);
  const restored = view.decisions.filter((x) => sum(Object.values(x.restored_tokens)) && x.observed_s !== null);
  const saved = median(restored.filter((x) => x.computing_s !== null).map((x) => x.computing_s - x.observed_s));
  const running = view.sessions.filter((x) => x.is_running).length;
  const soon = view.sessions.filter((x) => x.expected_in_s && x.expected_in_s[0] < 60 && x.expected_in_s[1] > 0).length;
  const sooner = saved === null ? "" : `; ${seconds(Math.abs(saved))} ${saved < 0 ? "later" : "sooner"} than computing`;
  replace("tiles", [
    tile(
      "Prompt tokens reused",
      prompt ? share(prompt - now.computed, prompt) : sinceStart,
      prompt ? `in the last minutes; ${sinceStart} since the start` : all ? "since the start" : "no request yet",
    ),
    tile("Time to first token, restored", seconds(median(restored.map((x) => x.observed_s))), restored.length ? `median${sooner}` : "nothing restored lately"),
    tile(
      "Stored",
      bytes(sum(view.tiers.flatMap((x) => Object.values(x.bytes)))),
      view.tiers.map((x) => `${TIERS[x.tier] ?? x.tier} ${share(sum(Object.values(x.bytes)), x.capacity_bytes)} full`).join(", "),
    ),
    tile("Sessions", count(view.sessions.length), `${running} running, ${soon} expected within a minute`),
  ]);
}

function showTokens(view) {
  const all = sum(Object.values(view.tokens));
  const shown = SOURCES.filter(({ key }) => key !== "peer" || view.tokens.peer || view.health.directory_joined !== null);
  replace("tokens", shown.map(({ key, name, color }) => element(
    "li", { id: `tokens-${key}` }, swatch(color), name, element("b", {}, count(view.tokens[key])), element("span", {}, share(view.tokens[key], all)),
  )));
  drawTokens(recent.series(view.now));
}

function showPoint(point) {
  byId("tokens-note").textContent = point
    ? `${clock(point.time)}: ${SOURCES.map((x, i) => `${x.name} ${count(point.values[i])}`).join(", ")} tokens/s`
    : "now; below, since the start";
}

function showTiers(view) {
  replace("tiers", view.tiers.map((tier) => {
    const kinds = Object.keys(tier.bytes), used = sum(Object.values(tier.bytes)), color = tier.tier === "ssd" ? "--ssd" : "--dram";
    const opacity = (i) => 1 - (0.72 * i) / Math.max(1, kinds.length);
    return element(
      "div", { className: "tier", id: `tier-${tier.tier}` },
      element("h3", {}, TIERS[tier.tier] ?? tier.tier, element("span", { title: `${count(used)} of ${count(tier.capacity_bytes)} bytes` },
        `${bytes(used)} of ${bytes(tier.capacity_bytes)} (${share(used, tier.capacity_bytes)})`)),
      bar(kinds.map((kind, i) => [color, tier.bytes[kind] / tier.capacity_bytes, opacity(i), kind])),
      element("table", {}, element("thead", {}, row(
        element("th", {}, "State type"), element("th", { className: "number" }, "Bytes"),
        element("th", { className: "number" }, "Slots used"), element("th", { className: "number", title: "If it had the whole tier" }, "at most"),
      )), element("tbody", {}, ...kinds.map((kind, i) => {
        const mark = swatch(color);
        mark.style.opacity = opacity(i);
        return row(
          element("td", {}, mark, ` ${kind.replaceAll("_", " ")}`), number(bytes(tier.bytes[kind]), `${count(tier.bytes[kind])} bytes`),
          number(count(tier.artifacts[kind])), number(count(tier.max_artifacts[kind])),
        );
      }))),
    );
  }));
}

// Rows of [name, "good" | "warn" | "bad" | "", what it is, what to say of it at the top].
function judge({ health, counts, draining }) {
  const works = (name, key, trouble) => [name, health[key] ? "good" : "bad", health[key] ? "works" : "does not work", trouble];
  const rows = [works("Store", "io_alive", "The store's I/O thread hangs or has ended: nothing is restored or saved.")];
  if (draining) rows.push(["Draining", "warn", "stores nothing new", "An engine is draining: it stores nothing new."]);
  if (newest.engines.some((x) => x.tiers?.some((tier) => tier.tier === "ssd"))) {
    rows.push(works("SSD writes", "ssd_writable", "The SSD cannot be written: what is new stays in DRAM only."));
    rows.push(works("SSD reads", "ssd_readable", "The SSD cannot be read: what is there is computed."));
  } else rows.push(["SSD", "", "none: set ssd_dir to have one"]);
  if (health.directory_joined === null) rows.push(["Fleet", "", "none: set directory to share the cache"]);
  else rows.push([
    "Fleet", health.directory_joined ? "good" : "bad", health.directory_joined ? "joined" : "not joined",
    "This engine is not in the fleet's directory: it has its local cache only.",
  ]);
  if (health.ssd_quarantined_bytes) rows.push(["Reads that have not ended", "warn", bytes(health.ssd_quarantined_bytes), "Some SSD reads do not end."]);
  const rate = (name, key, trouble) => {
    const n = total(counts, key);
    rows.push([name, n ? "warn" : "good", n ? causes(counts, key) : "none", recent.totals().errors && n ? trouble : null]);
  };
  rate("Failed loads and checks", "faults", "Some loads have failed in the last minutes; each was computed.");
  if (health.directory_joined !== null) rate("Failed calls to the directory", "heterocache_directory_failures", "Calls to the directory have failed in the last minutes.");
  rate("Unexpected errors", "heterocache_hook_errors", "There were unexpected errors, each a miss: please report them with the log.");
  if (total(counts, "pressure")) rows.push(["Missed because tiers are full", "", causes(counts, "pressure"), null]);
  const refused = total(counts, "heterocache_ssd_writes_refused");
  if (refused) rows.push(["SSD writes refused", "warn", count(refused), null]);
  return rows;
}

function showHealth(rows) {
  replace("health", rows.map(([name, state, text]) => element("li", { className: state }, element("span", {}, name), element("b", {}, text))));
}

function showTimes(view) {
  const pairs = view.decisions.filter((x) => x.predicted_s > 0 && x.observed_s > 0);
  drawTimes(CHOICES.map(({ key }) => {
    const of = pairs.filter((x) => x.choice === key);
    return [of.map((x) => x.predicted_s), of.map((x) => x.observed_s)];
  }));
  const made = (key) => sum((view.counts.heterocache_decisions ?? []).filter((x) => x.choice === key).map((x) => x.count));
  replace("times", CHOICES.map(({ key, name, color }) => element("li", { id: `choice-${key}` }, swatch(color, "round"), name, element("b", {}, count(made(key))))));
  const ratio = median(pairs.map((x) => x.observed_s / x.predicted_s)), lost = total(view.counts, "heterocache_lost_restores");
  byId("times-note").textContent = pairs.length
    ? `The ${pairs.length} newest; on the line, observed is as predicted. Median ratio ${ratio.toFixed(2)}. ${count(lost)} restores since the start were slower than computing.`
    : "No decision yet: the first is made when a prompt begins like one that is stored.";
}

function reasonOf({ choice, reason }) {
  if (reason === "in_engine") return "all in HBM already";
  return reason ? `compute: ${reason.replaceAll("_", " ")}` : choice;
}

function showDecisions(view) {
  const rows = view.decisions.slice(0, ROWS).map((x) => {
    const parts = { engine_cache: x.local_tokens ?? 0, ...x.restored_tokens, computed: x.computed_tokens ?? 0 };
    const shown = SOURCES.filter(({ key }) => parts[key] > 0);
    const text = shown.map(({ key, name }) => `${name} ${count(parts[key])}`).join(", ");
    return row(
      clock(x.time),
      element("td", { className: "name", title: x.request_id }, x.request_id),
      number(count(x.prompt_tokens)),
      element("td", {}, bar(shown.map(({ key, color }) => [color, parts[key] / x.prompt_tokens, 1, ""]), "small"), text),
      CHOICES.find(({ key }) => key === x.choice && key !== "compute")?.name ?? element("span", { className: "soft" }, reasonOf(x)),
      number(seconds(x.predicted_s)),
      number(seconds(x.observed_s)),
      number(seconds(x.computing_s)),
    );
  });
  replace("decisions", rows.length ? rows : [none(8, "No request yet.")]);
}

function expected(session) {
  if (session.is_running || !session.expected_in_s) return "–";
  const [earliest, latest] = session.expected_in_s;
  if (latest < 0) return `${span(-latest)} overdue`;
  return earliest < 1 ? `now, within ${span(latest)}` : `in ${span(earliest)} to ${span(latest)}`;
}

function activity(session) {
  const now = session.is_running ? "running" : `idle for ${span(session.idle_s)}`;
  return session.pinned_for_s == null ? now : `${now}, pinned for ${span(session.pinned_for_s)}`;
}

function showSessions(view) {
  const rows = view.sessions.toSorted((a, b) => b.is_running - a.is_running || a.idle_s - b.idle_s).slice(0, ROWS).map((x) => {
    const chunks = sum(Object.values(x.chunks_by_tier)), tiers = Object.entries(x.chunks_by_tier).filter(([, n]) => n);
    const places = SOURCES.filter(({ key }) => x.chunks_by_tier[key]);
    return row(
      element("td", { className: "name", title: x.session }, x.session.slice(0, 16)),
      activity(x), expected(x), number(count(x.turns)), number(count(x.tokens)),
      number(`${count(x.resumable_tokens)} (${share(x.resumable_tokens, x.tokens)})`),
      chunks
        ? element("td", {}, bar(places.map(({ key, color }) => [color, x.chunks_by_tier[key] / chunks, 1, ""]), "small"), tiers.map(([tier, n]) => `${TIERS[tier] ?? tier} ${share(n, chunks)}`).join(", "))
        : element("td", {}, element("span", { className: "soft" }, "not stored")),
    );
  });
  replace("sessions", rows.length ? rows : [none(7, "No session yet: requests of one conversation are recognised by their prefix, or name their session.")]);
  byId("sessions-note").textContent = view.sessions.length > ROWS ? `${ROWS} of the newest ${view.sessions.length}; named by digest` : "named by digest";
}

// The whole

const drawTokens = tokensChart(byId("tokens-chart"), showPoint);
const drawTimes = timesChart(byId("times-chart"));
showPoint(null);

function say(sentence, state) {
  const notice = byId("notice");
  if (notice.textContent !== sentence) notice.textContent = sentence;
  notice.className = state;
}

function connection(text, state) {
  const pill = byId("connection");
  pill.textContent = text;
  pill.className = `pill ${state}`;
}

// A model in a local folder goes by the folder's name.
const nameOf = (model) => (model.startsWith("/") ? model.split("/").filter(Boolean).at(-1) : model);

function showEngines(good) {
  const names = ["all engines", ...good.map((x) => x.engine.engine)], choice = byId("choice");
  if (names.join() !== [...choice.options].map((x) => x.value).join()) {
    const chosen = choice.value;
    choice.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    choice.value = names.includes(chosen) ? chosen : names[0];
  }
  choice.hidden = good.length < 2;
  const chosen = good.filter((x) => choice.value === names[0] || x.engine.engine === choice.value);
  const first = chosen[0], models = [...new Set(chosen.map((x) => nameOf(x.engine.model)))];
  byId("engine").textContent = `${models.join(", ")} · up ${span(first.now - first.engine.started)}`;
  byId("about").textContent = `heterocache ${first.engine.heterocache}, vLLM ${first.engine.vllm}, ${count(first.engine.chunk_tokens)} tokens in a chunk, process ${chosen.map((x) => x.engine.pid).join(", ")}, fingerprint ${first.engine.fingerprint.slice(0, 16)}`;
  return chosen;
}

function show(event) {
  const good = event.engines.filter((x) => !x.error), gone = event.engines.filter((x) => x.error);
  const missing = event.count - event.engines.length;
  byId("key").hidden = true;
  if (!good.length) {
    lose(gone.length ? `The engine is gone. ${gone.map((x) => x.error).join(" ")}` : "No engine of this server has opened a socket on this host: see the engines' logs.");
    return;
  }
  newest = event;
  seen = Date.now() / 1000;
  recent.add(good);
  byId("figures").hidden = false;
  byId("figures").classList.remove("old");
  const view = merge(showEngines(good)), rows = judge(view);
  showTiles(view);
  showTokens(view);
  showHealth(rows);
  showTiers(view);
  showTimes(view);
  showDecisions(view);
  showSessions(view);
  const troubles = rows.filter(([, state, , trouble]) => trouble && (state === "bad" || state === "warn"));
  const sentences = [...gone.map((x) => `An engine is gone: ${x.error}.`), ...troubles.map((x) => x[3])];
  if (missing > 0) sentences.push(`${missing} of ${event.count} engines of this server run on other hosts, or have no socket yet: they are not in these figures.`);
  say(sentences.join(" ") || "All is well.", troubles.some((x) => x[1] === "bad") || gone.length ? "bad" : sentences.length ? "warn" : "good");
  connection("live", "good");
  const all = sum(Object.values(view.tokens));
  document.title = `${share(all - view.tokens.computed, all)} reused · HeteroCache`;
}

function lose(sentence) {
  byId("figures").classList.add("old");
  connection("no connection", "bad");
  document.title = "no connection · HeteroCache";
  say(`${sentence} ${seen ? `The figures are those of ${clock(seen)}. ` : ""}Trying again every 2 s.`, "bad");
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

byId("choice").addEventListener("change", () => newest && show(newest));
follow("live", { event: show, lost: lose, key: askKey });
