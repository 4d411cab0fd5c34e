// Asks for status.json every two seconds. What is shown is at most that old: without an answer every
// number goes, so that nobody reads the figures of a store that is gone.
"use strict";

const PERIOD_MS = 2000;
const PATIENCE_MS = 3000;
const at = (id) => document.getElementById(id);
const all = (selector) => document.querySelectorAll(selector);

let kinds = [];
let instance = null;
let restarted = "";
let lostAt = null;

function count(n) {
  return n.toLocaleString("en-US").replaceAll(",", " ");
}

function bytes(n) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (n >= size) return (n / size).toFixed(1) + " " + unit;
  }
  return n + " B";
}

function time(s) {
  if (s < 60) return Math.round(s) + " s";
  if (s < 3600) return Math.floor(s / 60) + " m " + Math.floor(s % 60) + " s";
  if (s < 86400) return Math.floor(s / 3600) + " h " + Math.floor((s % 3600) / 60) + " m";
  return Math.floor(s / 86400) + " d " + Math.floor((s % 86400) / 3600) + " h";
}

function setAll(name, values, whole) {
  for (const bar of all(`[data-bar="${name}"]`)) bar.style.width = whole ? (100 * values[name]) / whole + "%" : "0";
  for (const share of all(`[data-share="${name}"]`)) share.textContent = whole ? Math.round((100 * values[name]) / whole) + " %" : "";
}

function words(name) {
  return name.replaceAll("_", " ");
}

function element(tag, data = {}) {
  const made = document.createElement(tag);
  Object.assign(made.dataset, data);
  return made;
}

// One row for each name that the document carries; made once, so that nothing moves afterwards.
function bars(box, names, prefix = "") {
  if (box.children.length === names.length) return;
  box.replaceChildren(...names.map((name) => {
    const [row, label, track] = ["div", "span", "i"].map((tag) => element(tag));
    row.className = "row";
    label.textContent = words(name);
    track.append(element("b", { bar: prefix + name }));
    row.append(label, track, element("data", { value: prefix + name }), element("data", { share: prefix + name }));
    return row;
  }));
}

function columns(names) {
  if (kinds.length === names.length) return;
  kinds = names;
  for (const old of all(".kind")) old.remove();
  at("kinds-before").before(...names.map((name) => {
    const head = element("th");
    head.scope = "col";
    head.className = "n kind";
    head.textContent = words(name);
    return head;
  }));
}

function prefixed(figures, prefix) {
  return Object.fromEntries(Object.entries(figures).map(([name, n]) => [prefix + name, n]));
}

function values(figures) {
  for (const [name, text] of Object.entries(figures)) {
    for (const place of all(`[data-value="${name}"]`)) place.textContent = text;
  }
}

function rows(body, items, empty) {
  body.replaceChildren(...items.map((item) => {
    const row = document.createElement("tr");
    for (const [text, className, title] of item) {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (className) cell.className = className;
      if (title) cell.title = title;
      row.append(cell);
    }
    return row;
  }));
  if (items.length) return;
  const cell = document.createElement("td");
  cell.colSpan = body.parentElement.tHead.rows[0].cells.length;
  cell.className = "empty";
  cell.textContent = empty;
  const row = document.createElement("tr");
  row.append(cell);
  body.append(row);
}

function show(status) {
  if (instance && instance !== status.instance_id) restarted = ", restarted since this page was opened";
  instance = status.instance_id;
  lostAt = null;
  document.body.dataset.state = "live";
  at("state").textContent = `version ${status.version}, up ${time(status.uptime_s)}, instance ${status.instance_id}${restarted}`;
  for (const name of Object.keys(status.funnel)) setAll(name, status.funnel, status.funnel.lookups);
  const candidates = prefixed(status.candidates, "candidates.");
  bars(at("candidates"), Object.keys(status.candidates), "candidates.");
  for (const name of Object.keys(candidates)) setAll(name, candidates, candidates["candidates.known"]);
  const reasons = status.not_consumable;
  bars(at("reasons"), Object.keys(reasons));
  const total = Object.values(reasons).reduce((sum, n) => sum + n, 0);
  for (const name of Object.keys(reasons)) setAll(name, reasons, total);
  const worst = Object.keys(reasons).reduce((a, b) => (reasons[b] > reasons[a] ? b : a));
  at("advice").textContent = total ? `${words(worst)}: ${status.advice[worst]}` : "None so far.";
  const counts = { ...status.funnel, ...candidates, ...reasons };
  for (const name of ["checkpoints", "objects", "leases", "publications", "evictions", "evicted_unused", "refused_objects", "checkpoints_created"]) counts[name] = status[name];
  values(Object.fromEntries(Object.entries(counts).map(([name, n]) => [name, count(n)])));
  values({
    evicted_bytes: bytes(status.evicted_bytes),
    evicted_lifetime: status.evictions ? time(status.evicted_lifetime_s) : "–",
  });
  const share = (100 * status.used_bytes) / status.capacity_bytes;
  at("pool-bar").style.width = share + "%";
  at("pool-bar").parentElement.classList.toggle("full", share >= 98);
  at("pool-text").textContent = `${bytes(status.used_bytes)} of ${bytes(status.capacity_bytes)}, ${share.toFixed(share < 10 ? 1 : 0)} %`;
  columns(status.kinds);
  rows(at("domains"), status.domains.map((one) => [
    [one.id.slice(0, 8), "", `${one.id}: ${one.summary}`],
    [one.clients.map((client) => client.name).join(", ") || "–", "", one.clients.map((client) => `${client.name}, ${time(client.opened_s)} ago`).join("\n")],
    ...kinds.map((kind) => [count(one.kinds[kind] ?? 0), "n"]),
    [count(one.checkpoints), "n"], [bytes(one.object_bytes), "n"], [time(one.idle_s), "n"],
  ]), `No engine has opened a cache domain yet. Give one "store": "${status.store_uri}" in its kv_connector_extra_config.`);
  rows(at("recent"), status.recent.map((one) => [
    [time(one.age_s)], [one.what], [one.reason], [one.boundary ? count(one.boundary) : "–", "n"],
    [one.kinds.join(", ") || "–"], [one.domain.slice(0, 8)], [count(one.times), "n"],
  ]), "Nothing was evicted, refused or asked for in vain yet.");
}

function lose() {
  lostAt ??= new Date();
  document.body.dataset.state = "unreachable";
  at("state").textContent = `unreachable since ${lostAt.toLocaleTimeString()}; trying again every ${PERIOD_MS / 1000} s`;
  for (const place of all("[data-value], #pool-text")) place.textContent = "–";
  for (const place of all("[data-share], #advice")) place.textContent = "";
  for (const bar of all("[data-bar], #pool-bar")) bar.style.width = "0";
  rows(at("domains"), [], "Unknown while the store is unreachable.");
  rows(at("recent"), [], "Unknown while the store is unreachable.");
}

async function refresh() {
  try {
    const reply = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!reply.ok) throw new Error(String(reply.status));
    show(await reply.json());
  } catch (error) {
    lose();
  }
  setTimeout(refresh, PERIOD_MS);
}

refresh();
