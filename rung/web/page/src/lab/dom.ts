// Elements without markup: whatever a run says ends up as text, never as HTML.

export type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, unknown>;

/** `on…` are listeners, `class` and other attributes are set as such, false and null leave one out. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: (Child | Child[])[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  apply(made, attributes);
  made.append(...nodes(children));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function s<K extends keyof SVGElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: (Child | Child[])[]
): SVGElementTagNameMap[K] {
  const made = document.createElementNS(SVG, tag);
  apply(made, attributes);
  made.append(...nodes(children));
  return made;
}

function apply(made: Element, attributes: Attributes): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !/^(aria|data)-/.test(name))) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value as EventListener);
    else if (name === "value" && "value" in made) (made as HTMLInputElement).value = String(value);
    else if (name === "checked" && made instanceof HTMLInputElement) made.checked = value === true;
    else made.setAttribute(name, value === true && !/^(aria|data)-/.test(name) ? "" : String(value));
  }
}

function nodes(children: (Child | Child[])[]): (Node | string)[] {
  const out: (Node | string)[] = [];
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    out.push(typeof child === "number" ? String(child) : child);
  }
  return out;
}

export function put(into: Element, ...children: (Child | Child[])[]): void {
  into.replaceChildren(...nodes(children));
}

export function byId<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`no element ${id}`);
  return found as T;
}

/** The value of a CSS variable as it is now, in light or dark. */
export function css(name: string): string {
  const probe = byId("main");
  const raw = getComputedStyle(probe).getPropertyValue(name).trim();
  const pair = /^light-dark\((.+?),\s*(.+)\)$/.exec(raw);
  return pair === null ? raw : (isDark() ? pair[2] : pair[1]) ?? raw;
}

export function isDark(): boolean {
  const asked = document.documentElement.dataset["theme"];
  return asked === "dark" || (asked !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
}

/** Calls once things have been quiet for so long. */
export function quietly<A extends unknown[]>(call: (...args: A) => void, ms: number): (...args: A) => void {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = window.setTimeout(() => call(...args), ms);
  };
}

export function save(blob: Blob, name: string): void {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function toast(text: string, isBad = false, action?: [string, () => void]): void {
  const shown = byId("toast");
  put(shown, text, action !== undefined && h("button", { type: "button", class: "small", onclick: () => ((shown.hidden = true), action[1]()) }, action[0]));
  shown.hidden = false;
  shown.dataset["bad"] = String(isBad);
  clearTimeout(Number(shown.dataset["timer"]));
  shown.dataset["timer"] = String(window.setTimeout(() => (shown.hidden = true), isBad || action !== undefined ? 8000 : 3000));
}

/** What stands where there is nothing yet: why, and the command that would change it. */
export function empty(title: string, text: string, command = ""): HTMLElement {
  return h("div", { class: "empty" }, h("h2", {}, title), h("p", {}, text), command && copyable(command));
}

export function copyable(command: string): HTMLElement {
  const button = h("button", { type: "button", class: "small", "aria-label": `Copy ${command}`, onclick: () => void copy() }, "Copy");
  async function copy(): Promise<void> {
    try {
      await navigator.clipboard.writeText(command);
      toast("Copied");
    } catch {
      toast("The browser does not let this page copy; mark the text instead.", true);
    }
  }
  return h("div", { class: "command" }, h("code", { tabindex: 0 }, command), button);
}

/** A modal with a title; Escape and the button close it. */
export function dialog(title: string, ...children: (Child | Child[])[]): HTMLDialogElement {
  const close = h("button", { type: "button", class: "plain", "aria-label": "Close", onclick: () => made.close() }, "✕");
  const made = h("dialog", { "aria-label": title, onclose: () => made.remove(), onclick: (event: Event) => event.target === made && made.close() },
    h("div", { class: "sheet" }, h("div", { class: "row head" }, h("h2", {}, title), h("span", { class: "space" }), close), ...children));
  document.body.append(made);
  made.showModal();
  return made;
}
