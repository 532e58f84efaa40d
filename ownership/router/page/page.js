// The fleet's page: it follows the router's events and shows the newest.

import { barsChart, timesChart } from "./charts.js";
import { bar, byId, element, none, number, replace, row, showRows, swatch, tierCard, tierColor, tile } from "./elements.js";
import { live, sayTroubles, start } from "./frame.js";
import { ACTIONS, KINDS, causes, countersOf, holders, mergeTiers, moved, ofOthers, total, underWay } from "./model.js";
import { Recent } from "./recent.js";
import { bytes, clock, count, median, seconds, share, span, sum } from "./units.js";

const ROWS = 14;
const SESSIONS = 12;
const SHOWN = 3; // workers by name
const OLD_REPORT_S = 10;

const recent = new Recent([...KINDS.map((x) => x.key), "lost"]);
const soft = (text) => element("span", { className: "soft" }, text);
const name = (text, title = text) => element("td", { className: "name short", title }, text);

// Sections

function showTiles(view) {
  const up = view.workers.filter((x) => x.state === "up").length;
  const placed = view.decisions.filter((x) => x.prompt_tokens !== null);
  const prompts = sum(placed.map((x) => x.prompt_tokens)), resumed = sum(placed.map((x) => x.resume_tokens));
  const streams = view.decisions.filter((x) => x.is_stream && x.first_byte_s !== null);
  const ratio = median(streams.filter((x) => x.predicted_s > 0).map((x) => x.first_byte_s / x.predicted_s));
  const { factor } = view.copies;
  replace("tiles", [
    tile("Workers", `${up} of ${view.workers.length}`, `serve; ${count(sum(view.workers.map(underWay)))} requests under way, ${count(view.queue.waiting)} wait`),
    tile("Time to first token", seconds(median(streams.map((x) => x.first_byte_s))), streams.length ? `median of the newest${ratio === null ? "" : `; ${ratio.toFixed(2)} × predicted`}` : "no stream lately"),
    tile("Prompt tokens resumed", share(resumed, prompts), placed.length ? `of the newest ${placed.length} prompts` : "no prompt was placed by its state"),
    tile("Copies", factor === null ? "–" : factor.toFixed(2), factor === null ? "nothing of the newest prompts is stored" : "of the newest prompts' stored tokens"),
  ]);
}

function showRequests(view) {
  const counters = countersOf(view);
  const shown = KINDS.filter(({ key }) => (key === "unplaced") === (view.router.policy === "least_loaded") || key === "refused");
  const all = sum(shown.map(({ key }) => counters[key] ?? 0));
  replace("requests", shown.map(({ key, name: text, color }) => element(
    "li", { id: `requests-${key}` }, swatch(color), text, element("b", {}, count(counters[key] ?? 0)), element("span", {}, share(counters[key] ?? 0, all)),
  )));
  drawRequests(recent.series(view.now, KINDS.map((x) => x.key)));
}

function showPoint(point) {
  byId("requests-note").textContent = point
    ? `${clock(point.time)}: ${KINDS.map((x, i) => [x.name, point.values[i]]).filter(([, n]) => n).map(([text, n]) => `${text} ${n.toFixed(1)}`).join(", ") || "none"} requests/s`
    : "now; below, since the start of this process";
}

function showTimes(view) {
  const pairs = view.decisions.filter((x) => x.is_stream && x.predicted_s > 0 && x.first_byte_s > 0);
  drawTimes(ACTIONS.map(({ key }) => {
    const of = pairs.filter((x) => x.action === key);
    return [of.map((x) => x.predicted_s), of.map((x) => x.first_byte_s)];
  }));
  const made = (key) => total(view.counts.placements.filter((x) => x.action === key));
  replace("times", ACTIONS.filter(({ key }) => made(key)).map(({ key, name: text, color }) => element("li", { id: `action-${key}` }, swatch(color, "round"), text, element("b", {}, count(made(key))))));
  byId("times-note").textContent = pairs.length
    ? `The newest ${pairs.length} streams; on the line, observed is as predicted. The counts are since the start.`
    : "No stream that a policy has placed yet.";
}

// A worker's state in a word, and how it is shown.
function stateOf({ state, draining, paused }) {
  if (state === "down") return ["down", "bad"];
  if (state !== "up") return ["not asked yet", ""];
  if (paused) return ["pauses after a lost request", "warn"];
  return draining ? ["drains", "warn"] : ["serves", "good"];
}

const usage = (part, color, title = "") => {
  if (part === null) return element("td", {}, soft("–"));
  return element("td", { title }, bar([[color, part, 1, ""]], "small"), share(part, 1));
};

function tierUsage({ stored }, tier) {
  const one = stored?.tiers[tier];
  if (!one?.capacity_bytes) return usage(null);
  const used = sum(Object.values(one.bytes));
  return usage(used / one.capacity_bytes, tierColor(tier), `${bytes(used)} of ${bytes(one.capacity_bytes)}`);
}

function showWorkers(view) {
  const rows = view.workers.map((x) => {
    const [text, state] = stateOf(x), age = x.load?.report_age_s ?? null, others = ofOthers(x);
    return element("tr", { className: state === "bad" ? "down" : "" },
      name(x.name, x.url),
      element("td", {}, element("span", { className: `state ${state}` }, text)),
      element("td", {}, x.role),
      number(x.load ? `${count(x.load.prefilling)} + ${count(x.load.decoding)}` : count(x.requests), x.load ? `${count(x.requests)} of them through this process` : "through this process"),
      number(others === null || age === null ? soft("–") : count(others)),
      number(x.load ? count(x.load.queued_tokens) : soft("–")),
      number(age === null ? soft("–") : element("span", { className: age > OLD_REPORT_S ? "bad" : "" }, `${seconds(age)} ago`)),
      number(x.sessions === null ? soft("–") : count(x.sessions)),
      usage(x.stored?.hbm_usage ?? null, "--hbm"), tierUsage(x, "dram"), tierUsage(x, "ssd"),
      number(x.stored ? bytes(x.stored.read_bytes.peer ?? 0) : soft("–")),
    );
  });
  replace("workers", rows.length ? rows : [none(12, "No worker yet: see workers, workers_file, workers_dns or workers_kubernetes in the configuration.")]);
  const several = view.router.processes > 1 && !view.peers;
  byId("workers-note").textContent = view.peers ? "under way through all routers" : several ? "under way through this process alone" : "under way through this router";
}

function showTiers(view) {
  const tiers = mergeTiers(view.workers), flown = moved(view.workers);
  replace("tiers", tiers.length ? tiers.map((tier) => {
    const used = sum(Object.values(tier.bytes));
    return tierCard(tier, [["Share", "Of what the tier has", (kind) => share(tier.bytes[kind], used)]]);
  }) : [element("p", { className: "note" }, "No worker has told of a tier: it has the connector's figures if it serves /metrics.")]);
  const flows = [["dram", "restored from DRAM", "--dram"], ["ssd", "read from SSD", "--ssd"], ["peer", "read from other workers", "--peer"], ["written", "written to SSD", "--computed"]];
  replace("moved", flows.map(([key, text, color]) => element("li", { id: `moved-${key}` }, swatch(color), text, element("b", {}, bytes(flown[key] ?? 0)))));
}

// Rows of [name, "good" | "warn" | "bad" | "", what it is, what to say of it at the top].
function judge(view) {
  const { counts, queue, workers, doubts } = view, now = recent.totals();
  const down = workers.filter((x) => x.state === "down").map((x) => x.name), up = workers.filter((x) => x.state === "up");
  const rows = [];
  if (!up.length) rows.push(["Workers", "bad", "none serves", "No worker serves: requests are answered with status 503."]);
  else if (down.length) rows.push(["Workers", "bad", `down: ${down.join(", ")}`, `${down.length} of ${workers.length} workers ${down.length === 1 ? "is" : "are"} down: ${down.join(", ")}.`]);
  else rows.push(["Workers", "good", "all serve"]);
  const paused = up.filter((x) => x.paused).map((x) => x.name);
  if (paused.length) rows.push(["Paused", "warn", paused.join(", "), "A worker has lost a request, and is given a pause."]);
  const draining = workers.filter((x) => x.draining).map((x) => x.name);
  if (draining.length) rows.push(["Draining", "", draining.join(", ")]);
  rows.push(["Queue", queue.waiting ? "warn" : "good", `${count(queue.waiting)} of at most ${count(queue.most)}`, "Requests wait, because all workers have as many as they may (max_in_flight)."]);
  const refused = causes(counts.refused, "reason");
  rows.push(["Refused", refused ? "warn" : "good", refused || "none", now.refused ? "Requests were refused in the last minutes." : null]);
  const cut = total(counts.cut), retried = total(counts.retried), lost = cut || retried;
  rows.push(["Lost or refused by workers", lost ? "warn" : "good", lost ? `${count(retried)} sent again, ${count(cut)} cut` : "none", now.lost ? "Workers have lost or refused requests in the last minutes." : null]);
  const failed = counts.prefills.filter((x) => x.result === "failed");
  if (counts.prefills.length) rows.push(["Prefills elsewhere", total(failed) ? "warn" : "good", `${count(total(counts.prefills))}, ${count(total(failed))} failed`]);
  if (doubts.length) rows.push(["Load of other routers", "warn", doubts.join(", ").replaceAll("_", " "), "Not all of what other routers have under way is known."]);
  if (view.router.policy !== "least_loaded") rows.push(["Doubts", "", causes(view.counts.doubts, "reason") || "none"]);
  return rows;
}

function showRouters(view) {
  const { router, peers } = view;
  const own = ["This process", "good", `${router.process}, up ${span(view.now - router.started)}${router.processes > 1 ? `, one of ${router.processes}` : ""}`];
  if (peers === null) return showRows("routers", [own, ["Others", "", "unknown: they tell each other through a directory in Redis"]]);
  const rows = peers.map((x) => [x.router.slice(0, 8), x.has_gap ? "warn" : "good", `${count(x.requests)} under way, heard ${seconds(x.silent_s)} ago`]);
  showRows("routers", [own, ...rows, ...(rows.length ? [] : [["Others", "", "none"]])]);
}

const costText = (costs) => Object.entries(costs).filter(([, s]) => s).map(([term, s]) => `${term.replace(/_s$/, "").replaceAll("_", " ")} ${seconds(s)}`).join("\n");

function known(x) {
  if (!x.certainty) return element("td", {}, soft("load alone"));
  const state = { exact: "good", degraded: "warn", blind: "" }[x.certainty];
  const reasons = x.reasons.join(", ").replaceAll("_", " ");
  return element("td", { className: "known", title: reasons }, element("span", { className: `state ${state}` }, x.certainty), soft(reasons ? ` ${reasons}` : ""));
}

function progress(x) {
  if (x.progress === "failed") return element("span", { className: "bad" }, `failed after ${seconds(x.total_s)}`);
  return x.progress === "ended" ? seconds(x.total_s) : soft(x.progress);
}

function showDecisions(view) {
  const rows = view.decisions.slice(0, ROWS).map((x) => {
    const action = ACTIONS.find((one) => one.key === x.action)?.name ?? "";
    const costs = Object.values(x.cost_s);
    return row(
      clock(x.time),
      element("td", { title: x.session }, x.path.replaceAll("_", " "), soft(x.session ? ` ${x.session.slice(0, 8)}` : "")),
      element("td", {}, element("span", { className: "name short" }, x.worker), soft(` ${action}${x.prefill_worker ? ` at ${x.prefill_worker}` : ""}`)),
      number(x.prompt_tokens === null ? soft("–") : count(x.prompt_tokens)),
      x.prompt_tokens ? element("td", {}, bar([["--hbm", x.resume_tokens / x.prompt_tokens, 1, ""]], "small"), count(x.resume_tokens)) : element("td", {}, soft("–")),
      known(x),
      number(costs.length ? seconds(sum(costs)) : soft("–"), costText(x.cost_s)),
      number(seconds(x.predicted_s)),
      number(x.is_stream ? seconds(x.first_byte_s) : soft("no stream")),
      number(progress(x)),
      element("td", { className: "name", title: x.trace }, x.trace.slice(0, 8)),
    );
  });
  replace("decisions", rows.length ? rows : [none(11, "No request yet.")]);
  byId("decisions-note").textContent = view.router.processes > 1 ? "newest first, of this process" : "newest first";
}

function showSessions(view) {
  const held = holders(view.decisions);
  const rows = view.sessions.newest.slice(0, SESSIONS).map((x) => {
    const { tokens, prompt } = held.get(x.session) ?? { tokens: null, prompt: 0 };
    const where = Object.entries(tokens ?? {}).toSorted((a, b) => b[1] - a[1]).map(([worker, n]) => `${worker} ${share(n, prompt)}`);
    return row(
      element("td", { className: "name", title: x.session }, x.session),
      name(x.worker), x.running ? `${count(x.running)} running` : `idle for ${span(Math.max(0, view.now - x.time))}`,
      number(count(x.turns)), number(count(x.moves)), number(count(x.tokens)),
      element("td", { className: "where", title: where.join("\n") }, where.length ? where.slice(0, SHOWN).join(", ") + (where.length > SHOWN ? ` and ${where.length - SHOWN} more` : "") : soft(tokens ? "nowhere" : "–")),
    );
  });
  replace("sessions", rows.length ? rows : [none(7, "No session yet: requests name theirs by a header or field, and a policy must place them.")]);
  byId("sessions-note").textContent = `the newest here${view.sessions.count ? `, of ${count(view.sessions.count)} at all routers` : ""}; named by digest`;
}

// The whole

const drawRequests = barsChart(byId("requests-chart"), KINDS, "requests/s", showPoint);
const drawTimes = timesChart(byId("times-chart"), ACTIONS);
showPoint(null);

function show(view) {
  const { router, workers } = view, models = [...new Set(workers.flatMap((x) => x.models))];
  // Each process counts for itself, and another connection may reach another one.
  recent.add(`${router.process} ${router.started}`, view.now, countersOf(view));
  const rows = judge(view), up = workers.filter((x) => x.state === "up").length;
  live(`${up} of ${workers.length} workers`);
  byId("subject").textContent = `fleet of ${models.join(", ") || "no model yet"} · ${router.policy}`;
  byId("about").textContent = `heterocache ${router.version}, process ${router.process}${router.processes > 1 ? `, one of ${router.processes}: each shows its own requests, decisions and sessions` : ""}`;
  showTiles(view);
  showRequests(view);
  showTimes(view);
  showWorkers(view);
  showTiers(view);
  showRows("health", rows);
  showDecisions(view);
  showSessions(view);
  showRouters(view);
  sayTroubles(rows);
}

start("fleet/live", "HeteroCache", show);
