// Elements without markup: every text is a text node, so nothing that a run wrote is ever parsed.

export type Child = Node | string | number | null | undefined | false | Child[];
type Props = Record<string, unknown>;

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K, props: Props | null, ...children: Child[]
): HTMLElementTagNameMap[K] {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value as EventListener);
    else if (name === "style") Object.assign(el.style, value);
    else if (name === "class") el.className = String(value);
    else if (name in el && typeof value !== "string") (el as never as Props)[name] = value;
    else el.setAttribute(name, value === true ? "" : String(value));
  }
  append(el, children);
  return el;
}

export function append(el: Node, children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(el, child);
    else el.appendChild(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(el: Element, ...children: Child[]): void {
  el.replaceChildren();
  append(el, children);
}

/** Leaves the element alone where it says so already. */
export function setText(el: Element, text: string): void {
  if (el.textContent !== text) el.textContent = text;
}

/** A row of buttons of which one is on. */
export function choice<T extends string>(
  label: string, options: [T, string][], value: T, pick: (value: T) => void,
): HTMLElement {
  const buttons = options.map(([key, text]) =>
    h("button", {
      type: "button", class: "seg", "aria-pressed": key === value ? "true" : "false",
      onclick: () => {
        for (const b of buttons) b.setAttribute("aria-pressed", "false");
        buttons[options.findIndex(([k]) => k === key)].setAttribute("aria-pressed", "true");
        pick(key);
      },
    }, text));
  return h("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

export function table(head: Child[], rows: Child[][], right: number[] = []): HTMLElement {
  const side = (n: number) => (right.includes(n) ? "num" : null);
  return h("div", { class: "scroll" },
    h("table", { style: { minWidth: head.length > 4 ? `${110 * head.length - 60 * right.length}px` : "" } },
      h("thead", null, h("tr", null, head.map((text, n) => h("th", { class: side(n) }, text)))),
      h("tbody", null, rows.map((row) =>
        h("tr", null, row.map((cell, n) => h("td", { class: side(n) }, cell)))))));
}

export function panel(title: string, about: string, ...children: Child[]): HTMLElement {
  return h("section", { class: "panel" },
    h("h2", null, title), about && h("p", { class: "about" }, about), children);
}

export function save(name: string, content: Blob): void {
  const link = h("a", { href: URL.createObjectURL(content), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
