// Questions before what ends work or moves it. Escape and "Cancel" do nothing; the focus begins on "Cancel".

import { el } from "./dom.js";

let numbers = 0;

function fieldNode(field) {
  const id = `field-${++numbers}`;
  let input;
  if (field.choices) {
    input = el("select", { id });
    for (const [value, text] of field.choices) input.append(el("option", { value }, text));
  } else {
    const list = field.list ? `${id}-list` : false;
    input = el("input", { id, type: "text", maxlength: "200", autocomplete: "off", list });
  }
  const node = el("div", { class: "field" }, el("label", { for: id }, field.label), input);
  if (field.list)
    node.append(el("datalist", { id: `${id}-list` }, ...field.list.map((value) => el("option", { value }))));
  return { node, input };
}

// What was answered, by field; null: nothing is to be done.
// fields: {name: {label, choices?: [[value, text]], list?: [text]}}
export function question({ title, text, confirm, danger = false, fields = {} }) {
  const back = document.activeElement;
  const inputs = Object.entries(fields).map(([name, field]) => ({ name, ...fieldNode(field) }));
  const titleId = `dialog-${++numbers}`;
  const cancel = el("button", { type: "button" }, "Cancel");
  const go = el("button", { type: "submit", class: danger ? "danger" : "primary" }, confirm);
  const form = el("form", {}, el("h2", { id: titleId }, title), ...text.map((line) => el("p", {}, line)),
    ...inputs.map((one) => one.node), el("div", { class: "buttons" }, cancel, go));
  const dialog = el("dialog", { "aria-labelledby": titleId }, form);
  document.body.append(dialog);
  return new Promise((resolve) => {
    let answer = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      answer = Object.fromEntries(inputs.map((one) => [one.name, one.input.value.trim()]));
      dialog.close();
    });
    cancel.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (back?.isConnected) back.focus();
      resolve(answer);
    });
    dialog.showModal();
    cancel.focus();
  });
}
