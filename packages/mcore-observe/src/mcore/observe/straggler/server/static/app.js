// What the page asks the controller, and what it says about the answers.

import { HeatMap, clock, drawScale, drawTrend, scaleOf } from "./map.js";

const $ = (id) => document.getElementById(id);
const KEY = "mcore-straggler-token";
const MANY = new Intl.NumberFormat("en-US");

let token = sessionStorage.getItem(KEY) || "";
let last = null; // the last answer
let heardAt = 0; // when it came, by this machine's clock
let missed = 0; // answers in a row
let timer = 0;
let turn = 0; // of questions: an answer to an older one is dropped
let choice = 0; // of clicks on a rank, in the same way
let known = null; // { epoch, metrics, hosts, places }
let view = { metric: 0, first: 0, end: 0, how: "worst" };
let table = emptyTable();
let chosen = null; // the answer about one rank
let said = "";
let verdict = "";
let mostRows = 512; // fewer where the answer does not come through
let isPicked = false; // the metric, by hand

function emptyTable() {
  return { next: 0, from: 0, group: 1, rows: 0, times: [], columns: [], spread: { mean: [], sd: [], min: [], median: [], max: [] } };
}

// ---- words

function number(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "unknown";
  const size = Math.abs(value);
  if (!unit && size >= 1e6 && size < 1e15) return new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
  const text =
    size !== 0 && (size < 1e-3 || size >= 1e9)
      ? value.toExponential(2)
      : new Intl.NumberFormat("en-US", { maximumSignificantDigits: size >= 1000 ? Math.ceil(Math.log10(size + 1)) : 4 }).format(value);
  return unit ? `${text} ${unit === "C" ? "\u00b0C" : unit}` : text;
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min${s < 600 && s % 60 ? ` ${s % 60} s` : ""}`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

const times = (value, median) => (value !== null && median ? `${(value / median).toFixed(value / median < 10 ? 2 : 0)}\u00d7` : "");
const place = (one) => [one.host, one.device].filter(Boolean).join(", ");
const since = (unix) => `${clock(unix)}, ${duration(last.now + sinceHeard() - unix)}`;
const sinceHeard = () => (performance.now() - heardAt) / 1000;
const plural = (count, one, many) => `${MANY.format(count)} ${count === 1 ? one : many}`;

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

// ---- questions

async function ask(path, method = "GET") {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { method, headers, credentials: "omit", cache: "no-store", signal: AbortSignal.timeout(15000) });
  if (response.status === 401) {
    askForToken(token ? "That is not the token." : "");
    throw Object.assign(new Error("no token"), { isRefused: true });
  }
  if (response.status === 503) throw Object.assign(new Error("busy"), { isBusy: true });
  if (!response.ok) throw Object.assign(new Error((await response.json()).error), { isRefused: true });
  return response;
}

function askForToken(error) {
  token = "";
  sessionStorage.removeItem(KEY);
  const isNew = $("token-form").hidden;
  $("main").hidden = $("timing").hidden = true;
  $("token-form").hidden = false;
  $("token-error").textContent = error;
  setText("fresh-text", "Waiting for the token");
  $("fresh").dataset.level = "quiet";
  if (isNew || error) $("token").focus();
}

function poll(wait) {
  clearTimeout(timer);
  timer = setTimeout(refresh, wait);
}

async function refresh() {
  const mine = ++turn;
  const query = new URLSearchParams({ metric: view.metric, how: view.how, rows: Math.min(mostRows, map.mostRows()), since: table.next, first: view.first });
  if (view.end) query.set("end", view.end);
  try {
    const answer = await (await ask(`ui/data?${query}`)).json();
    if (mine !== turn) return;
    missed = 0;
    heard(answer);
  } catch (error) {
    if (mine !== turn) return;
    if (error.isRefused) {
      if (!$("token-form").hidden) return;
      restart({ metric: 0, first: 0, end: 0 }); // another job answers at this address
      return;
    }
    if (!error.isBusy) missed += 1;
    if (!error.isBusy && table.next === 0) mostRows = Math.max(64, mostRows / 2);
    if (last) tell();
    else if (missed > 1) tellUnreachable();
    poll(missed > 5 ? 5000 : 1000);
    return;
  }
  const pause = Math.min(10, Math.max(2, (last.every_s || 0) / 4));
  poll(1000 * pause);
}

function restart(changes) {
  Object.assign(view, changes);
  table = emptyTable();
  refresh();
}

function heard(answer) {
  const isOther = last && last.epoch !== answer.epoch;
  [last, heardAt] = [answer, performance.now()];
  if (isOther && table.next) {
    [known, chosen] = [null, null];
    choice++;
    restart({ metric: 0, first: 0, end: 0 });
    return;
  }
  $("token-form").hidden = true;
  $("main").hidden = $("timing").hidden = false;
  $("ranks").hidden = $("aside").hidden = !answer.map;
  if (answer.metrics) learn(answer);
  if (known && !showKnown()) return;
  const isNew = take(answer.map, answer.oldest);
  tell();
  showTiming();
  showScalars();
  showSlow();
  if (isNew) showMap();
  if (chosen && isNew) choose({ rank: chosen.rank });
}

function learn(answer) {
  known = { metrics: answer.metrics, hosts: [], numHosts: new Set(answer.hosts.map(([host]) => host)).size };
  let rank = 0;
  for (const [host, count] of answer.hosts) known.hosts.push([(rank += count), host]);
  showMetrics();
}

// The host of a rank, or the first and last of several.
function hostOf(first, end = first + 1) {
  const of = (rank) => known.hosts.find(([next]) => rank < next)?.[1] ?? "";
  return of(first) === of(end - 1) ? of(first) : `${of(first)} to ${of(end - 1)}`;
}

// Adds the columns of an answer; true if the map has changed.
function take(map, oldest) {
  if (!map) return false;
  const bytes = atob(map.codes);
  const isFirst = table.next === 0;
  if (isFirst) Object.assign(table, { group: map.group, rows: map.rows, from: map.first_report, next: map.first_report });
  else if (map.first_report !== table.next) {
    restart({}); // reports were dropped that this page has not seen
    return false;
  }
  map.times.forEach((time, at) => {
    const column = new Float32Array(map.rows).fill(NaN);
    const step = (map.high[at] - map.low[at]) / 65534;
    for (let row = 0; row < map.rows; row++) {
      const from = 2 * (at * map.rows + row);
      const code = bytes.charCodeAt(from) | (bytes.charCodeAt(from + 1) << 8);
      if (code) column[row] = map.low[at] + (code - 1) * step;
    }
    table.columns.push(column);
    table.times.push(time);
    for (const name of Object.keys(table.spread)) table.spread[name].push(map.spread[name][at]);
  });
  table.next += map.times.length;
  const gone = Math.max(0, oldest - table.from);
  if (gone) {
    for (const list of [table.columns, table.times, ...Object.values(table.spread)]) list.splice(0, gone);
    table.from += gone;
  }
  return isFirst || map.times.length > 0;
}

// ---- the state of the job

function isLate() {
  const age = last.age_s === null ? 0 : last.age_s + sinceHeard();
  return last.every_s !== null && age > 3 * last.every_s + 20;
}

function tellUnreachable() {
  $("main").hidden = false;
  setFresh("bad", "No answer");
  setVerdict("bad", "No answer from the controller", "It answers while the job runs. Is the tunnel open?");
}

function setFresh(level, text) {
  $("fresh").dataset.level = level;
  setText("fresh-text", text);
}

// A screen reader hears it when it changes, not when time passes.
function setVerdict(level, title, text, kind = title) {
  $("verdict").dataset.level = level;
  if (verdict !== kind) setText("verdict-spoken", `${title}. ${text}`);
  verdict = kind;
  setText("verdict-title", title);
  setText("verdict-text", text);
  document.title = `${level === "good" || level === "quiet" ? "" : "\u25cf "}${title}`;
}

function tell() {
  const age = last.age_s === null ? null : last.age_s + sinceHeard();
  const hosts = known ? ` on ${plural(known.numHosts, "host", "hosts")}` : "";
  setText("job", `${plural(last.world_size, "rank", "ranks")}${hosts}`);
  const every = last.every_s === null ? "" : `, usually every ${duration(Math.max(1, last.every_s))}`;
  const report = age === null ? "No report yet" : `Last report ${duration(age)} ago${every}`;
  if (missed > 1) {
    const ago = duration(sinceHeard());
    setFresh("bad", `No answer for ${ago}`);
    setVerdict("bad", "The job is gone", `Its controller has not answered for ${ago}: it has ended, or its first rank cannot be reached. Below is what it reported last.${lastSlow()}`);
  } else if (!last.enabled) {
    setFresh("quiet", report);
    setVerdict("quiet", "Timing is off", last.pending ? "It starts with the next report." : "Switch it on above; it starts with the next report.");
  } else if (age === null) {
    setFresh("quiet", report);
    setVerdict("quiet", "Waiting for the first report", "");
  } else if (isLate()) {
    setFresh("warn", report);
    setVerdict("warn", `No report for ${duration(age)}`, `They came every ${duration(Math.max(1, last.every_s))}. A rank hangs, or all of them do something long: a checkpoint, an evaluation, a compilation.${lastSlow()}`, "late");
  } else {
    setFresh("good", report);
    tellOfRanks();
  }
}

const lastSlow = () => (last.slow.count ? ` ${namedSlow()} when it reported last.` : "");

function namedSlow() {
  const { count, ranks } = last.slow;
  const hosts = new Set(ranks.map((one) => one.host));
  if (count === 1) return `Rank ${ranks[0].rank} was slow`;
  if (count > ranks.length) return `${MANY.format(count)} ranks were slow`;
  return `${MANY.format(count)} ranks ${hosts.size === 1 ? `of ${ranks[0].host}` : `on ${hosts.size} hosts`} were slow`;
}

function tellOfRanks() {
  const { count, ranks } = last.slow;
  if (!count) {
    const { mean, sd } = table.spread;
    const metric = known.metrics[view.metric];
    const at = mean.length - 1;
    const isKnown = at >= 0 && mean[at] !== null;
    const title = last.slow.measuring ? "Measuring: too few reports for a verdict" : "No rank is slow";
    setVerdict(last.slow.measuring ? "quiet" : "good", title, isKnown ? `${metric.label} of the last report: ${number(mean[at], metric.unit)} on average, standard deviation ${number(sd[at], metric.unit)}.` : "");
    return;
  }
  const [worst] = ranks;
  const title = namedSlow().replace(" was ", " is ").replace(" were ", " are ");
  setVerdict("bad", title, `${count === 1 ? "" : `The worst is rank ${worst.rank}: `}${place(worst)}. ${worst.signs.slice(0, 2).map(sign).join("; ")}. Since ${since(worst.since)}.`);
}

function sign(one) {
  const metric = known.metrics[one.metric];
  return `${metric.label} ${number(one.value, metric.unit)}, the median is ${number(one.median, metric.unit)}${one.median ? ` (${times(one.value, one.median)})` : ""}`;
}

function showTiming() {
  const wanted = last.pending === null ? last.enabled : last.pending;
  $("switch").setAttribute("aria-checked", wanted);
  setText("timing-text", last.pending === null ? (last.enabled ? "on" : "off") : `${wanted ? "on" : "off"} after the next report`);
}

$("switch").addEventListener("click", async () => {
  const wanted = $("switch").getAttribute("aria-checked") !== "true";
  $("switch").disabled = true;
  turn++; // an answer from before the click has the old state
  try {
    await ask(wanted ? "on" : "off", "POST");
  } catch (error) {
    if (!error.isRefused) setText("timing-text", "no answer");
  } finally {
    $("switch").disabled = false;
    if ($("token-form").hidden) poll(0);
  }
});

function showScalars() {
  const box = $("scalars");
  box.hidden = !last.scalars.length;
  while (box.children.length > last.scalars.length) box.lastChild.remove();
  last.scalars.forEach((scalar, at) => {
    let card = box.children[at];
    if (!card) {
      card = element("div", undefined, { class: "scalar panel" });
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      for (const [name, value] of Object.entries({ viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" })) svg.setAttribute(name, value);
      const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
      for (const [name, value] of Object.entries({ fill: "none", stroke: "currentColor", "stroke-width": "1.5", "vector-effect": "non-scaling-stroke" })) line.setAttribute(name, value);
      svg.append(line);
      card.append(element("span", "", { class: "name" }), element("span", "", { class: "value" }), svg);
      box.append(card);
    }
    card.children[0].textContent = card.children[0].title = scalar.name;
    card.children[1].textContent = number(scalar.value);
    const points = scalar.points.filter((value) => value !== null);
    const [low, high] = [Math.min(...points), Math.max(...points)];
    const height = (value) => (high > low ? 28 - (26 * (value - low)) / (high - low) : 15);
    const drawn = points.map((value, index) => `${((100 * index) / Math.max(1, points.length - 1)).toFixed(1)},${height(value).toFixed(1)}`);
    card.children[2].firstChild.setAttribute("points", points.length > 1 ? drawn.join(" ") : "");
  });
}

function showSlow() {
  const { count, ranks } = last.slow;
  setText("slow-count", MANY.format(count));
  $("slow-count").dataset.level = count ? "bad" : "quiet";
  $("slow-none").hidden = count > 0;
  $("slow").querySelector("thead").classList.toggle("none", !count);
  const focused = document.activeElement?.dataset.rank;
  const rows = ranks.map((one) => {
    const row = element("tr");
    const button = element("button", one.rank, { type: "button", "data-rank": one.rank, "aria-label": `Rank ${one.rank}: show its line` });
    button.addEventListener("click", () => choose({ rank: one.rank }));
    const rank = element("td");
    rank.append(button);
    const what = element("td", place(one));
    for (const each of one.signs.slice(0, 2)) {
      const metric = known.metrics[each.metric];
      what.append(element("small", `${metric.label} ${number(each.value, metric.unit)}${each.median ? ` (${times(each.value, each.median)})` : ""}`));
    }
    if (one.signs.length > 2) what.append(element("small", `and ${one.signs.length - 2} more`));
    const when = element("td", clock(one.since));
    when.append(element("small", duration(last.now - one.since)));
    row.append(rank, what, when);
    return row;
  });
  $("slow-rows").replaceChildren(...rows);
  if (focused !== undefined) $("slow-rows").querySelector(`[data-rank="${focused}"]`)?.focus();
  $("slow-more").hidden = count <= ranks.length;
  setText("slow-more", `and ${MANY.format(count - ranks.length)} more`);
  $("recovered").hidden = !last.recovered.length;
  $("recovered-rows").replaceChildren(...last.recovered.map((one) => element("li", `Rank ${one.rank} (${place(one)}), ${clock(one.since)} to ${clock(one.until)}`)));
}

// ---- the map

function showMetrics() {
  const kept = $("metrics").querySelector("legend");
  const labels = known.metrics.map((metric, at) => {
    const label = element("label");
    const input = element("input", undefined, { type: "radio", name: "metric", value: at });
    input.checked = at === view.metric;
    input.addEventListener("change", () => {
      isPicked = true;
      restart({ metric: at });
    });
    label.append(input, element("span", metric.label, { title: metric.label }));
    return label;
  });
  $("metrics").replaceChildren(kept, ...labels);
}

// Hides the metrics that no rank knows; false if the map has to ask for another one.
function showKnown() {
  const labels = [...$("metrics").querySelectorAll("label")];
  labels.forEach((label, at) => (label.hidden = !last.known[at] && at !== view.metric));
  const other = last.known.indexOf(true);
  if (last.known[view.metric] || other < 0 || isPicked) return true;
  labels[other].firstChild.checked = true;
  restart({ metric: other });
  return false;
}

const ranksOf = (row) => [view.first + row * table.group, Math.min(view.first + (row + 1) * table.group, view.end || last.world_size)];

function rowName(row) {
  const [first, end] = ranksOf(row);
  const ranks = end - first > 1 ? `ranks ${first} to ${end - 1}` : `rank ${first}`;
  return `${ranks} (${hostOf(first, end)})`;
}

const map = new HeatMap($("map"), {
  move(cell, isSpoken) {
    const text = cell ? cellText(cell) : "";
    setText("cell", text);
    if (isSpoken) setText("spoken", text);
    showTrend();
  },
  choose(cell) {
    if (!table.columns.length) return; // other ranks are on their way
    const [first, end] = ranksOf(cell.row);
    choose({ first, end, report: table.from + cell.column });
  },
  zoom(from, to) {
    zoomTo(ranksOf(from)[0], ranksOf(to)[1]);
  },
  keyZoom(key) {
    if (key === "Escape") zoomTo(0, last.world_size);
    else zoomBy(key === "-" ? 4 : 0.25);
  },
});

function cellText({ column, row }) {
  if (!table.columns[column]) return "";
  const metric = known.metrics[view.metric];
  const value = table.columns[column][row];
  const median = table.spread.median[column];
  const of = table.group > 1 ? `, ${view.how === "worst" ? "worst" : "median"} of ${table.group}` : "";
  const ratio = value === value && median ? `, ${times(value, median)} the median` : "";
  return `${clock(table.times[column])}, ${rowName(row)}: ${number(value, metric.unit)}${ratio}${of}`;
}

function zoomTo(first, end) {
  const world = last.world_size;
  const from = Math.max(0, Math.min(first, world - 1));
  const to = Math.min(world, Math.max(end, from + 1));
  map.cursor = null;
  restart({ first: from, end: from === 0 && to === world ? 0 : to });
}

function zoomBy(factor) {
  const [first, end] = [view.first, view.end || last.world_size];
  const size = Math.min(last.world_size, Math.max(Math.min(4, last.world_size), Math.round((end - first) * factor)));
  const [middle] = map.cursor ? ranksOf(map.cursor.row) : last.slow.count && factor < 1 ? [last.slow.ranks[0].rank] : [(first + end) / 2];
  const whole = Math.min(8, size); // ranks of a host stay together
  const from = Math.max(0, Math.min(last.world_size - size, whole * Math.round((middle - size / 2) / whole)));
  zoomTo(from, from + size);
}

$("zoom-in").addEventListener("click", () => zoomBy(0.25));
$("zoom-out").addEventListener("click", () => zoomBy(4));
$("zoom-all").addEventListener("click", () => zoomTo(0, last.world_size));
$("how").addEventListener("change", () => restart({ how: $("how").value }));

function showMap() {
  const metric = known.metrics[view.metric];
  const end = view.end || last.world_size;
  const isAll = view.first === 0 && end === last.world_size;
  const each = table.group > 1 ? `, ${table.group} in a row` : "";
  setText("range", `${isAll ? "All ranks" : `Ranks ${view.first} to ${end - 1}`}${each}`);
  $("how").hidden = table.group === 1;
  $("zoom").hidden = last.world_size <= 8;
  $("zoom-in").disabled = end - view.first <= 4;
  $("zoom-out").disabled = $("zoom-all").disabled = isAll;
  const scale = scaleOf(table.columns, metric.is_low_bad);
  $("legend").hidden = !scale;
  const slow = last.slow.ranks.map((one) => Math.floor((one.rank - view.first) / table.group));
  map.marks = [...new Set(slow)].filter((row) => row >= 0 && row < table.rows);
  map.show({
    columns: scale ? table.columns : [],
    rows: table.rows,
    labels: (row) => String(ranksOf(row)[0]),
    scale,
  });
  if (scale) {
    setText("legend-low", number(Math.max(scale.good, Math.min(0, ...table.spread.min)), metric.unit).replace(/(\.\d)\d+/, "$1"));
    setText("legend-high", number(scale.bad, metric.unit).replace(/(\.\d)\d+/, "$1"));
    drawScale($("scale"));
    if (map.cursor) setText("cell", cellText(map.cursor));
  } else setText("cell", `No rank has told its ${metric.label.toLowerCase()}.`);
  $("map").setAttribute("aria-label", `${metric.label} of ${isAll ? "all ranks" : `ranks ${view.first} to ${end - 1}`} by report`);
  showTrend();
}

function showTrend() {
  if (!table.times.length) return;
  const metric = known.metrics[view.metric];
  let line = null;
  if (chosen && chosen.metric === view.metric) line = table.times.map((_, at) => chosen.values[table.from + at - chosen.first_report] ?? null);
  drawTrend($("trend"), { times: table.times, spread: table.spread, line, across: map.columnWidth(), cursor: map.cursor, format: (value) => number(Number(value.toPrecision(6))) });
  $("key-rank").hidden = !line;
  if (line) setText("key-rank-text", `rank ${chosen.rank}`);
  const at = table.times.length - 1;
  if (at >= 0) {
    const [mean, sd] = [table.spread.mean[at], table.spread.sd[at]].map((value) => number(value, metric.unit));
    $("trend").setAttribute("aria-label", `Mean and spread of ${metric.label}; in the last report ${mean}, standard deviation ${sd}`);
  }
}

// ---- one rank

async function choose(which) {
  const mine = ++choice;
  const query = new URLSearchParams({ metric: view.metric, ...which });
  try {
    const answer = await (await ask(`ui/rank?${query}`)).json();
    if (mine !== choice) return;
    chosen = answer;
  } catch (error) {
    if (error.isRefused && mine === choice) setText("one-place", error.message);
    return;
  }
  setText("one-title", `Rank ${chosen.rank}`);
  const slow = last.slow.ranks.find((one) => one.rank === chosen.rank);
  setText("one-place", `${place(chosen)}${slow ? `. Slow since ${since(slow.since)}` : ""}`);
  const rows = chosen.latest.flatMap(([own, median], at) => {
    if (own === null && median === null) return [];
    const metric = known.metrics[at];
    const row = element("tr");
    row.append(element("td", metric.label), element("td", number(own, metric.unit)), element("td", number(median, metric.unit)), element("td", own === null ? "" : times(own, median)));
    if (slow && slow.signs.some((one) => one.metric === at)) row.dataset.level = "bad";
    return [row];
  });
  $("one-rows").replaceChildren(...rows);
  $("one-table").hidden = !rows.length;
  const text = `Rank ${chosen.rank}, ${place(chosen)}`;
  if (said !== text) setText("spoken", (said = text));
  showTrend();
}

$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  choose({ rank: $("find-rank").value });
});

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value;
  sessionStorage.setItem(KEY, token);
  $("token").value = "";
  refresh();
});

// ---- time passes, windows change

setInterval(() => last && !$("main").hidden && tell(), 1000);
document.addEventListener("visibilitychange", () => document.hidden || poll(0));
const redraw = () => table.times.length && showMap();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let size = "";
new ResizeObserver(() => {
  const now = `${$("map").clientWidth} ${innerHeight} ${devicePixelRatio}`;
  if (now !== size && table.times.length) redraw();
  size = now;
}).observe($("ranks"));
refresh();
