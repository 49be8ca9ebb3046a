// The devices, as tiles in a group for each server. A group that is closed has no tiles: a pool of a thousand servers
// is a thousand lines until somebody opens one.

import { el, keyed, meter, setAttribute, setHidden, setMeter, setText } from "./dom.js";
import { bytes, duration, matches, serverWord, short, wordsOf } from "./model.js";

const OPEN_UP_TO = 24; // servers: a pool this small begins with all groups open
const SHOWN = 1000; // groups at most; the filter finds the others

const chosen = new Map(); // by server: whether somebody has opened or closed it
let openByDefault; // as the first look at the pool decides, or as "Open all" says

export function openAll(open) {
  chosen.clear();
  openByDefault = open;
}

const isOpen = (name) => chosen.get(name) ?? openByDefault;

function makeHolder() {
  const text = el("span", {});
  return { node: el("li", {}, text), text };
}

function updateHolder(row, lease) {
  const aside = lease.state === "suspended" ? ", put aside" : "";
  const whose = lease.tenant ? `${lease.tenant}: ` : "";
  setText(row.text, lease.holder === "in use" ? `in use by another tenant${aside}` : `${whose}${lease.holder}${aside}`);
  setAttribute(row.node, "title", `lease ${short(lease.id)}`);
}

function makeTile({ device }) {
  const title = el("h4", {}, `GPU ${device.ordinal}`);
  const state = el("span", { class: "state" });
  const name = el("p", { class: "model" });
  const load = meter("Load");
  const memory = meter("Memory");
  const facts = el("p", { class: "facts" });
  const problem = el("p", { class: "error" });
  const holders = el("ul", { class: "holders" });
  const node = el("li", { class: "tile" }, el("div", { class: "head" }, title, state), name, load.node, memory.node,
    facts, problem, holders);
  return { node, state, name, load, memory, facts, problem, holders };
}

function factsOf(sample) {
  const facts = [];
  if (sample?.temperatureC !== undefined) facts.push(`${sample.temperatureC} °C`);
  if (sample?.powerMilliwatts !== undefined) {
    const limit = sample.powerLimitMilliwatts ? ` of ${Math.round(sample.powerLimitMilliwatts / 1000)}` : "";
    facts.push(`${Math.round(sample.powerMilliwatts / 1000)}${limit} W`);
  }
  if (sample?.usedBytes !== undefined) facts.push(`${bytes(sample.usedBytes)} occupied`);
  return facts.join(" · ");
}

function updateTile(row, { device, state, holders, leased }) {
  setAttribute(row.node, "data-kind", state.kind);
  setText(row.state, state.word);
  setText(row.name, device.name);
  const sample = device.sample;
  setMeter(row.load, sample?.gpuPercent, `${sample?.gpuPercent} %`);
  const most = device.leasableBytes ?? device.memoryBytes;
  setMeter(row.memory, (100 * leased) / most, `${bytes(leased)} of ${bytes(most)} leased`);
  setText(row.facts, factsOf(sample));
  setText(row.problem, device.problem);
  keyed(row.holders, holders, (lease) => lease.id, makeHolder, updateHolder);
}

function makeGroup(server, act) {
  const id = `server-${CSS.escape(server.name)}`;
  const toggle = el("button", { type: "button", class: "toggle", "aria-controls": id });
  const word = el("span", { class: "state" });
  const counts = el("span", { class: "counts" });
  const note = el("p", { class: "note" });
  const tiles = el("ul", { class: "tiles", id });
  const buttons = ["cordon", "uncordon", "drain"].map((what) => {
    const text = what[0].toUpperCase() + what.slice(1);
    const label = `${text} server ${server.name}`;
    const on = { click: () => act(what, row.server) };
    return el("button", { type: "button", "data-order": what, "aria-label": label, on }, text);
  });
  const actions = el("span", { class: "actions" }, ...buttons);
  const node = el("section", { class: "server", "data-server": server.name },
    el("div", { class: "head" }, el("h3", {}, toggle), word, counts, actions), note, tiles);
  const row = { node, toggle, word, counts, note, tiles, actions, buttons, server };
  toggle.addEventListener("click", () => {
    chosen.set(row.server.name, !isOpen(row.server.name));
    updateGroup(row, row.server, row.view);
  });
  return row;
}

function noteOf(server, drain) {
  const notes = [];
  if (server.cordoned) {
    const by = server.cordonedBy ? ` by ${server.cordonedBy}` : "";
    const reason = server.cordonReason ? `: ${server.cordonReason}` : "";
    notes.push(`cordoned for ${duration(1000 * server.cordonedSeconds)}${by}${reason}`);
  }
  if (!server.alive && !server.absent) notes.push(`silent for ${duration(server.lastBeatMs)}`);
  if (drain) notes.push(drain);
  for (const one of server.leftOut) notes.push(one);
  return notes.join("; ");
}

function updateGroup(row, server, view) {
  row.server = server;
  row.view = view;
  const open = isOpen(server.name);
  const { free, all, used, aside } = server.counts;
  setText(row.toggle, server.name);
  setAttribute(row.toggle, "aria-expanded", String(open));
  setText(row.word, serverWord(server));
  setAttribute(row.node, "data-kind", serverWord(server) === "in service" ? "free" : "out");
  setText(row.counts, `${free} of ${all} free${used ? `, ${used} in use` : ""}${aside ? `, ${aside} put aside` : ""}`);
  const note = noteOf(server, view.drains.get(server.name));
  setText(row.note, note);
  setHidden(row.note, note === "");
  setHidden(row.actions, !view.self.may.includes("cordon"));
  for (const button of row.buttons) {
    const what = button.dataset.order;
    setHidden(button, what === "cordon" ? server.cordoned : what === "uncordon" ? !server.cordoned : server.absent);
    button.disabled = view.stale || view.busy.has(server.name);
  }
  setHidden(row.tiles, !open);
  keyed(row.tiles, open ? server.tiles : [], (tile) => tile.device.ordinal, makeTile, updateTile);
}

function textOf(server) {
  if (server.text === undefined)
    server.text = [server.name, serverWord(server), ...server.tiles.flatMap(({ device, state, holders }) =>
      [`gpu ${device.ordinal}`, device.name, device.uuid, state.word,
        ...holders.map((one) => `${one.tenant} ${one.holder}`)])].join("\n").toLowerCase();
  return server.text;
}

// view: {self, stale, busy, drains}; act(what, server): an operator's order.
export function showServers(parent, more, servers, filter, view, act) {
  openByDefault ??= servers.length <= OPEN_UP_TO;
  const words = wordsOf(filter);
  const found = words.length === 0 ? servers : servers.filter((server) => matches(words, textOf(server)));
  keyed(parent, found.slice(0, SHOWN), (server) => server.name, (server) => makeGroup(server, act),
    (row, server) => updateGroup(row, server, view));
  setHidden(more, found.length !== 0 && found.length <= SHOWN);
  setText(more, servers.length === 0 ? "No server has joined."
    : found.length === 0 ? "There is no server like that."
      : `${found.length - SHOWN} more servers: find them by name.`);
}
