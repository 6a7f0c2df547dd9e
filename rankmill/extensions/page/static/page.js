"use strict";
// Fetches the state of the cluster every 2 s and shows it. Data from Redis is only ever set as text.

const EVERY_MS = 2000;
const SHOW_ENDED_MS = 15000; // how long a run that has ended stays on the page, marked as such
const QUIET_SECONDS = 60;
const LEAST_SECONDS = 60; // least length of the plots
const SHOWN_FAULTS = 5;
const SINGLE_WORKERS = 8; // above this number, the healthy workers of a host are one row, which a click opens
const COLOURS = ["--c0", "--c1", "--c2"];

const byId = (id) => document.getElementById(id);
let page = 0;
let known = new Map(); // runs in the last update
let ended = new Map(); // runs that have ended, and when that was noticed
const opened = new Set(); // hosts whose workers are shown one by one
let key = null; // the admin's key, once it was entered; only this page has it, until the page is closed
let failing = null; // number of failed and set-aside jobs when they were last read

// --- words

const count = (n) => Math.round(n).toLocaleString("en");
const counted = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;
const percent = (share) => (100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0) + "%";

function rate(n) {
  if (n === null || n === undefined) return "–";
  return n > 0 && n < 0.1 ? "< 0.1" : n > 0 && n < 10 ? n.toFixed(1) : count(n);
}

const quantity = (n, unit) => `${n}\u00a0${unit}`; // the number and its unit stay in one line

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return quantity(Math.round(seconds * 1000), "ms");
  if (seconds < 10) return quantity(seconds.toFixed(1), "s");
  let left = Math.round(seconds);
  const parts = [];
  for (const [name, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    if (left >= size || parts.length) parts.push(quantity(Math.floor(left / size), name));
    left %= size;
  }
  return parts.slice(0, 2).filter((part, place) => !place || !part.startsWith("0\u00a0")).join("\u00a0");
}

// A duration in words, without tenths of a second.
function age(seconds) {
  return seconds === null || seconds === undefined ? "–" : seconds < 10 ? quantity(Math.round(seconds), "s") : duration(seconds);
}

// Shortens a path; its end is kept, because it says most.
function ending(name, most = 40) {
  if (name.length <= most) return name;
  const last = name.slice(name.lastIndexOf("/"));
  return "…" + (last.length < most ? last : name.slice(1 - most));
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + ".";

// Only finished work is shown as 100%.
const part = (share, rows) => `${percent(share < 1 ? Math.min(share, 0.99) : 1)} of ${count(rows)}`;

function say(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

// --- tables

// A cell is a text, or {text, className, title, share, more, buttons}; share shows a progress bar before the text,
// more is a second line of texts, and each button is {text, name, press}, with isOpen if it opens something.
function cell(label, value) {
  const td = document.createElement("td");
  const {text, className, title, share, more, buttons} = typeof value === "object" ? value : {text: value};
  td.dataset.label = label;
  if (text === "–" || (text === "" && !buttons?.length)) td.className = "none";
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
  td.append(content, ...(buttons ?? []).map(button));
  for (const line of (more ?? []).filter((each) => each)) {
    const small = document.createElement("small");
    small.append(line);
    td.append(" ", small);
  }
  return td;
}

function button({text, name, press, isOpen}) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.dataset.name = name;
  if (isOpen !== undefined) made.setAttribute("aria-expanded", isOpen);
  made.addEventListener("click", press);
  return made;
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
  const focused = byId(id).contains(document.activeElement) ? document.activeElement.dataset.name : undefined;
  byId(id).replaceChildren(head, body);
  const same = [...byId(id).querySelectorAll("button")].find(({dataset}) => focused && dataset.name === focused);
  if (same) same.focus();
}

const names = (...all) =>
  all.map((name) => (name.startsWith("#") ? {name: name.slice(1), number: true} : {name}));

// --- actions of the admin

async function ask(path, body) {
  const headers = {authorization: `Bearer ${key}`, ...(body && {"content-type": "application/json"})};
  const options = {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body)};
  const reply = await fetch(path, {...options, signal: AbortSignal.timeout(30000)});
  const found = await reply.json();
  if (!reply.ok) throw new Error(found.error);
  return found;
}

// Shows the outcome of an action.
function tell(text, className) {
  byId("outcome").hidden = !text;
  byId("outcome").className = className;
  say("outcome", text);
}

// A button for an action on a job, run or worker; it asks once before.
function action(verb, what, id, question) {
  const press = () => {
    say("question-text", question);
    say("yes", verb);
    byId("yes").onclick = async () => {
      byId("question").close();
      try {
        tell((await ask("api/actions", {action: what, id})).text, "notice told");
      } catch (error) {
        tell(`${verb}: ${error.message}`, "notice");
      }
      failing = null;
      look();
    };
    byId("question").showModal();
  };
  return {text: verb, name: `${what} ${id}`, press};
}

// The last cell of a row has the admin's actions; without a key, rows do not have this cell.
const actions = (...buttons) => (key ? [{text: "", buttons}] : []);
const withActions = (columns) => (key ? [...columns, {name: "Action"}] : columns);

async function showJobs(cluster) {
  byId("jobs-section").hidden = !key;
  const now = cluster.queues.reduce((sum, queue) => sum + queue.failed, cluster.set_aside.length);
  if (!key || failing === now) return;
  let jobs;
  try {
    ({jobs} = await ask("api/jobs.json"));
  } catch (error) {
    tell(sentence(error.message), "notice");
    return;
  }
  failing = now;
  const rows = jobs.map((job) => ({cells: [
    {text: job.id.slice(0, 12), title: job.id},
    job.queue,
    {text: job.state, className: "bad"},
    {text: job.reason.slice(0, 300), title: job.reason, more: [job.final && `It cannot be retried: ${job.final}.`]},
    job.at === null ? "–" : age(cluster.at - job.at) + " ago",
    ...actions(
      ...(job.final ? [] : [action("Retry", "retry", job.id, `Put job ${job.id} back into queue ${job.queue}, for one more attempt?`)]),
      action("Clear", "clear", job.id, `Remove job ${job.id} from this list?`)),
  ]}));
  table("jobs", withActions(names("Job", "Queue", "State", "Reason", "#When")), rows, "No failed or set-aside jobs.");
}

function manage(given) {
  key = given;
  failing = null;
  say("manage", key ? "Stop managing" : "Manage");
  tell("", "notice");
  look();
}

byId("manage").addEventListener("click", () => (key ? manage(null) : byId("sign-in").showModal()));
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  try {
    await ask("api/jobs.json");
    say("key-error", "");
    byId("sign-in").close();
    manage(key);
  } catch (error) {
    key = null;
    say("key-error", sentence(error.message));
  }
});
for (const each of document.querySelectorAll("[data-close]")) {
  each.addEventListener("click", () => each.closest("dialog").close());
}

const errors = (n) => ({text: count(n), className: n ? "bad" : ""});

const timeLeft = ({seconds_left}) => seconds_left === null ? "running" : age(Math.ceil(seconds_left)) + " left";

function runRow(run, now, over) {
  const share = run.rows ? run.rows_done / run.rows : undefined;
  const done = run.rows === null ? counted(run.rows_done, "row")
    : part(share, run.rows);
  const quiet = run.quiet_seconds > QUIET_SECONDS;
  const state = over ? {text: "finished, cancelled or expired"}
    : quiet ? {text: "no result for " + age(run.quiet_seconds), className: "warn"}
    : {text: timeLeft(run)};
  return {
    className: over ? "over" : "",
    cells: [
      {text: run.id.slice(0, 12), title: run.id},
      {text: ending(run.model), title: run.model},
      run.queue,
      {text: done, share},
      errors(run.row_errors),
      rate(run.rows_per_second),
      state,
      age(now - run.created),
      ...actions(...(over ? [] : [cancel(run)])),
    ],
  };
}

const cancel = ({id}) =>
  action("Cancel", "cancel", id, `Cancel run ${id}? Its waiting chunks leave the queue.`);

const ENDS = {done: "good", failed: "bad", cancelled: "warn"};

// A row for a run that processes of an extension carry out.
function seenRow(run, now) {
  const share = run.rows ? run.rows_done / run.rows : undefined;
  const runs = run.state === "running";
  const state = {text: runs ? timeLeft(run) : run.state, className: ENDS[run.state] ?? "", title: run.reason,
    more: [runs && run.runner ? `on ${run.runner}` : "", run.reason.slice(0, 160)]};
  return {
    className: run.state in ENDS ? "over" : "",
    cells: [
      {text: run.id.slice(0, 12), title: run.id, more: [run.output && ending(run.output)]},
      {text: ending(run.model), title: run.model},
      run.queue || "–",
      run.rows === null ? "–" : {text: part(share, run.rows), share},
      errors(run.row_errors),
      rate(runs ? run.rows_per_second : null),
      state,
      age(now - run.created),
      ...actions(...(run.state in ENDS ? [] : [cancel(run)])),
    ],
  };
}

function showRuns(cluster, seen, lines) {
  const current = new Map(cluster.runs.map((run) => [run.id, run]));
  const all = cluster.runs_total <= cluster.page_size; // otherwise a run may be on another page
  for (const [id, run] of known) {
    if (all && !current.has(id) && !ended.has(id)) ended.set(id, {run, at: Date.now()});
  }
  for (const [id, {at}] of ended) {
    if (!all || current.has(id) || Date.now() - at > SHOW_ENDED_MS) ended.delete(id);
  }
  known = current;
  const rows = cluster.runs.map((run) => runRow(run, cluster.at, false));
  for (const {run} of ended.values()) rows.push(runRow(run, cluster.at, true));
  if (!page) rows.push(...seen.map((run) => seenRow(run, cluster.at)));
  const columns = names("Run", "Model", "Queue", "Done", "#Row errors", "#Rows/s", "State", "#Age");
  table("runs", withActions(columns), rows, "No runs.");
  byId("lines").replaceChildren(...lines.map(line));
  const pages = Math.max(1, Math.ceil(cluster.runs_total / cluster.page_size));
  byId("pages").hidden = pages === 1 && page === 0;
  say("page", `Page ${page + 1} of ${pages}, ${counted(cluster.runs_total, "run")}`);
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
  return report?.doing ? {...found, text: `${found.text}, ${report.doing}`, title: report.doing_words} : found;
}

const URGENCY = {draining: 3, drained: 3, foreign: 4};
const isWell = (worker) => urgency(worker) === 5;

function urgency({state, report, is_slow}) {
  return state === "lost" ? 0 : report?.refusals.length ? 1 : is_slow ? 2 : URGENCY[state] ?? 5;
}

// Sorts names as people do, with 2 before 10.
const natural = new Intl.Collator("en", {numeric: true}).compare;
const hostOf = (worker) => worker.host ?? "unknown";

function bytes(n) {
  return n >= 2 ** 30 ? (n / 2 ** 30).toFixed(1) + " GiB" : count(n / 2 ** 20) + " MiB";
}

// Lines with the figures of a worker's GPU and its memory.
function graphics(gpu) {
  if (!gpu) return [];
  const told = [gpu.use === null ? "" : percent(gpu.use), gpu.celsius === null ? "" : Math.round(gpu.celsius) + " °C"];
  const memory = `${(gpu.memory_used / 2 ** 30).toFixed(1)} of ${bytes(gpu.memory_size)}`;
  return [["GPU", told.filter((part) => part).join(", ")].join(" "), memory];
}

function hits({model_hits, model_loads}) {
  return model_hits + model_loads ? percent(model_hits / (model_hits + model_loads)) : "–";
}

function ordersTo({name, state}) {
  if (state === "drained" || state === "draining") {
    return [action("Resume", "resume", name, `Let worker ${name} take chunks again?`)];
  }
  const question = `Drain worker ${name}? It finishes its chunks, and takes no more until it is resumed.`;
  return state === "idle" || state === "busy" ? [action("Drain", "drain", name, question)] : [];
}

function workerRow(worker, rates) {
  const {name, queues, beat_seconds, report, pid} = worker;
  const models = report ? report.models : [];
  return {cells: [
    {text: name, title: pid === null ? name : `${name}, process ${pid}`, more: [queues.join(", ")]},
    hostOf(worker),
    stateOf(worker),
    {text: report ? models.map((model) => ending(model)).join(", ") || "none yet" : "–",
      title: models.join("\n"), more: [report ? report.device : ""]},
    rate(rates.speeds[name]),
    {text: report ? count(report.pairs) : "–",
      more: [report && report.row_errors ? counted(report.row_errors, "row error") : ""]},
    {text: report && report.cpu !== null ? report.cpu.toFixed(1) + " cores" : "–",
      more: [report && report.resident_bytes ? bytes(report.resident_bytes) : "", ...graphics(report && report.gpu)]},
    report ? hits(report) : "–",
    beat_seconds === null ? "–" : age(beat_seconds) + " ago",
    ...actions(...ordersTo(worker)),
  ]};
}

// One row for the healthy workers of a host; `press` opens and folds it.
function hostRow(host, workers, rates, press) {
  const sum = (figure) => workers.reduce((all, worker) => all + (figure(worker) ?? 0), 0);
  const busy = workers.filter(({state}) => state === "busy").length;
  const states = [busy && `${busy} busy`, workers.length - busy && `${workers.length - busy} idle`].filter((text) => text);
  const models = [...new Set(workers.flatMap(({report}) => report?.models ?? []))];
  return {className: "of-host", cells: [
    {text: "", buttons: [{text: (opened.has(host) ? "▾ " : "▸ ") + states.join(", "), name: host, press, isOpen: opened.has(host)}]},
    host,
    "–",
    {text: models.map((model) => ending(model)).join(", ") || "none yet", title: models.join("\n")},
    rate(sum(({name}) => rates.speeds[name])),
    count(sum(({report}) => report?.pairs)),
    {text: sum(({report}) => report?.cpu).toFixed(1) + " cores", more: [bytes(sum(({report}) => report?.resident_bytes))]},
    "–",
    "–",
    ...actions(),
  ]};
}

function showWorkers(cluster, rates) {
  const workers = [...cluster.workers].sort((one, other) => urgency(one) - urgency(other)
    || natural(hostOf(one), hostOf(other)) || natural(one.name, other.name));
  const well = workers.filter(isWell);
  const rows = workers.filter((worker) => !isWell(worker)).map((worker) => workerRow(worker, rates));
  for (const host of new Set(well.map(hostOf))) {
    const here = well.filter((worker) => hostOf(worker) === host);
    const folds = well.length > SINGLE_WORKERS && here.length > 1;
    const press = () => {
      if (!opened.delete(host)) opened.add(host);
      showWorkers(cluster, rates);
    };
    if (folds) rows.push(hostRow(host, here, rates, press));
    if (!folds || opened.has(host)) rows.push(...here.map((worker) => workerRow(worker, rates)));
  }
  const columns = names("Worker", "Host", "State", "Models", "#Pairs/s", "#Pairs", "#Uses", "#Cache hits", "#Heartbeat");
  table("workers", withActions(columns), rows, "No workers. Start some with score-workers.");
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
  const waits = cluster.queues.reduce((sum, queue) => sum + queue.waiting, 0);
  byId("alive").className = !alive && waits ? "bad" : states.lost || drained || slow ? "warn" : "";
  const parts = [[states.busy, "busy"], [drained, "drained"], [states.lost, "lost"], [slow, "slow"], [states.foreign, "cannot score"]];
  const told = parts.filter(([n], place) => n || !place).map(([n, what]) => `${n} ${what}`.replaceAll(" ", "\u00a0"));
  say("alive-more", told.join(", "));
  say("waiting", count(waits));
  const oldest = Math.max(...cluster.queues.map((queue) => queue.oldest_seconds ?? -1), -1);
  say("waiting-more", oldest < 0 ? "none" : "oldest " + age(oldest));
  for (const [id, latency] of [["request-latency", rates.request_latency], ["bulk-latency", rates.bulk_latency]]) {
    say(id, latency ? duration(latency[0]) : "–");
    say(id + "-more", latency ? `p99 ${duration(latency[2])}` : "none lately");
  }
  say("padding-more", "of computed tokens");
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
const WHOLE = Array.from({length: 30}, (_, place) => [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3));
const compact = new Intl.NumberFormat("en", {notation: "compact"});

function span(self, low, high) {
  const end = high ?? Date.now() / 1000;
  return [Math.min(low ?? end, end - LEAST_SECONDS), end];
}

function plot(id, empty, series, incrs) {
  const box = byId(id);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = {stroke: colour("--soft"), grid: {stroke: colour("--line"), width: 1}, ticks: {show: false}};
  const drawn = new uPlot({
    width: box.clientWidth,
    height: 170,
    cursor: {show: false},
    legend: {show: series.length > 1, live: false},
    scales: {x: {range: span}, y: {range: (self, low, high) => [0, (high || 1) * 1.1]}},
    axes: [
      {...axis, size: 28, space: 70, incrs: [10, 30, 60, 120, 300],
        values: (self, ticks, place, space, step) => ticks.map((at) => clock(at, step < 60))},
      {...axis, size: 48, incrs, values: (self, ticks) => ticks.map((n) => compact.format(n))},
    ],
    series: [{}, ...series.map(([, label], place) => ({
      label, stroke: colour(COLOURS[place]), width: 2, points: {show: false},
      fill: series.length === 1 ? colour(COLOURS[place]) + "22" : undefined,
    }))],
  }, [[], ...series.map(() => [])], box);
  const why = line("");
  why.className = "why";
  box.append(why);
  const observer = new ResizeObserver(() => drawn.setSize({width: box.clientWidth, height: 170}));
  observer.observe(box);
  plots.push({box, drawn, series, empty, why, observer});
}

const clock = (at, seconds) => new Date(at * 1000).toLocaleTimeString("en-GB",
  {hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined});

function makePlots() {
  for (const {drawn, why, observer} of plots.splice(0)) {
    observer.disconnect();
    drawn.destroy();
    why.remove();
  }
  const quantiles = (of) => ["p50", "p95", "p99"].map((name) => [`${of}_${name}`, name]);
  plot("plot-pairs", "No speed is known yet.", [["pairs_per_second", "pairs/s"]]);
  plot("plot-waiting", "Nothing is known yet.", [["waiting", "waiting"]], WHOLE);
  plot("plot-requests", "No requests lately.", quantiles("request"));
  plot("plot-bulk", "No bulk work lately.", quantiles("bulk"));
}

const hasValues = ({drawn}) => drawn.data.slice(1).flat().some((value) => value !== null);

// Shows the plots; an empty plot says why it is empty.
function showPlots(data, away) {
  for (const {drawn, series} of data ? plots : []) drawn.setData([data.at, ...series.map(([name]) => data[name])]);
  const isAway = away && !plots.some(hasValues);
  for (const each of plots) {
    const {box, drawn, series, empty, why} = each;
    why.textContent = hasValues(each) ? "" : isAway ? away : empty;
    const last = series.map(([, label], place) => `${label} ${rate(drawn.data[place + 1].at(-1))}`).join(", ");
    box.setAttribute("aria-label", `Plot of the last minutes; now ${why.textContent || last}`);
  }
}

// --- the loop

// The verdict on the cluster.
function showVerdict({sentence, faults}) {
  const lines = faults.map((fault) => line(`${fault.text}: ${fault.remedy}.`));
  const others = lines.splice(SHOWN_FAULTS);
  showNotice(lines, others, `${sentence}.`, faults.length ? "trouble" : "live");
  lastGood = new Date().toLocaleTimeString("en-GB");
  say("checked", lastGood);
  for (const mark of document.querySelectorAll(".stale")) mark.textContent = "";
}

// While the state of the cluster cannot be read, the cards say why, and how old their figures are.
function showAway(short, series, text) {
  showPlots(series, `${short}.`);
  const since = lastGood ? `${short}, as of ${lastGood}` : short;
  showNotice([line(text)], [], lastGood ? `${short} since ${lastGood}.` : `${short}.`, "away");
  say("checked", "");
  for (const mark of document.querySelectorAll(".stale")) mark.textContent = since;
  for (const figure of document.querySelectorAll(".tiles dd")) {
    const isMore = figure.classList.contains("more");
    figure.textContent = isMore ? short : "–";
    if (!isMore) figure.className = "";
  }
  if (!lastGood) byId("stages").textContent = "";
}

function showNotice(lines, others, sentence, state) {
  byId("notice").hidden = !lines.length;
  byId("faults").replaceChildren(...lines);
  byId("more-faults").hidden = !others.length;
  say("more-faults-title", `and ${counted(others.length, "other fault")}`);
  byId("other-faults").replaceChildren(...others);
  byId("state").className = state;
  say("state", sentence);
  document.querySelector("main").className = state;
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
    const {cluster, has_admin, lines, rates, runs, series, error} = await reply.json();
    byId("manage").hidden = !has_admin;
    if (document.querySelector("td button:active")) { // the button would be replaced while it is pressed
      waiting = setTimeout(look, 200);
      return;
    }
    if (cluster) {
      showPlots(series, "");
      showNow(cluster, rates);
      showStages(rates.stages);
      showQueues(cluster);
      showRuns(cluster, runs, lines);
      showWorkers(cluster, rates);
      showDamaged(cluster);
      showVerdict(cluster.verdict);
      await showJobs(cluster);
    } else {
      showAway("Redis is away", series, `Redis is away: ${error.replace(/\.$/, "")}. Workers and producers wait and go on when it is back.`);
    }
  } catch (error) {
    showAway("No answer", null, `The server of this page does not answer (${error.message}).`);
  }
  waiting = setTimeout(look, EVERY_MS);
}

function turn(by) {
  page = Math.max(0, page + by);
  look();
}

byId("previous").addEventListener("click", () => turn(-1));
byId("next").addEventListener("click", () => turn(1));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  makePlots();
  look();
});
makePlots();
look();
