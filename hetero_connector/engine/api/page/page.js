// The live page: it follows the server's events and shows the newest.

import { barsChart, timesChart } from "./charts.js";
import { bar, byId, element, none, number, replace, row, showRows, swatch, tierCard, tierName, tile } from "./elements.js";
import { choose, live, lose, sayTroubles, start } from "./frame.js";
import { CHOICES, SOURCES, causes, countersOf, merge, total } from "./model.js";
import { Recent } from "./recent.js";
import { bytes, clock, count, median, seconds, share, span, sum } from "./units.js";

const ROWS = 12;

const recent = new Recent([...SOURCES.map((x) => x.key), "errors"]);
let newest = null; // the newest event of which at least one engine has answered

// Sections

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
      view.tiers.map((x) => `${tierName(x.tier)} ${share(sum(Object.values(x.bytes)), x.capacity_bytes)} full`).join(", "),
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
  drawTokens(recent.series(view.now, SOURCES.map((x) => x.key)));
}

function showPoint(point) {
  byId("tokens-note").textContent = point
    ? `${clock(point.time)}: ${SOURCES.map((x, i) => `${x.name} ${count(point.values[i])}`).join(", ")} tokens/s`
    : "now; below, since the start";
}

function showTiers(view) {
  replace("tiers", view.tiers.map((tier) => tierCard(tier, [
    ["Slots used", "", (kind) => count(tier.artifacts[kind])],
    ["at most", "If it had the whole tier", (kind) => count(tier.max_artifacts[kind])],
  ])));
}

// Rows of [name, "good" | "warn" | "bad" | "", what it is, what to say of it at the top].
function judge({ health, counts, draining }) {
  const works = (name, key, trouble) => [name, health[key] ? "good" : "bad", health[key] ? "works" : "does not work", trouble];
  const rows = [
    works("Cache", "cache_alive", "The cache has stopped after a failed load. Until the server is restarted, nothing is restored or saved; every prompt is computed."),
    works("Store", "io_alive", "The store's I/O thread hangs or has ended. Nothing is read from or written to SSD and peers; DRAM serves on."),
  ];
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
  if (health.shared === false) rows.push(["Sharing", "warn", "nothing until the fleet is reset", "An engine was reset alone, or has new weights without a version: until the fleet is reset, it shares nothing."]);
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
        ? element("td", {}, bar(places.map(({ key, color }) => [color, x.chunks_by_tier[key] / chunks, 1, ""]), "small"), tiers.map(([tier, n]) => `${tierName(tier)} ${share(n, chunks)}`).join(", "))
        : element("td", {}, element("span", { className: "soft" }, "not stored")),
    );
  });
  replace("sessions", rows.length ? rows : [none(7, "No session yet: requests of one conversation are recognised by their prefix, or name their session.")]);
  byId("sessions-note").textContent = view.sessions.length > ROWS ? `${ROWS} of the newest ${view.sessions.length}; named by digest` : "named by digest";
}

// The whole

const drawTokens = barsChart(byId("tokens-chart"), SOURCES, "tokens/s", showPoint);
const drawTimes = timesChart(byId("times-chart"), CHOICES);
showPoint(null);

// A model in a local folder goes by the folder's name.
const nameOf = (model) => (model.startsWith("/") ? model.split("/").filter(Boolean).at(-1) : model);

function showEngines(good) {
  const names = ["all engines", ...good.map((x) => x.engine.engine)], name = choose("choice", names);
  byId("choice").hidden = good.length < 2;
  const chosen = good.filter((x) => name === names[0] || x.engine.engine === name);
  const first = chosen[0], models = [...new Set(chosen.map((x) => nameOf(x.engine.model)))];
  byId("subject").textContent = `${models.join(", ")} · up ${span(first.now - first.engine.started)}`;
  byId("about").textContent = `heterocache ${first.engine.heterocache}, vLLM ${first.engine.vllm}, ${count(first.engine.chunk_tokens)} tokens in a chunk, process ${chosen.map((x) => x.engine.pid).join(", ")}, fingerprint ${first.engine.fingerprint.slice(0, 16)}`;
  return chosen;
}

function show(event) {
  const good = event.engines.filter((x) => !x.error), gone = event.engines.filter((x) => x.error);
  const missing = event.count - event.engines.length;
  if (!good.length) {
    lose(gone.length ? `The engine is gone. ${gone.map((x) => x.error).join(" ")}` : "No engine of this server has opened a socket on this host: see the engines' logs.");
    return;
  }
  newest = event;
  // Another process of the same name counts from zero.
  for (const x of good) recent.add(`${x.engine.engine} ${x.engine.started}`, x.now, countersOf(x));
  const view = merge(showEngines(good)), rows = judge(view), all = sum(Object.values(view.tokens));
  live(`${share(all - view.tokens.computed, all)} reused`);
  showTiles(view);
  showTokens(view);
  showRows("health", rows);
  showTiers(view);
  showTimes(view);
  showDecisions(view);
  showSessions(view);
  const others = gone.map((x) => ["bad", `An engine is gone: ${x.error}.`]);
  if (missing > 0) others.push(["warn", `${missing} of ${event.count} engines of this server run on other hosts, or have no socket yet: they are not in these figures.`]);
  sayTroubles(rows, others);
}

byId("choice").addEventListener("change", () => newest && show(newest));
start("live", "HeteroCache", show);
