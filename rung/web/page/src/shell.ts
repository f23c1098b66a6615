// What the pages of `rung play` share: header, theme, messages, settings, and requests to the server.

import { h } from "./lab/dom";

export function find<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no #${id}`);
  return found as T;
}

export interface Run<About> {
  name: string;
  title: string;
  about: About;
}

/** Header, theme and keys of a page that is no walk; the choice of the theme is kept in the address. */
export function startShell(keys: [string, string][], note = ""): void {
  const help = find<HTMLDialogElement>("help");
  fillHelp(keys, note);
  find("help-open").addEventListener("click", () => help.showModal());
  addEventListener("keydown", (event) => {
    if (isTyping(event) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "?" && !help.open) help.showModal();
  });
  find("help-open").lastElementChild!.textContent = "?";
  const themes = ["auto", "light", "dark"];
  let theme = readWord("theme") ?? "auto";
  if (!themes.includes(theme)) theme = "auto";
  const show = (): void => {
    find("theme").textContent = `Theme: ${theme}`;
    document.documentElement.dataset["theme"] = theme;
    dispatchEvent(new Event("theme"));
  };
  find("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length]!;
    writeWord("theme", theme === "auto" ? null : theme);
    show();
  });
  show();
}

export function fillHelp(keys: [string, string][], note = ""): void {
  find("help-keys").append(...keys.map(([words, meaning]) => helpRow(words, meaning)));
  find("help-note").textContent = note;
}

function helpRow(words: string, meaning: string): HTMLElement {
  const parts = words.split(" ").flatMap((word) => [word === "" || word === "and" ? `${word} ` : h("kbd", {}, word), " "]);
  return h("tr", {}, h("th", {}, ...parts), h("td", {}, meaning));
}

export function isTyping(event: KeyboardEvent): boolean {
  const { target } = event;
  if (!(target instanceof HTMLElement)) return false;
  if (target.closest("dialog") !== null || target instanceof HTMLSelectElement || target instanceof HTMLTextAreaElement) return true;
  return target instanceof HTMLInputElement && !["checkbox", "range", "button"].includes(target.type);
}

export function readWord(name: string): string | null {
  return new URLSearchParams(location.search).get(name);
}

export function writeWord(name: string, value: string | null): void {
  const words = new URLSearchParams(location.search);
  if (value === null) words.delete(name);
  else words.set(name, value);
  const search = words.size === 0 ? "" : `?${words}`;
  if (search !== location.search) history.replaceState(null, "", location.pathname + search);
}

export function setStatus(state: "waiting" | "live" | "busy" | "lost" | "failed", text: string): void {
  const status = find("status");
  status.dataset["state"] = state;
  status.textContent = text;
}

/** Throws where browsers have none of these for the page: they want to be sure of who serves it. */
export function requireSecure(device: string): void {
  if (isSecureContext) return;
  throw new Error(`browsers give a ${device} only to pages of localhost or https: open a tunnel, as with ssh -L 8000:127.0.0.1:8000, and play at 127.0.0.1`);
}

export function showMessage(text: string): void {
  const message = find("message");
  message.textContent = text;
  message.hidden = text === "";
}

/** Asks the server what is played, until it answers. */
export async function runs<About>(): Promise<Run<About>[]> {
  for (let wait = 200; ; wait = Math.min(2 * wait, 4000)) {
    try {
      const response = await fetch("about");
      if (response.redirected) location.assign(response.url); // to where the token is asked for
      if (response.ok) {
        const said = (await response.json()) as { runs: Run<About>[] };
        document.title = find("title").textContent = said.runs.map((run) => run.title).join(" and ");
        setStatus("live", "Ready");
        return said.runs;
      }
    } catch {
      // no server there yet
    }
    setStatus("lost", "No connection, trying again");
    await new Promise((done) => setTimeout(done, wait));
  }
}

export class Refused extends Error {}

/** Sends a request to one of the runs and hands over the pieces of its answer as they come. */
export async function ask<Piece>(run: number, request: object, take: (piece: Piece) => void, signal?: AbortSignal): Promise<void> {
  let response: Response;
  try {
    response = await fetch(`answer/${run}`, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(request), signal: signal ?? null,
    });
  } catch (problem) {
    if (signal?.aborted === true) throw problem;
    throw new Refused("The server cannot be reached; is rung play still running?");
  }
  if (!response.ok) throw new Refused(((await response.json()) as { error: string }).error);
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) {
      if (rest !== "") throw new Refused("The answer was cut off; is rung play still running?");
      return;
    }
    const lines = (rest + value).split("\n");
    rest = lines.pop()!;
    for (const line of lines) {
      const piece = JSON.parse(line) as Piece & { error?: string };
      if (piece.error !== undefined) throw new Refused(piece.error);
      take(piece);
    }
  }
}

let latest = 0; // of the works that were begun

/** Runs some work that may be refused or stopped, and shows how it ended; true where it was done. The status is that of
 * the work that began last. */
export async function report(work: () => Promise<void>): Promise<boolean> {
  const mine = (latest += 1);
  showMessage("");
  setStatus("busy", "Working");
  try {
    await work();
    if (mine === latest) setStatus("live", "Ready");
    return true;
  } catch (problem) {
    const isStopped = problem instanceof DOMException && problem.name === "AbortError";
    if (mine === latest) setStatus("live", isStopped ? "Stopped" : "Ready");
    if (!isStopped) showMessage(problem instanceof Refused ? problem.message : `That did not work: ${problem instanceof Error ? problem.message : String(problem)}`);
    return false;
  }
}

export interface Field {
  name: string;
  label: string;
  value: number;
  min: number;
  max: number;
  step: number;
  note?: string;
}

/** Numbers to choose, kept in the address where they are not the usual ones. */
export class Settings {
  private readonly inputs = new Map<string, HTMLInputElement>();
  private readonly checks: (() => boolean)[] = [];

  constructor(into: HTMLElement, fields: Field[], changed: () => void = () => undefined) {
    for (const field of fields) {
      const usual = String(field.value), given = readWord(field.name);
      const input = h("input", {
        id: field.name, type: "number", min: field.min, max: field.max, step: field.step, value: given ?? usual, required: true,
      });
      // A step is for the arrows; between two steps are good values too, unless whole ones are asked for.
      const isGood = (): boolean => input.checkValidity() || (input.validity.stepMismatch && step < 1 && inRange(input));
      const { step } = field;
      if (!isGood()) input.value = usual;
      else if (field.name === "seed" && given !== null) find<HTMLInputElement>("fresh").checked = false;
      input.addEventListener("change", () => {
        if (!isGood()) {
          input.reportValidity();
          return;
        }
        writeWord(field.name, input.value === usual ? null : input.value);
        changed();
      });
      this.inputs.set(field.name, input);
      this.checks.push(() => isGood() || input.reportValidity());
      into.append(h("label", { class: "field", title: field.note }, h("span", {}, field.label), input));
    }
  }

  get isValid(): boolean {
    return this.checks.every((check) => check());
  }

  get values(): Record<string, number> {
    return Object.fromEntries([...this.inputs].map(([name, input]) => [name, Number(input.value)]));
  }

  set(name: string, value: number): void {
    const input = this.inputs.get(name)!;
    input.value = String(value);
    input.dispatchEvent(new Event("change"));
  }
}

function inRange(input: HTMLInputElement): boolean {
  const { rangeUnderflow, rangeOverflow, badInput, valueMissing } = input.validity;
  return !(rangeUnderflow || rangeOverflow || badInput || valueMissing);
}

export const SEED: Field = { name: "seed", label: "Seed", value: 0, min: 0, max: 2 ** 31 - 1, step: 1, note: "The same seed gives the same answer" };

export function randomSeed(): number {
  return Math.floor(Math.random() * 1e6); // as many as one likes to read and to type
}
