// Leases and queue: tables that grow by the page, since a pool may have thousands. On a phone each row is a card.

import { el, keyed, setAttribute, setHidden, setText } from "./dom.js";
import { duration, matches, ordersFor, placeOf, short, wordsOf } from "./model.js";

const STEP = 100; // rows

const capital = (word) => word[0].toUpperCase() + word.slice(1);

// columns: {title: text of an item}. ordersOf(item): the names of its buttons; act(name, item).
// The rows' element and what the table shows: {node, show(items, filter, view)}.
export function table(caption, columns, { ordersOf, act, noun, empty }) {
  const titles = Object.keys(columns);
  const body = el("tbody", { role: "rowgroup" });
  const heads = [...titles, "Orders"].map((title) => el("th", { role: "columnheader", scope: "col" }, title));
  const grid = el("table", { role: "table" }, el("caption", { class: "aside-only" }, caption),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)), body);
  const none = el("p", { class: "more" });
  const moreButton = el("button", { type: "button" });
  const node = el("div", {}, grid, none, moreButton);
  let most = STEP;
  let latest;
  moreButton.addEventListener("click", () => {
    most += STEP;
    show(...latest);
  });

  function makeRow() {
    const cells = titles.map((title) => el("td", { role: "cell", "data-title": title }));
    const orders = el("td", { role: "cell", class: "actions", "data-title": "Orders" });
    const row = { node: el("tr", { role: "row" }, ...cells, orders), cells, orders };
    row.makeButton = (name) => {
      const attributes = { type: "button", "data-order": name, class: name === "release" ? "danger" : false };
      return { node: el("button", { ...attributes, on: { click: () => act(name, row.item) } }, capital(name)) };
    };
    return row;
  }

  function updateRow(row, item, view) {
    row.item = item;
    setAttribute(row.node, "data-id", item.id);
    setAttribute(row.node, "data-state", item.state);
    titles.forEach((title, i) => setText(row.cells[i], columns[title](item, view)));
    keyed(row.orders, ordersOf(item, view), (name) => name, row.makeButton, (button, name) => {
      setAttribute(button.node, "aria-label", `${capital(name)} lease ${short(item.id)}`);
      button.node.disabled = view.stale || view.busy.has(item.id);
    });
  }

  function show(items, filter, view) {
    latest = [items, filter, view];
    const words = wordsOf(filter);
    const found = words.length === 0 ? items : items.filter((item) =>
      matches(words, titles.map((title) => columns[title](item, view)).join("\n").toLowerCase()));
    keyed(body, found.slice(0, most), (item) => item.id, makeRow, (row, item) => updateRow(row, item, view));
    setHidden(grid, found.length === 0);
    setHidden(heads.at(-1), !found.slice(0, most).some((item) => ordersOf(item, view).length !== 0));
    setHidden(none, found.length !== 0);
    setText(none, items.length === 0 ? empty : `There is no ${noun} like that.`);
    setHidden(moreButton, found.length <= most);
    setText(moreButton, `Show more (${found.length - most} left)`);
  }
  return { node, show };
}

function program(lease) {
  return lease.reason ? `${lease.holder} (${lease.reason})` : lease.holder;
}

function stateOf(lease) {
  const notes = [lease.why, lease.turn?.place && lease.turn.place !== "resident" ? `turn: ${lease.turn.place}` : "",
    lease.endsInMs ? `ends in ${duration(lease.endsInMs)}` : ""].filter((note) => note);
  return notes.length === 0 ? lease.state : `${lease.state}: ${notes.join("; ")}`;
}

export const leaseTable = (act) => table("Leases", {
  State: (lease, view) => view.busy.get(lease.id) ?? stateOf(lease),
  Tenant: (lease) => lease.tenant,
  Program: program,
  Devices: placeOf,
  Since: (lease) => duration(lease.ageMs),
  Protected: (lease) => (lease.protection ?? []).join("; ") || "no",
  Lease: (lease) => short(lease.id),
}, { ordersOf: (lease, view) => ordersFor(lease, view.self), act, noun: "lease", empty: "There are no leases." });

export const queueTable = (act) => table("Requests that wait for GPUs, in the order in which they are served", {
  Place: (one) => String(one.position),
  Tenant: (one) => one.tenant,
  Program: (one) => (one.resumes ? `${one.holder} (to be resumed)` : program(one)),
  Class: (one) => one.priority,
  Waits: (one) => duration(one.ageMs),
  "Waits for": (one) => one.why ?? "",
  Lease: (one) => short(one.id),
}, {
  ordersOf: (one, view) => (one.resumes ? [] : ordersFor(one, view.self)),
  act, noun: "request", empty: "Nobody waits.",
});
