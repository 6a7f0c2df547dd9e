"use strict";
// Fetches the state of the cluster every 2 s and shows it. Data from Redis is only ever set as text.

const EVERY_MS = 2000;
const SHOW_ENDED_MS = 15000; // how long a run that has ended stays on the page, marked as such
const QUIET_SECONDS = 60;
const SHOWN_SECONDS = 600; // length of the plots
const COLOURS = ["--c0", "--c1", "--c2"];

const byId = (id) => document.getElementById(id);
let page = 0;
let known = new Map(); // runs in the last update
let ended = new Map(); // runs that have ended, and when that was noticed

// --- words

const count = (n) => Math.round(n).toLocaleString("en");
const percent = (share) => (100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0) + "%";

function rate(n) {
  return n === null || n === undefined ? "–" : n > 0 && n < 10 ? n.toFixed(1) : count(n);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return Math.round(seconds * 1000) + " ms";
  if (seconds < 10) return seconds.toFixed(1) + " s";
  let left = Math.round(seconds);
  const parts = [];
  for (const [name, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    if (left >= size || parts.length) parts.push(Math.floor(left / size) + " " + name);
    left %= size;
  }
  return parts.slice(0, 2).join(" ");
}

// For durations where tenths of a second do not matter.
function age(seconds) {
  return seconds === null || seconds === undefined ? "–" : seconds < 10 ? Math.round(seconds) + " s" : duration(seconds);
}

// The end of a path says most.
function ending(name, most = 40) {
  if (name.length <= most) return name;
  const last = name.slice(name.lastIndexOf("/"));
  return "…" + (last.length < most ? last : name.slice(1 - most));
}

function say(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

// --- tables

// A cell is a text, or {text, className, title, share, more}; share shows a progress bar before the text, and
// more is a second line of texts.
function cell(label, value) {
  const td = document.createElement("td");
  const {text, className, title, share, more} = typeof value === "object" ? value : {text: value};
  td.dataset.label = label;
  if (title) td.title = title;
  const content = document.createElement("span");
  if (className) content.className = className;
  if (share !== undefined) {
    const bar = document.createElement("progress");
    bar.max = 1;
    bar.value = share;
    bar.setAttribute("aria-label", "progress");
    content.append(bar);
  }
  content.append(text);
  td.append(content);
  for (const line of (more ?? []).filter((each) => each)) {
    const small = document.createElement("small");
    small.append(line);
    td.append(" ", small);
  }
  return td;
}

function table(id, columns, rows, empty) {
  const head = document.createElement("thead");
  const names = head.insertRow();
  for (const column of columns) {
    const th = document.createElement("th");
    th.scope = "col";
    th.textContent = column.name;
    if (column.number) th.className = "number";
    names.append(th);
  }
  const body = document.createElement("tbody");
  for (const row of rows) {
    const tr = body.insertRow();
    if (row.className) tr.className = row.className;
    row.cells.forEach((value, place) => {
      const td = cell(columns[place].name, value);
      if (columns[place].number) td.classList.add("number");
      tr.append(td);
    });
  }
  if (!rows.length) {
    const td = body.insertRow().insertCell();
    td.colSpan = columns.length;
    td.className = "empty";
    td.textContent = empty;
  }
  byId(id).replaceChildren(head, body);
}

const names = (...all) =>
  all.map((name) => (name.startsWith("#") ? {name: name.slice(1), number: true} : {name}));

const errors = (n) => ({text: count(n), className: n ? "bad" : ""});

function runRow(run, now, over) {
  const share = run.rows ? run.rows_done / run.rows : undefined;
  const done = run.rows === null ? count(run.rows_done) + " rows"
    : percent(share ?? 1) + " of " + count(run.rows);
  const quiet = run.quiet_seconds > QUIET_SECONDS;
  const left = over ? {text: "finished, cancelled or expired"}
    : quiet ? {text: "no result for " + age(run.quiet_seconds), className: "warn"}
    : {text: age(run.seconds_left)};
  return {
    className: over ? "over" : "",
    cells: [
      {text: run.id.slice(0, 12), title: run.id},
      {text: ending(run.model), title: run.model},
      run.queue,
      {text: done, share},
      errors(run.row_errors),
      rate(run.rows_per_second),
      left,
      age(now - run.created),
    ],
  };
}

function showRuns(cluster) {
  const current = new Map(cluster.runs.map((run) => [run.id, run]));
  const all = cluster.runs_total <= cluster.page_size; // else a run may only be on another page
  for (const [id, run] of known) {
    if (all && !current.has(id) && !ended.has(id)) ended.set(id, {run, at: Date.now()});
  }
  for (const [id, {at}] of ended) {
    if (!all || current.has(id) || Date.now() - at > SHOW_ENDED_MS) ended.delete(id);
  }
  known = current;
  const rows = cluster.runs.map((run) => runRow(run, cluster.at, false));
  for (const {run} of ended.values()) rows.push(runRow(run, cluster.at, true));
  const columns = names("Run", "Model", "Queue", "Done", "#Row errors", "#Rows/s", "#Left", "#Age");
  table("runs", columns, rows, "No runs.");
  const pages = Math.max(1, Math.ceil(cluster.runs_total / cluster.page_size));
  byId("pages").hidden = pages === 1 && page === 0;
  say("page", `Page ${page + 1} of ${pages}, ${count(cluster.runs_total)} runs`);
  byId("previous").disabled = page === 0;
  byId("next").disabled = page + 1 >= pages;
}

const STATES = {
  idle: {text: "idle"},
  busy: {text: "busy", className: "good"},
  draining: {text: "draining", className: "warn", title: "It finishes its chunks and takes no more."},
  drained: {text: "drained", className: "warn", title: "It takes no chunks until it is resumed: rankmill workers resume."},
  lost: {text: "lost", className: "bad", title: "It has died or cannot reach Redis; its chunks run elsewhere."},
  foreign: {text: "cannot score", className: "warn", title: "An RQ worker of another class than ScoringWorker."},
};

// The state, with a second line that says why a worker does not score as others do.
function stateOf(worker) {
  const {state, report} = worker;
  const found = STATES[state];
  const reasons = report ? report.refusals : [];
  if (reasons.length) {
    const why = reasons[0].slice(0, 160) + (reasons.length > 1 ? ` (and ${reasons.length - 1} more)` : "");
    return {text: found.text + ", refuses some chunks", className: "warn", title: reasons.join("\n").slice(0, 1000), more: [why]};
  }
  if (worker.is_slow) {
    const title = "For the same number of tokens it takes longer than workers with its device and models.";
    return {text: found.text + ", slow", className: "warn", title, more: [`${percent(worker.relative_pace)} of its peers’ speed`]};
  }
  return report?.doing ? {...found, text: `${found.text}, ${report.doing}`} : found;
}

const TROUBLE = {lost: 0, foreign: 1, draining: 3, drained: 3};
const urgency = (worker) => TROUBLE[worker.state] ?? (worker.report?.refusals.length || worker.is_slow ? 2 : 4);

function bytes(n) {
  return n >= 2 ** 30 ? (n / 2 ** 30).toFixed(1) + " GiB" : count(n / 2 ** 20) + " MiB";
}

// Figures of a worker's GPU, those that its driver tells.
function graphics(gpu) {
  if (!gpu) return "";
  const parts = [gpu.use === null ? "" : percent(gpu.use), `${(gpu.memory_used / 2 ** 30).toFixed(1)} of ${bytes(gpu.memory_size)}`,
    gpu.celsius === null ? "" : Math.round(gpu.celsius) + "\u00a0°C"];
  return parts.filter((part) => part).join(", ");
}

function hits({model_hits, model_loads}) {
  return model_hits + model_loads ? percent(model_hits / (model_hits + model_loads)) : "–";
}

function showWorkers(cluster, rates) {
  const workers = [...cluster.workers].sort((one, other) => urgency(one) - urgency(other)); // else by name
  const rows = workers.map((worker) => {
    const {name, queues, beat_seconds, report, pid} = worker;
    const models = report ? report.models : [];
    return {cells: [
      {text: name, title: pid === null ? name : `${name}, process ${pid}`, more: [queues.join(", ")]},
      stateOf(worker),
      {text: report ? models.map((model) => ending(model)).join(", ") || "none yet" : "–",
        title: models.join("\n"), more: [report ? report.device : ""]},
      rate(rates.speeds[name]),
      {text: report ? count(report.pairs) : "–",
        more: [report && report.row_errors ? count(report.row_errors) + " row errors" : ""]},
      {text: report && report.cpu !== null ? report.cpu.toFixed(1) + " cores" : "–",
        more: [report && report.resident_bytes ? bytes(report.resident_bytes) : "", graphics(report && report.gpu)]},
      report ? hits(report) : "–",
      beat_seconds === null ? "–" : age(beat_seconds) + " ago",
    ]};
  });
  const columns = names("Worker", "State", "Models", "#Pairs/s", "#Pairs", "#Host", "#Cache hits", "#Heartbeat");
  table("workers", columns, rows, "No workers. Start some with score-workers.");
}

function showQueues(cluster) {
  const rows = cluster.queues.map((queue) => ({
    cells: [
      queue.name,
      count(queue.waiting),
      age(queue.oldest_seconds),
      count(queue.started),
      errors(queue.failed),
      queue.waiting && !queue.workers ? {text: queue.drained ? "all drained" : "none", className: "bad"}
        : count(queue.workers) + (queue.drained ? `, ${count(queue.drained)} drained` : ""),
    ],
  }));
  table("queues", names("Queue", "#Waiting", "#Oldest", "#Running", "#Failed", "#Workers"), rows, "No queues yet.");
}

function showDamaged(cluster) {
  byId("damaged-section").hidden = !cluster.damaged.length;
  const rows = cluster.damaged.map(({key, reason}) => ({cells: [key, {text: reason, className: "long", title: reason}]}));
  table("damaged", names("Key", "Reason"), rows, "");
}

// --- figures

function showNow(cluster, rates) {
  const states = {idle: 0, busy: 0, draining: 0, drained: 0, lost: 0, foreign: 0};
  for (const worker of cluster.workers) states[worker.state] += 1;
  const drained = states.draining + states.drained;
  const slow = cluster.workers.filter((worker) => worker.is_slow).length;
  const alive = states.idle + states.busy + drained;
  say("throughput", rate(rates.pairs_per_second));
  say("throughput-more", "pairs/s");
  say("alive", count(alive));
  byId("alive").className = !alive ? "bad" : states.lost || drained || slow ? "warn" : "";
  say("alive-more", `${states.busy} busy` + (drained ? `, ${drained} drained` : "") + (states.lost ? `, ${states.lost} lost` : "")
    + (slow ? `, ${slow} slow` : "")
    + (states.foreign ? `, ${states.foreign} cannot score` : ""));
  say("waiting", count(cluster.queues.reduce((sum, queue) => sum + queue.waiting, 0)));
  const oldest = Math.max(...cluster.queues.map((queue) => queue.oldest_seconds ?? -1), -1);
  say("waiting-more", oldest < 0 ? "none" : "oldest " + age(oldest));
  for (const [id, latency] of [["request-latency", rates.request_latency], ["bulk-latency", rates.bulk_latency]]) {
    say(id, latency ? duration(latency[0]) : "–");
    say(id + "-more", latency ? `p95 ${duration(latency[1])}, p99 ${duration(latency[2])}` : "none lately");
  }
  say("padding", rates.padding === null ? "–" : percent(rates.padding));
  const total = cluster.workers.reduce((sum, worker) => sum + (worker.report ? worker.report.row_errors : 0), 0);
  say("errors", count(total));
  byId("errors").className = rates.row_errors ? "bad" : "";
  say("errors-more", `${count(rates.row_errors)} in the last 30 s`);
}

function showStages(stages) {
  const shares = Object.entries(stages ?? {});
  byId("stages-bar").replaceChildren(...shares.map(([, share], place) => {
    const part = document.createElement("div");
    part.className = "k" + place;
    part.style.width = 100 * share + "%";
    return part;
  }));
  byId("stages").replaceChildren(...shares.map(([name, share], place) => {
    const item = document.createElement("li");
    const mark = document.createElement("i");
    mark.className = "k" + place;
    item.append(mark, `${name} ${percent(share)}`);
    return item;
  }));
  if (!shares.length) byId("stages").append("Nothing measured yet.");
}

// --- plots

const plots = [];
const compact = new Intl.NumberFormat("en", {notation: "compact"});

function plot(id, series) {
  const box = byId(id);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = {stroke: colour("--soft"), grid: {stroke: colour("--line"), width: 1}, ticks: {show: false}};
  const drawn = new uPlot({
    width: box.clientWidth,
    height: 170,
    cursor: {show: false},
    legend: {show: series.length > 1, live: false},
    scales: {x: {range: (self, low, high) => [(high ?? Date.now() / 1000) - SHOWN_SECONDS, high]}, y: {range: (self, low, high) => [0, Math.max(high ?? 0, 1) * 1.1]}},
    axes: [
      {...axis, size: 28, space: 60, incrs: [60, 120, 300], values: (self, ticks) => ticks.map(clock)},
      {...axis, size: 48, values: (self, ticks) => ticks.map((n) => compact.format(n))},
    ],
    series: [{}, ...series.map(([, label], place) => ({
      label, stroke: colour(COLOURS[place]), width: 2, points: {show: false},
      fill: series.length === 1 ? colour(COLOURS[place]) + "22" : undefined,
    }))],
  }, [[], ...series.map(() => [])], box);
  new ResizeObserver(() => drawn.setSize({width: box.clientWidth, height: 170})).observe(box);
  plots.push({box, drawn, series});
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB", {hour: "2-digit", minute: "2-digit"});

function makePlots() {
  for (const {drawn} of plots.splice(0)) drawn.destroy();
  plot("plot-pairs", [["pairs_per_second", "pairs/s"]]);
  plot("plot-latency", [["p50", "p50"], ["p95", "p95"], ["p99", "p99"]]);
  plot("plot-waiting", [["waiting", "waiting"]]);
}

function showPlots(data) {
  for (const {box, drawn, series} of plots) {
    drawn.setData([data.at, ...series.map(([name]) => data[name])]);
    const last = series.map(([name, label]) => `${label} ${rate(data[name].at(-1))}`).join(", ");
    box.setAttribute("aria-label", `Plot of the last ten minutes; now ${last}`);
  }
}

// --- the loop

// What the server says of the cluster; `text` is there where it says nothing.
function notice(text, verdict = null) {
  const faults = verdict?.faults ?? [];
  byId("notice").hidden = !text && !faults.length;
  if (text) say("notice", text);
  else byId("notice").replaceChildren(...faults.map((fault) => line(`${fault.text}: ${fault.remedy}.`)));
  byId("state").className = text ? "away" : faults.length ? "trouble" : "live";
  document.querySelector("main").style.opacity = text ? 0.55 : 1;
  const time = new Date().toLocaleTimeString("en-GB");
  say("state", !text ? `${verdict.sentence}. ${time}` : lastGood ? `not up to date since ${lastGood}` : "no figures yet");
  if (!text) lastGood = time;
}

function line(text) {
  const found = document.createElement("p");
  found.textContent = text;
  return found;
}

let lastGood = null;
let waiting = null;

async function look() {
  clearTimeout(waiting);
  try {
    const reply = await fetch(`api/cluster.json?page=${page}`, {signal: AbortSignal.timeout(10000)});
    const {cluster, rates, series, error} = await reply.json();
    showPlots(series);
    if (cluster) {
      showNow(cluster, rates);
      showStages(rates.stages);
      showRuns(cluster);
      showWorkers(cluster, rates);
      showQueues(cluster);
      showDamaged(cluster);
      notice("", cluster.verdict);
    } else {
      notice(`Redis is away: ${error.replace(/\.$/, "")}. Workers and producers wait and go on when it is back.`);
    }
  } catch (error) {
    notice(`The server of this page does not answer (${error.message}).`);
  }
  waiting = setTimeout(look, EVERY_MS);
}

function turn(by) {
  page = Math.max(0, page + by);
  look();
}

byId("previous").addEventListener("click", () => turn(-1));
byId("next").addEventListener("click", () => turn(1));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", makePlots);
makePlots();
look();
