// Where one is: the page in the address after #, and the runs that are chosen, which every page can start from.

export interface Place {
  page: string;
  rest: string[]; // of the path, as run/piano/7
  query: URLSearchParams;
}

export function place(): Place {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [page = "", ...rest] = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { page: page === "" ? "runs" : page, rest, query: new URLSearchParams(query) };
}

/** A run's name is experiment/number; its slash stays a slash. */
export function link(page: string, query: Record<string, string | number | boolean | null | undefined> = {}): string {
  const text = Object.entries(query)
    .filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false)
    .map(([key, value]) => `${key}=${encodeURIComponent(String(value)).replaceAll("%2F", "/").replaceAll("%2C", ",")}`).join("&");
  return `#/${page}${text === "" ? "" : `?${text}`}`;
}

/** Puts what is set on a page into its address, without a new entry in the history. */
export function remember(page: string, query: Parameters<typeof link>[1]): void {
  history.replaceState(null, "", link(page, query));
}

const KEPT = "rung-chosen";
export const chosen: string[] = [];
try {
  chosen.push(...(JSON.parse(sessionStorage.getItem(KEPT) ?? "[]") as string[]));
} catch {
  // nothing was kept
}
const watchers = new Set<() => void>();

export function choose(runs: readonly string[]): void {
  chosen.splice(0, chosen.length, ...new Set(runs));
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(chosen));
  } catch {
    // it lasts as long as the page
  }
  for (const call of watchers) call();
}

export function onChosen(call: () => void): () => void {
  watchers.add(call);
  return () => watchers.delete(call);
}

export interface Page {
  root: HTMLElement;
  title: string;
  close?: () => void;
  key?: (event: KeyboardEvent) => boolean; // whether it was for the page
  keys?: [string, string][];
}
