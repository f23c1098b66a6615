// The lab book: the frame around its pages. What a page does is in its own file.

import { isExport, Refusal, theLab } from "./api";
import { comparePage } from "./compare";
import { curvesPage } from "./curves";
import { byId, dialog, empty, h, put } from "./dom";
import { healthPage } from "./health";
import { runPage } from "./run";
import { runsPage } from "./runs";
import { samplesPage } from "./samples";
import { chosen, link, onChosen, type Page, place } from "./state";

const PAGES: [string, string, string][] = [["runs", "Runs", "1"], ["curves", "Curves", "2"], ["compare", "Compare", "3"], ["health", "Health", "4"], ["samples", "Samples", "5"]];
const GENERAL: [string, string][] = [
  ["1 … 5", "Runs, Curves, Compare, Health, Samples"], ["/", "filter or search"], ["?", "this list"], ["T", "theme: as the system has it, light, dark"], ["Esc", "close, or leave a field"],
];

let open: Page | null = null;
let turn = 0;

async function show(): Promise<void> {
  const mine = ++turn, { page, rest, query } = place();
  const main = byId("main");
  main.setAttribute("aria-busy", "true");
  let made: Page;
  try {
    if (page === "curves") made = await curvesPage(query);
    else if (page === "run" && rest.length >= 2) made = await runPage(rest.join("/"));
    else if (page === "compare") made = await comparePage(query);
    else if (page === "health") made = await healthPage(rest.join("/"), query);
    else if (page === "samples") made = await samplesPage(query);
    else made = await runsPage(query);
  } catch (problem) {
    made = { title: "rung", root: failed(problem) };
  }
  if (mine !== turn) {
    made.close?.();
    return;
  }
  open?.close?.();
  open = made;
  document.title = `${made.title} · ${byId("lab-name").textContent ?? "rung"}`;
  main.dataset["page"] = page;
  put(main, made.root);
  main.removeAttribute("aria-busy");
  main.scrollTop = 0;
  links();
}

function failed(problem: unknown): HTMLElement {
  const text = problem instanceof Error ? problem.message : String(problem);
  if (problem instanceof TypeError) return empty("The server does not answer", "It was stopped, or the line is cut. Start it again, then reload this page.", "rung serve");
  return empty(problem instanceof Refusal && problem.status === 404 ? "Not here" : "That did not work", text);
}

function links(): void {
  const at = place().page;
  const [a, b] = chosen;
  const where: Record<string, string> = {
    runs: link("runs"),
    curves: link("curves", { runs: chosen.join(",") }),
    compare: link("compare", { a, b }),
    health: a === undefined ? link("health") : link(`health/${a}`),
    samples: link("samples", { runs: chosen.slice(0, 6).join(",") }),
  };
  put(byId("nav"), PAGES.map(([page, name]) =>
    h("a", { href: where[page], "aria-current": page === at || (page === "runs" && at === "run") ? "page" : null }, name)));
}

const THEMES: Record<string, string> = { auto: "light", light: "dark", dark: "auto" };

function theme(next?: string): void {
  let now = "auto";
  try {
    now = localStorage.getItem("rung-theme") ?? "auto";
    if (next !== undefined) localStorage.setItem("rung-theme", next);
  } catch {
    // a browser that keeps nothing
  }
  now = next ?? now;
  if (now === "auto") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = now;
  byId("theme").textContent = `Theme: ${now}`;
  byId("theme").dataset["now"] = now;
  if (next !== undefined) dispatchEvent(new Event("rung-theme"));
}

function help(): void {
  const rows = [...(open?.keys ?? []), ...GENERAL].map(([key, text]) => h("tr", {}, h("th", { scope: "row" }, ...key.split(" ").flatMap((one, i) => [i > 0 ? " " : "", /^[…,]$/.test(one) ? one : h("kbd", {}, one)])), h("td", {}, text)));
  dialog("Keys", h("table", { class: "keys" }, h("tbody", {}, ...rows)));
}

function pressed(event: KeyboardEvent): void {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target as HTMLElement;
  if (event.key === "Escape" && target.matches("input, textarea, select")) {
    target.blur();
    return;
  }
  if (target.closest("dialog") !== null || target.matches("textarea, select, input:not([type=checkbox], [type=range], [type=radio])")) return;
  if (open?.key?.(event) === true) {
    event.preventDefault();
    return;
  }
  const at = PAGES.findIndex(([, , key]) => key === event.key);
  if (at >= 0) byId("nav").querySelectorAll<HTMLAnchorElement>("a")[at]!.click();
  else if (event.key === "?") help();
  else if (event.key.toLowerCase() === "t") theme(THEMES[byId("theme").dataset["now"] ?? "auto"]);
  else if (event.key === "/") byId("main").querySelector<HTMLInputElement>("input[type=search]")?.focus();
  else return;
  event.preventDefault();
}

theme();
byId("theme").addEventListener("click", () => theme(THEMES[byId("theme").dataset["now"] ?? "auto"]));
byId("keys").addEventListener("click", help);
byId("line").textContent = isExport ? "A copy" : "";
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("rung-theme")));
addEventListener("hashchange", () => void show());
addEventListener("keydown", pressed);
onChosen(links);
// What the lab is called can wait for what it holds.
void show().then(() => theLab()).then(({ name }) => {
  byId("lab-name").textContent = name || "rung";
  document.title = `${open?.title ?? ""} · ${name || "rung"}`;
}, () => undefined); // what cannot be reached, the page says
