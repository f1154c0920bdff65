// The dashboard. It only reads the API, and shows all data as text, never as markup.
"use strict";

const EVERY_MS = 2000, TOKEN_KEY = "penstock-token", LOW_MAX = 2 ** 53;
const GOOD = ["running", "live", "well"], BAD = ["quarantined", "invalid", "failed", "dead", "lost"];
const $ = (id) => document.getElementById(id);
let timer = 0, round = 0;

// --- small parts

function node(kind, content = "", style = "") {
  const made = document.createElement(kind);
  if (style) made.className = style;
  made.append(...[content].flat());
  return made;
}

function table(columns, rows, empty) {
  if (!rows.length) return node("p", empty, "dim");
  const head = node("tr", columns.map(([name, style]) => node("th", name, style)));
  const body = rows.map((row) => node("tr", row.map((cell, n) => node("td", cell, columns[n][1]))));
  return node("div", node("table", [node("thead", head), node("tbody", body)]), "wide");
}

function state(word) {
  const style = GOOD.includes(word) ? "good" : BAD.includes(word) ? "bad" : "warn";
  return node("span", word, style);
}

function link(job) {
  const made = node("a", job);
  made.href = "#/jobs/" + encodeURIComponent(job);
  return made;
}

function guarantees(texts, shorten = (text) => text) {
  const items = texts.map((text) => {
    const made = node("li", shorten(text), text.startsWith("strong productions") ? "" : "less");
    made.title = text;
    return made;
  });
  return items.length ? node("ul", items, "promises") : node("span", "–", "dim");
}

const number = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));
const percent = (value) => (value == null ? "–" : Math.round(value * 100) + " %");

function span(seconds) {
  if (seconds == null) return "–";
  if (seconds < 90) return seconds.toFixed(1) + " s";
  return seconds < 5400 ? (seconds / 60).toFixed(1) + " min" : (seconds / 3600).toFixed(1) + " h";
}

function moment(ms) {
  if (ms == null || ms <= -LOW_MAX) return "–";
  if (ms >= LOW_MAX) return "end";
  const at = new Date(ms);
  return Number.isNaN(at.getTime()) ? String(ms) : at.toISOString().replace("T", " ").slice(0, 19);
}

function plain(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

// --- pages

async function showFleet() {
  const found = await ask("/api/v1/status");
  const jobs = found.jobs.map((job) => {
    const load = job.load ?? {};
    const remark = job.problem || (job.plan ? "changing, at step " + job.plan : job.scaler);
    return [
      link(job.name), state(job.state), job.running_task_count + " of " + job.task_count,
      number(load.input_rate), number(load.processed_rate), span(load.lag_s), percent(load.busy),
      guarantees(job.guarantees, (text) => text.split(";")[0]), node("span", remark, job.problem ? "bad" : "dim"),
    ];
  });
  const containers = found.containers.map((row) => [
    row.name, state(row.state === "live" && !row.ready ? "starting" : row.state), String(row.shards),
    String(row.tasks), span(Math.max(0, found.now_ms - row.seen_ms) / 1000),
  ]);
  return [
    node("h1", "Jobs"),
    table(
      [["job", "word"], ["state", "word"], ["tasks", "word"], ["in/s", "number"], ["done/s", "number"],
        ["lag", "number"], ["busy", "number"], ["guarantee", "text"], ["remark", "text"]],
      jobs, "No jobs yet: submit a pipeline with `penstock submit`."),
    node("h2", "Containers"),
    table(
      [["container", "word"], ["state", "word"], ["shards", "number"], ["tasks", "number"],
        ["last heartbeat", "number"]],
      containers, "No containers."),
  ];
}

async function showJob(name) {
  const job = await ask("/api/v1/jobs/" + encodeURIComponent(name));
  const streams = ["stateless", "stateful"].includes(job.config.kind) && job.running !== null;
  const lows = streams ? await lowsOf(name) : null;
  const tasks = job.tasks.map((task) => [
    task.task_id, task.container, state(task.state), number(task.metrics?.lag_records),
    span(task.metrics?.lag_s), number(task.restarts), task.error ?? "",
  ]);
  const settings = flat(job.config).map(([path, value]) => {
    const by = job.provenance[path];
    return [path, plain(value), by ? by.layer : "default", by ? by.reason : ""];
  });
  const made = [
    node("h1", [job.name + "  ", state(job.state)]),
    node("h2", "Guarantees"),
    job.guarantees.length ? guarantees(job.guarantees)
      : node("p", "This job has no state: the choice between strong and weak productions does not apply.", "dim"),
  ];
  if (job.problem) made.push(node("p", job.problem, "bad"));
  made.push(
    node("h2", "Tasks"),
    table(
      [["task", "word"], ["container", "word"], ["state", "word"], ["to read", "number"],
        ["for", "number"], ["restarts", "number"], ["error", "text"]],
      tasks, "No task is running."));
  if (lows?.problem) made.push(node("h2", "Low watermarks"), node("p", lows.problem, "bad"));
  else if (lows) {
    const rows = lows.categories.map((found) => [
      found.category, moment(found.low), found.age_ms == null ? "–" : span(Math.max(0, found.age_ms) / 1000),
    ]);
    made.push(
      node("h2", "Low watermarks"),
      table([["category", "word"], ["low", "word"], ["age", "number"]], rows, "No category has one."),
      ...lows.held_back.map((item) => node("p", item.category + ": " + item.text, "dim")));
  }
  made.push(
    node("h2", "Settings and their layers"),
    table([["setting", "word"], ["value", "text"], ["layer", "word"], ["reason", "text"]], settings, ""));
  return made;
}

// A job whose outputs do not exist yet has no watermarks; the rest of its page is shown anyway.
async function lowsOf(job) {
  try {
    return await ask("/api/v1/watermarks?subject=" + encodeURIComponent(job));
  } catch (error) {
    if (error instanceof Problem) return {problem: error.message};
    throw error;
  }
}

function flat(value, path = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[path, value]];
  return Object.entries(value).flatMap(([name, part]) => flat(part, path ? path + "." + name : name));
}

// --- requests

class Problem extends Error {}
class NoToken extends Error {}

async function ask(path) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  if (!token) throw new NoToken("");
  let reply;
  try {
    reply = await fetch(path, {headers: {Authorization: "Bearer " + token}, cache: "no-store"});
  } catch {
    throw new Problem("The control plane does not answer.\nThe page shows the last known state and retries.");
  }
  const body = await reply.json().catch(() => ({}));
  if (reply.status === 401) throw new NoToken([body.title, body.detail, body.fix].filter(Boolean).join("\n"));
  if (!reply.ok) throw new Problem([body.title, body.detail, body.fix].filter(Boolean).join("\n"));
  return body;
}

function showProblem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function askToken(why) {
  sessionStorage.removeItem(TOKEN_KEY);
  $("page").replaceChildren();
  $("seen").textContent = "";
  $("leave").hidden = true;
  $("ask").hidden = false;
  showProblem(why);
  $("token").focus();
}

async function refresh() {
  clearTimeout(timer);
  const mine = ++round, began = performance.now(), job = location.hash.match(/^#\/jobs\/(.+)$/);
  try {
    const parts = await (job ? showJob(decoded(job[1])) : showFleet());
    if (mine !== round) return; // another page was requested meanwhile
    $("page").replaceChildren(...parts);
    $("seen").textContent = "as of " + new Date().toLocaleTimeString();
    $("leave").hidden = false;
    $("ask").hidden = true;
    showProblem("");
  } catch (error) {
    if (mine !== round) return;
    if (error instanceof NoToken) return askToken(error.message);
    showProblem(error instanceof Problem ? error.message : "This page has a bug: " + error);
  }
  // A slow page is refreshed less often, and a hidden one not at all.
  if (!document.hidden) timer = setTimeout(refresh, Math.max(EVERY_MS, 10 * (performance.now() - began)));
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a truncated address; the server answers that it does not exist
  }
}

// The token is in the fragment, which browsers do not send, and is removed from the address at once.
function takeToken() {
  const given = location.hash.match(/^#token=([^&]+)(?:&job=(.+))?$/);
  if (!given) return;
  sessionStorage.setItem(TOKEN_KEY, decoded(given[1]));
  history.replaceState(null, "", location.pathname + "#/" + (given[2] ? "jobs/" + given[2] : ""));
}

addEventListener("hashchange", () => {
  takeToken();
  $("page").replaceChildren();
  refresh();
});
addEventListener("visibilitychange", () => document.hidden || refresh());
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, $("token").value.trim());
  $("token").value = "";
  refresh();
});
$("leave").addEventListener("click", () => {
  clearTimeout(timer);
  round++;
  askToken("");
});
takeToken();
refresh();
