// Asks for status.json every two seconds. What is shown is at most that old: without an answer every
// number goes, so that nobody reads the figures of a store that is gone.
"use strict";

const PERIOD_MS = 2000;
const PATIENCE_MS = 3000;
const KINDS = ["decode_end", "input_end", "prompt_end", "shared_prefix"];
const ADVICE = {
  evicted: "Evicted before they were asked for again: give the store a larger --capacity, or publish fewer ends (policy).",
  uncommitted: "Asked for before every rank had committed: raise publication_wait_s, or look for a slow or dead rank.",
  domain_mismatch: "The same prefix lies in another cache domain: `backhaul doctor` names the field that differs.",
  hash_mismatch: "The history came back with other tokens: `backhaul explain` shows where it departs.",
};
const at = (id) => document.getElementById(id);
const all = (selector) => document.querySelectorAll(selector);

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

function values(figures) {
  for (const [name, text] of Object.entries(figures)) {
    for (const place of all(`[data-value="${name}"]`)) place.textContent = text;
  }
}

function rows(body, items, columns, empty) {
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
  cell.colSpan = columns;
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
  const reasons = status.not_consumable;
  const most = Math.max(...Object.values(reasons), 0);
  for (const name of Object.keys(reasons)) setAll(name, reasons, most);
  const worst = Object.keys(reasons).find((name) => reasons[name] === most);
  at("advice").textContent = most ? ADVICE[worst] ?? "" : "None so far.";
  const counts = { ...status.funnel, ...reasons };
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
  rows(at("domains"), status.domains.map((one) => [
    [one.id.slice(0, 8), "", `${one.id}: ${one.summary}`],
    [one.clients.map((client) => client.name).join(", ") || "–", "", one.clients.map((client) => `${client.name}, ${time(client.opened_s)} ago`).join("\n")],
    ...KINDS.map((kind) => [count(one.kinds[kind] ?? 0), "n"]),
    [count(one.checkpoints), "n"], [bytes(one.object_bytes), "n"], [time(one.idle_s), "n"],
  ]), 9, `No engine has opened a cache domain yet. Give one "store": "${status.store_uri}" in its kv_connector_extra_config.`);
  rows(at("recent"), status.recent.map((one) => [
    [time(one.age_s)], [one.what], [one.reason], [one.boundary ? count(one.boundary) : "–", "n"],
    [one.kinds.join(", ") || "–"], [one.domain.slice(0, 8)], [count(one.times), "n"],
  ]), 7, "Nothing was evicted, refused or asked for in vain yet.");
}

function lose() {
  lostAt ??= new Date();
  document.body.dataset.state = "unreachable";
  at("state").textContent = `unreachable since ${lostAt.toLocaleTimeString()}; trying again every ${PERIOD_MS / 1000} s`;
  for (const place of all("[data-value], #pool-text")) place.textContent = "–";
  for (const place of all("[data-share], #advice")) place.textContent = "";
  for (const bar of all("[data-bar], #pool-bar")) bar.style.width = "0";
  rows(at("domains"), [], 9, "Unknown while the store is unreachable.");
  rows(at("recent"), [], 7, "Unknown while the store is unreachable.");
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
