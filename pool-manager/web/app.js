// The pool, as the one sees it whose token this is. Everything shown is from the manager's lists, read again when its
// events say so, and every few seconds beside. Where the manager does not answer, the page says since when.

import { ask, askLeases, keepToken, order, readEvents, Refused, token } from "./api.js";
import { question } from "./dialogs.js";
import { el, keyed, setAttribute, setHidden, setText } from "./dom.js";
import { clock, join, short } from "./model.js";
import { openAll, showServers } from "./servers.js";
import { leaseTable, queueTable } from "./tables.js";

const LOOK_MS = 5000; // between two looks while events come: loads and temperatures
const POLL_MS = 3000; // while none come
const AGAIN_MS = 2000; // while the manager does not answer
const SHARE = 10; // a look that took long is followed by ten times as long without one
// Requests of which the manager is asked why they wait: each has it look at all devices.
const reasons = () => (pool !== null && pool.servers.length > 100 ? 5 : 20);
const $ = (id) => document.getElementById(id);

const view = { self: null, stale: false, busy: new Map(), drains: new Map() };
let pool = null; // as model.js joins it
let seen = null; // when: a Date
let live = false; // events come
let looking = false;
let again = false; // something has happened while it was looked
let timer = 0;

const leases = leaseTable(actOnLease);
const queue = queueTable(actOnLease);
$("leases").append(leases.node);
$("queue").append(queue.node);

function show() {
  setHidden($("main"), pool === null);
  setHidden($("sign-out"), token() === "");
  setHidden($("stale"), !view.stale);
  setText($("stale"), !view.stale ? ""
    : seen === null ? "The manager does not answer. Trying again…"
      : `The manager has not answered since ${clock(seen)}. What is shown is from then. Trying again…`);
  setAttribute($("link"), "data-link", view.stale ? "stale" : live ? "live" : "polling");
  setText($("link"), view.stale ? "not connected" : pool === null ? "" : live ? "live" : "updated every few seconds");
  if (pool === null) return;
  const { self } = pool;
  setText($("who"), self.tokens ? whoIs(self) : "no tokens: everybody is operator");
  showOverview();
  showServers($("servers"), $("servers-more"), pool.servers, $("find-devices").value, view, actOnServer);
  leases.show(pool.leases, $("find-leases").value, view);
  queue.show(pool.queue, "", view);
}

const whoIs = ({ tenant, role }) => (tenant === "" || tenant === role ? role : `${tenant} (${role})`);

function showOverview() {
  const { all, free, used, aside, out } = pool.counts;
  const running = pool.leases.filter((lease) => lease.state === "active").length;
  const figures = [["GPUs", all], ["Free", free], ["In use", used], ["Put aside", aside], ["Not available", out],
    ["Leases running", `${running} of ${pool.leases.length}`], ["Waiting", pool.queue.length]];
  keyed($("overview"), figures, ([title]) => title, ([title]) => {
    const value = el("dd", {});
    return { node: el("div", { "data-figure": title }, el("dt", {}, title), value), value };
  }, (row, [, value]) => setText(row.value, String(value)));
}

function notice(text, isError = false) {
  const attributes = { type: "button", "aria-label": "Close this message", on: { click: () => node.remove() } };
  const close = el("button", attributes, "×");
  const node = el("p", { class: isError ? "notice error" : "notice" }, el("span", {}, text), close);
  $("notices").replaceChildren(node);
}

// --- looking

async function look() {
  if (looking) {
    again = true;
    return;
  }
  looking = true;
  again = false;
  clearTimeout(timer);
  const began = performance.now();
  let pause = live ? LOOK_MS : POLL_MS;
  try {
    // Alone first: a wrong token is one attempt, not five.
    const self = await ask("/v1/self");
    const [devices, servers, allLeases, waiting] = await Promise.all([
      ask("/v1/devices"), ask("/v1/servers"), askLeases(), ask(`/v1/queue?why=${reasons()}`)]);
    pool = join({ self, ...devices, ...servers, leases: allLeases, ...waiting });
    seen = new Date();
    view.self = self;
    view.stale = false;
    setHidden($("sign-in"), true);
    follow();
    pause = Math.max(pause, SHARE * (performance.now() - began));
  } catch (error) {
    if (error instanceof Refused && error.wantsToken) askForToken(error);
    else view.stale = true;
    pause = AGAIN_MS;
  }
  looking = false;
  show();
  const signedOut = !$("sign-in").hidden;
  if (!signedOut && !document.hidden) timer = setTimeout(look, again ? Math.min(pause, 300) : pause);
}

// Events, as long as they come. A stream that ends is opened again after a while.
let following = false;
async function follow() {
  if (following) return;
  following = true;
  try {
    await readEvents(() => { live = true; show(); }, soon);
  } catch {
    // The lists are read every few seconds anyhow.
  }
  live = false;
  setTimeout(() => { following = false; }, POLL_MS);
  soon();
}

let soonTimer = 0;
function soon() {
  if (soonTimer !== 0 || document.hidden || !$("sign-in").hidden) return;
  soonTimer = setTimeout(() => { soonTimer = 0; look(); }, 200);
}

// --- who looks

// Nothing of the pool stays in the page, hidden or not.
function forget() {
  pool = null;
  for (const id of ["servers", "overview"]) keyed($(id), []);
  for (const one of [leases, queue]) one.show([], "", view);
  $("notices").replaceChildren();
}

function askForToken(error) {
  const first = token() === "";
  if (pool !== null) forget();
  seen = null;
  view.stale = false;
  setHidden($("sign-in"), false);
  setText($("sign-in-error"), first ? "" : error.message);
  keepToken("");
  setText($("who"), "");
  $("token").focus();
}

$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken($("token").value);
  $("token").value = "";
  look();
});
$("sign-out").addEventListener("click", () => {
  keepToken("");
  location.reload(); // nothing of the pool stays in the page
});

// --- orders

// Runs an order for one lease or server, whose buttons are off meanwhile.
async function carryOut(key, doing, path, body, done) {
  view.busy.set(key, doing);
  show();
  try {
    const answer = await order(path, body);
    notice(answer.pending ? `${doing} goes on.` : done(answer));
    return answer;
  } catch (error) {
    notice(error instanceof Refused ? error.message
      : "The manager did not answer. Look whether the order was carried out before giving it again.", true);
    return null;
  } finally {
    view.busy.delete(key);
    look();
  }
}

async function actOnLease(what, lease) {
  const name = `lease ${short(lease.id)}`;
  const path = `/v1/leases/${encodeURIComponent(lease.id)}/${what}`;
  if (what === "suspend") return carryOut(lease.id, "suspending", path, {}, () => `${name} is suspended.`);
  if (what === "resume") return carryOut(lease.id, "resuming", path, { waitMs: 10000 }, () => `${name} runs again.`);
  if (what === "migrate") return migrate(lease, name, path);
  const waits = lease.state === "queued";
  const sure = await question({
    title: waits ? `Take ${name} out of the queue?` : `Release ${name}?`,
    text: [`${lease.tenant ? `${lease.tenant}: ` : ""}${lease.holder}`,
      waits ? "The request gets no GPU." : "Its programs lose their GPUs at once, and what they have not saved."],
    confirm: waits ? "Take out" : "Release", danger: true });
  if (sure) await carryOut(lease.id, "releasing", path, {}, () => `${name} has ended.`);
}

async function migrate(lease, name, path) {
  const servers = pool.servers.filter((server) => server.alive && !server.cordoned).map((server) => server.name);
  const answer = await question({
    title: `Move ${name}?`, text: [lease.holder, "Its programs stand still while it moves, and go on."],
    confirm: "Move", fields: {
      where: { label: "To", choices: [["elsewhere", "any other server with room"],
        ["workers", "new workers on the same GPUs"], ["server", "the server named here:"]] },
      server: { label: "Server", list: servers.slice(0, 200) },
      devices: { label: "Its GPUs (numbers; empty: any)" } } });
  if (!answer) return;
  const body = answer.where === "elsewhere" ? { elsewhere: true } : {};
  if (answer.where === "server") {
    body.server = answer.server;
    const devices = answer.devices.split(/[\s,]+/).filter((one) => one !== "").map(Number);
    if (devices.length !== 0) body.devices = devices;
  }
  await carryOut(lease.id, "moving", path, body, (done) => `${name} is on ${done.place}.`);
}

async function actOnServer(what, server) {
  const path = `/v1/servers/${encodeURIComponent(server.name)}/${what}`;
  if (what === "uncordon") {
    view.drains.delete(server.name);
    return carryOut(server.name, "uncordoning", path, {}, () => `${server.name} is in service again.`);
  }
  const text = what === "cordon" ? "Nothing new is placed on it; what runs there goes on."
    : "Nothing new is placed on it, and its leases move to other servers. What cannot move is listed, and goes on.";
  const answer = await question({ title: `${what === "cordon" ? "Cordon" : "Drain"} ${server.name}?`, text: [text],
    confirm: what === "cordon" ? "Cordon" : "Drain", fields: { reason: { label: "Reason, for people" } } });
  if (!answer) return;
  const body = answer.reason === "" ? {} : { reason: answer.reason };
  if (what === "cordon") await carryOut(server.name, "cordoning", path, body, () => `${server.name} is cordoned.`);
  else await drain(server.name, path, body);
}

function drainText(answer) {
  if (answer.drained) return "drained: no lease is left";
  const why = answer.leases.filter((one) => one.note).map((one) => `${short(one.id)}: ${one.note}`);
  const left = `${answer.leases.length} ${answer.leases.length === 1 ? "lease is" : "leases are"} left`;
  return `${answer.pending ? "draining, " : ""}${left}${why.length === 0 ? "" : ` (${why.join("; ")})`}`;
}

// Asks until nothing moves any more. A page that is closed meanwhile stops nothing: the manager moves the leases.
async function drain(name, path, body) {
  let answer = await carryOut(name, "draining", path, body, (done) => `${name}: ${drainText(done)}.`);
  while (answer !== null) {
    view.drains.set(name, drainText(answer));
    show();
    if (!answer.pending) return;
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    const server = pool?.servers.find((one) => one.name === name);
    if (server && !server.cordoned) return void view.drains.delete(name); // somebody wants it back
    try {
      answer = await order(path, { ...body, stay: true });
    } catch (error) {
      if (error instanceof Refused) return void view.drains.delete(name);
      // The manager is away; when it is back, it says what has become of the moves.
    }
  }
}

// --- the page itself

for (const id of ["find-devices", "find-leases"]) $(id).addEventListener("input", show);
$("open-all").addEventListener("click", () => { openAll(true); show(); });
$("close-all").addEventListener("click", () => { openAll(false); show(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
look();
