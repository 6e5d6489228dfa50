// The page's head: links to the views and the menu of runs. Its elements are made once and keep their place while a run
// is followed: a link that is replaced while it is pressed or has the focus is lost.
import type { Brief } from "./api";
import { fill, h, setText } from "./dom";
import { clock, num } from "./format";
import { address, main, shared, type ViewName } from "./state";

const MAX_RUNS = 8;

interface Row { el: HTMLElement; box: HTMLInputElement; link: HTMLAnchorElement; state: HTMLElement; figures: HTMLElement }

export const tabs = h("nav", { "aria-label": "Views" }), chooser = h("div", { class: "chooser" });
const links = new Map<ViewName, HTMLAnchorElement>();
const rows = new Map<string, Row>();
const list = h("ul", null), summary = h("summary", null);
const menu = h("details", { class: "runs" }, summary, h("div", { class: "menu" }, h("p", { class: "muted small" }, "Tick runs to compare them."), list));
const single = h("span", { class: "runname" }), state = h("span", { class: "state" });

export function addViews(views: [ViewName, string][]): void {
  for (const [name, label] of views) links.set(name, h("a", { hidden: true }, label));
  fill(tabs, [...links.values()]);
}

export function closeMenu(target?: Node): void {
  if (menu.open && !(target && menu.contains(target))) menu.open = false;
}

export function updateHead(): void {
  const run = main(), { view, ids } = shared.state;
  for (const [name, link] of links) {
    link.hidden = name === "plan" ? !run?.has_plan : run?.state === "recipe";
    setHref(link, address(name, ids));
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const shown = shared.runs.length > 1 || !run ? menu : single;
  if (!shown.isConnected) fill(chooser, shown, state);
  setText(summary, (run ? run.name : "no run") + (ids.length > 1 ? ` + ${ids.length - 1}` : ""));
  setText(single, run?.name ?? "");
  single.title = run?.path ?? "";
  showState(state, run?.state ?? "");
  updateRows();
}

/** New runs get a row at their place; the others are put in order only while the menu is closed. */
function updateRows(): void {
  const known = new Set(shared.runs.map((run) => run.id));
  for (const [id, row] of rows) if (!known.has(id)) { row.el.remove(); rows.delete(id); }
  shared.runs.forEach((run, n) => {
    const isNew = !rows.has(run.id), row = rows.get(run.id) ?? addRow(run.id);
    if ((isNew || !menu.open) && list.children[n] !== row.el) list.insertBefore(row.el, list.children[n] ?? null);
    updateRow(row, run);
  });
}

function addRow(id: string): Row {
  const box = h("input", { type: "checkbox", id: `run-${id}`, onchange: () => compare(id, box.checked) });
  const link = h("a", { onclick: () => closeMenu() }), state = h("span", null), figures = h("span", { class: "muted" });
  const row = { el: h("li", null, box, link, state, figures), box, link, state, figures };
  rows.set(id, row);
  return row;
}

function updateRow(row: Row, run: Brief): void {
  row.box.checked = shared.state.ids.includes(run.id);
  row.box.ariaLabel = `Compare ${run.name}`;
  setHref(row.link, address(shared.state.view, [run.id]));
  row.link.title = run.path;
  setText(row.link, run.name);
  showState(row.state, run.state);
  const step = run.step !== null ? `step ${run.step}` : run.state === "recipe" ? "" : "no step";
  const reward = run.reward !== null && run.reward !== undefined ? `reward ${num(run.reward)}` : "";
  setText(row.figures, [step, reward, run.time ? clock(run.time) : ""].filter(Boolean).join(" · "));
}

/** Several runs are compared in the overview. */
function compare(id: string, isOn: boolean): void {
  const { view, ids } = shared.state;
  const next = isOn ? [...ids, id].slice(-MAX_RUNS) : ids.filter((one) => one !== id);
  location.hash = address(next.length > 1 ? "overview" : view, next.length ? next : [id]);
}

function showState(el: HTMLElement, word: string): void {
  el.className = `state ${word}`;
  el.hidden = !word;
  setText(el, word);
}

function setHref(link: HTMLAnchorElement, href: string): void {
  if (link.getAttribute("href") !== href) link.setAttribute("href", href);
}
