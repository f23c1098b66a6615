// What the server answers, and how it is asked. A static copy of a book has the answers in files instead.

import { num } from "./format";

export interface Lab {
  name: string;
  version: string;
  can_write: boolean;
  csrf: string;
  experiments: { name: string; num_runs: number }[];
  columns: { config: string[]; metrics: string[] };
}
export type Change = [string, unknown, unknown];
export interface Row {
  run: string;
  experiment: string;
  number: number;
  parent: string | null;
  depth: number;
  status: string;
  started: string | number | null;
  wall_s: number | null;
  steps: number | null;
  tags: string[];
  note: string | null;
  why?: string | null;
  verdict: unknown;
  changed: Change[];
  loss: number | string | null;
  best: unknown;
  recipe: string;
  values: Record<string, unknown>;
}
export interface Series {
  run: string;
  x: number[];
  min: number[];
  max: number[];
  mean: number[];
  last: unknown;
  num_points: number;
  has_nonfinite: number[];
  baselines: { name: string; value: number }[];
}
export interface Curve {
  x: string;
  metric: string;
  series: Series[];
  errors?: { run: string; message: string; code: string }[];
  reading?: { run: string; done_bytes: number; total_bytes: number }[];
}
export interface SampleItem {
  run: string;
  step: number | null;
  name: string;
  kind: string;
  url: string;
  text?: string | null;
  caption?: string | null;
  notes?: [number, number, number, number][];
}
export type Answer = Record<string, unknown>;

declare global {
  interface Window {
    RUNG_EXPORT?: { made: number };
  }
}

export class Refusal extends Error {
  constructor(message: string, readonly code: string, readonly status: number) {
    super(message);
  }
}

export const isExport = window.RUNG_EXPORT !== undefined;

export type Query = Record<string, string | number | undefined>;

/** The address of an answer; names of runs keep their slash. */
export function address(path: string, query: Query = {}): string {
  const asked = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const text = asked.map(([key, value]) => `${key}=${encodeURIComponent(String(value)).replaceAll("%2F", "/").replaceAll("%2C", ",")}`).join("&");
  return `api/${path}${text === "" ? "" : `?${text}`}`;
}

export async function ask<T>(path: string, query: Query = {}, signal?: AbortSignal): Promise<T> {
  if (isExport) return await fromExport<T>(path, query);
  const response = await fetch(address(path, query), signal === undefined ? {} : { signal });
  return await read<T>(response);
}

async function read<T>(response: Response): Promise<T> {
  if (response.status === 401) location.assign("login");
  const text = await response.text();
  let answer: unknown;
  try {
    answer = JSON.parse(text);
  } catch {
    throw new Refusal(response.ok ? "the server's answer cannot be read" : `${response.status}: ${text.slice(0, 200)}`, "bad-answer", response.status);
  }
  if (!response.ok) {
    const said = answer as { error?: string; code?: string };
    throw new Refusal(said.error ?? `the server answered ${response.status}`, said.code ?? "", response.status);
  }
  return answer as T;
}

const files = new Map<string, Promise<unknown>>();

/** An answer of the copy; a problem that was written in its place is one here as well. */
function stored<T>(path: string): Promise<T> {
  let found = files.get(path);
  if (found === undefined) {
    found = (async () => {
      const response = await fetch(`api/${path}.json`);
      if (!response.ok) throw new Refusal("this copy of the book does not hold that; `rung serve` shows it", "not-in-copy", 404);
      const answer = await read<Answer>(response);
      if (typeof answer["error"] === "string" && typeof answer["code"] === "string") throw new Refusal(answer["error"], answer["code"], 400);
      return answer;
    })();
    files.set(path, found);
  }
  return found as Promise<T>;
}

/** A curve of each run, its numbers as numbers. `reading` names the long runs that the server reads for the first time. */
export async function curve(query: Query, signal?: AbortSignal): Promise<Curve> {
  const answer = await ask<Curve>("curve", query, signal);
  for (const one of answer.series) {
    for (const name of ["x", "min", "max", "mean", "has_nonfinite"] as const) {
      const values = (one[name] ?? []) as unknown[];
      one[name] = values.every((value) => typeof value === "number") ? (values as number[]) : values.map(num);
    }
    one.baselines ??= [];
  }
  return answer;
}

/** A copy holds answers about one run; those about several are put together here. */
async function fromExport<T>(path: string, query: Query): Promise<T> {
  const runs = String(query["runs"] ?? "").split(",").filter(Boolean);
  if (path === "curve") {
    const found = await Promise.all(runs.map((run) => storedCurve(run, query)));
    return { x: query["x"] ?? "step", metric: query["metric"], series: found.filter((one) => one !== null) } as T;
  }
  if (path === "samples") {
    const found = await Promise.all(runs.map((run) => stored<{ samples: SampleItem[] }>(`samples/${run}`)));
    return { samples: found.flatMap((one) => one.samples) } as T;
  }
  if (path === "diff" || path === "ab") return await stored<T>(`${path}/${query["a"]}/${query["b"]}`);
  const answer = await stored<Answer>(path);
  const map = path.startsWith("layers/") && query["metric"] ? (answer["maps"] as Record<string, Answer>)[`${query["kind"]}/${query["metric"]}`] : undefined;
  return { ...answer, ...map } as T;
}

async function storedCurve(run: string, query: Query): Promise<Series | null> {
  try {
    const { curves } = await stored<{ curves: Record<string, string> }>(`run/${run}`);
    const file = curves[String(query["metric"])];
    if (file === undefined) return null;
    const found = await stored<Omit<Series, "x"> & { x: Record<string, unknown[]> }>(file.replace(/^api\/|\.json$/g, ""));
    const x = found.x[String(query["x"] ?? "step")];
    return x === undefined ? null : thinned({ ...found, x: x.map(num), min: found.min.map(num), max: found.max.map(num), mean: found.mean.map(num) }, query);
  } catch {
    return null;
  }
}

/** The part between `from` and `to`, smoothed as the server does it, but of points that were thinned before. */
function thinned(one: Series, query: Query): Series {
  const { x } = one;
  const from = Number(query["from"] ?? -Infinity), to = Number(query["to"] ?? Infinity), smooth = Number(query["smooth"] ?? 0);
  let sum = 0, weight = 0;
  const mean = one.mean.map((value) => {
    if (!Number.isFinite(value) || smooth === 0) return value;
    sum = smooth * sum + (1 - smooth) * value;
    weight = smooth * weight + 1 - smooth;
    return sum / weight;
  });
  const kept = x.map((_, i) => i).filter((i) => (x[i] ?? NaN) >= from && (x[i] ?? NaN) <= to);
  const pick = (values: number[]): number[] => kept.map((i) => values[i] ?? NaN);
  return { ...one, x: pick(x), min: pick(one.min), max: pick(one.max), mean: pick(mean) };
}

let lab: Promise<Lab> | null = null;

export function theLab(isFresh = false): Promise<Lab> {
  if (lab === null || isFresh) {
    lab = ask<Lab>("lab");
    lab.catch(() => (lab = null)); // asked again the next time
  }
  return lab;
}

export async function write<T = Answer>(run: string, what: string, body: Answer): Promise<T> {
  return await send<T>(`api/run/${run}/${what}`, body);
}

export async function send<T = Answer>(to: string, body: Answer): Promise<T> {
  const { csrf } = await theLab();
  const headers = { "content-type": "application/json", "x-rung-csrf": csrf };
  return await read<T>(await fetch(to, { method: "POST", headers, body: JSON.stringify(body) }));
}

/** The address of a run's own file, however the answer names it. */
export function fileUrl(url: string): string {
  return url.replace(/^\//, "");
}
