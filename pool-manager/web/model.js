// What the manager's lists mean: states, sums, and the words for them. Nothing here touches the page.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  for (; count >= 1024 && unit < UNITS.length - 1; ++unit) count /= 1024;
  return `${count >= 100 || Number.isInteger(count) ? Math.round(count) : count.toFixed(1)} ${UNITS[unit]}`;
}

export function duration(ms) {
  const seconds = Math.floor(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export const clock = (date) => date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const short = (id) => id.slice(0, 8);

// One state for the tile, the most urgent first. kind: what it counts as in the overview.
function stateOf(device, server, leases) {
  if (server === undefined || server.absent || !server.alive) return { word: "unreachable", kind: "out" };
  if (!device.healthy) return { word: "out of order", kind: "out" };
  const aside = leases.length !== 0 && device.leases.every((id) => device.suspended.includes(id));
  if (leases.length !== 0 && !aside) return { word: server.cordoned ? "in use, cordoned" : "in use", kind: "used" };
  if (aside) return { word: server.cordoned ? "put aside, cordoned" : "put aside", kind: "aside" };
  if (!server.cordoned) return { word: "free", kind: "free" };
  return { word: server.drained ? "drained" : "cordoned", kind: "out" };
}

// What leases have of the device's memory. Suspended ones have left it, but for a little.
function leasedBytes(device, leases) {
  if (device.leasedBytes !== undefined) return device.leasedBytes;
  let sum = 0;
  for (const lease of leases)
    if (!device.suspended.includes(lease.id))
      for (const one of lease.devices) if (one.uuid === device.uuid) sum += one.memoryBytes;
  return Math.min(sum, device.memoryBytes);
}

const names = new Intl.Collator(undefined, { numeric: true }); // node2 before node10

// The lists, joined: servers with their devices, these with their leases.
export function join({ self, devices, servers, leases, queue }) {
  const byId = new Map(leases.map((lease) => [lease.id, lease]));
  const groups = new Map();
  for (const server of servers) groups.set(server.name, { ...server, tiles: [], drained: server.cordoned });
  for (const lease of leases) if (groups.has(lease.server)) groups.get(lease.server).drained = false;
  for (const device of devices) {
    const server = groups.get(device.server);
    const holders = device.leases.map((id) => byId.get(id) ?? { id, holder: "in use", state: "", devices: [] });
    const tile = { device, holders, state: stateOf(device, server, holders), leased: leasedBytes(device, holders) };
    server?.tiles.push(tile);
  }
  const all = [...groups.values()].sort((one, other) => names.compare(one.name, other.name));
  leases.sort((one, other) => one.ageMs - other.ageMs); // the newest first
  for (const server of all) server.counts = countOf(server.tiles);
  return { self, servers: all, leases, queue, counts: countOf(all.flatMap((server) => server.tiles)) };
}

function countOf(tiles) {
  const counts = { all: tiles.length, free: 0, used: 0, aside: 0, out: 0 };
  for (const tile of tiles) ++counts[tile.state.kind];
  return counts;
}

export function serverWord(server) {
  if (server.absent) return "absent";
  if (!server.alive) return "unreachable";
  if (server.cordoned) return server.drained ? "drained" : "cordoned";
  return "in service";
}

export function placeOf(lease) {
  if (lease.held !== undefined) return `in files of ${lease.held.server} (${lease.held.folder})`;
  if (lease.server === "") return "";
  const ordinals = lease.devices.map((one) => one.ordinal).join(", ");
  return `${lease.server} GPU ${ordinals}${lease.movesTo ? ` → ${lease.movesTo}` : ""}`;
}

// What may be ordered for a lease, by who looks and by its state.
export function ordersFor(lease, self) {
  const own = self.allTenants || (lease.tenant === self.tenant && lease.holder !== "in use");
  if (!own || !self.may.includes("change_lease")) return [];
  const release = lease.state === "lost" && !self.may.includes("drop_lost") ? [] : ["release"];
  if (lease.state === "active") return ["suspend", "migrate", ...release];
  if (lease.state === "suspended") return ["resume", ...release];
  return lease.state === "revoking" ? [] : release;
}

export const matches = (words, text) => words.every((word) => text.includes(word));
export const wordsOf = (text) => text.toLowerCase().split(/\s+/).filter((word) => word !== "");
