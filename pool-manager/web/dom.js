// The page is made of elements and text nodes only: names, reasons and programs are other people's text, and never
// become markup.

// attributes: `on` has listeners, by event; a value of false leaves the attribute out.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// What is so already is not touched: a thousand servers are looked at every few seconds, and few have changed.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

const rowsOf = new WeakMap();

// Has one child of `parent` for each item, in their order. make(item): {node, …}; update(row, item) each time.
export function keyed(parent, items, keyOf, make, update) {
  const before = rowsOf.get(parent) ?? new Map();
  const rows = new Map();
  for (const item of items) rows.set(keyOf(item), before.get(keyOf(item)) ?? make(item));
  for (const [key, row] of before) if (!rows.has(key)) row.node.remove();
  let next = parent.firstChild;
  for (const item of items) {
    const row = rows.get(keyOf(item));
    if (row.node === next) next = next.nextSibling;
    else parent.insertBefore(row.node, next);
    update(row, item);
  }
  rowsOf.set(parent, rows);
}

export function meter(label) {
  const fill = el("span", { class: "fill" });
  const range = { "aria-valuemin": "0", "aria-valuemax": "100" };
  const bar = el("div", { class: "meter", role: "meter", "aria-label": label, ...range }, fill);
  const text = el("span", { class: "value" });
  const node = el("div", { class: "measure" }, el("span", { class: "label" }, label), bar, text);
  return { node, bar, fill, text };
}

// percent: undefined: it is not known, and not shown.
export function setMeter(one, percent, text) {
  setHidden(one.node, percent === undefined);
  if (percent === undefined) return;
  const whole = String(Math.round(Math.min(100, Math.max(0, percent))));
  if (one.bar.getAttribute("aria-valuenow") !== whole) {
    one.bar.setAttribute("aria-valuenow", whole);
    one.fill.style.width = `${whole}%`;
  }
  setAttribute(one.bar, "aria-valuetext", text);
  setText(one.text, text);
}
