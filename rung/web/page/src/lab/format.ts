// Numbers, times and names for people.

export type Scalar = number | string | boolean | null | undefined;

/** Numbers of the record: those that are not finite come as strings. */
export function num(value: unknown): number {
  if (typeof value === "number") return value;
  if (value === "NaN") return NaN;
  if (value === "Infinity") return Infinity;
  if (value === "-Infinity") return -Infinity;
  return NaN;
}

export function isNumber(value: unknown): boolean {
  return typeof value === "number" || value === "NaN" || value === "Infinity" || value === "-Infinity";
}

/** Four significant digits; the full number is in a tooltip where it matters. */
export function short(value: unknown, digits = 4): string {
  if (value === null || value === undefined) return "";
  if (!isNumber(value)) return typeof value === "object" ? JSON.stringify(value) : String(value);
  const x = num(value);
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e15 || size < 1e-4) return x.toExponential(digits - 2).replace(/\.?0+e/, "e").replace("-", "−").replace("e−", "e-").replace("e+", "e");
  if (Number.isInteger(x)) return group(x);
  if (size >= 10 ** digits) return group(Math.round(x));
  return x.toPrecision(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "").replace("-", "−");
}

function group(x: number): string {
  const text = String(Math.abs(x));
  return (x < 0 ? "−" : "") + (text.length > 4 ? text.replace(/\B(?=(\d{3})+$)/g, "\u2009") : text);
}

/** A loss has four decimals, so that columns of it line up. */
export function loss(value: unknown): string {
  if (!isNumber(value)) return "";
  const x = num(value);
  return Number.isFinite(x) && Math.abs(x) >= 0.001 && Math.abs(x) < 1000 ? x.toFixed(4).replace("-", "−") : short(value);
}

export function signed(x: number, digits = 4): string {
  if (!Number.isFinite(x)) return "";
  const text = x === 0 ? "0" : short(Math.abs(x), digits);
  return x < 0 ? `−${text}` : `+${text}`;
}

export function duration(seconds: unknown): string {
  const x = num(seconds);
  if (!Number.isFinite(x)) return "";
  if (x < 1) return `${(1000 * x).toFixed(0)} ms`;
  if (x < 60) return `${x.toFixed(x < 10 ? 1 : 0)} s`;
  if (x < 3600) return `${Math.floor(x / 60)} m ${String(Math.floor(x % 60)).padStart(2, "0")} s`;
  if (x < 172800) return `${Math.floor(x / 3600)} h ${String(Math.floor((x % 3600) / 60)).padStart(2, "0")} m`;
  return `${(x / 86400).toFixed(1)} d`;
}

/** A time as unix seconds or ISO. */
export function instant(value: unknown): Date | null {
  const date = typeof value === "number" ? new Date(value * 1000) : typeof value === "string" && value !== "" ? new Date(value) : null;
  return date === null || Number.isNaN(date.getTime()) ? null : date;
}

export function age(value: unknown): string {
  const date = instant(value);
  if (date === null) return "";
  const seconds = (Date.now() - date.getTime()) / 1000;
  if (seconds < 60) return "now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  if (seconds < 86400 * 60) return `${Math.floor(seconds / 86400)} d`;
  return date.toISOString().slice(0, 10);
}

export function ago(value: unknown): string {
  const text = age(value);
  return text === "now" ? "just now" : text === "" || text.includes("-") ? text : `${text} ago`;
}

export function bytes(value: unknown): string {
  let x = num(value);
  if (!Number.isFinite(x)) return "";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (x < 1000) return `${x.toFixed(x < 10 && unit !== "B" ? 1 : 0)} ${unit}`;
    x /= 1000;
  }
  return `${x.toFixed(1)} TB`;
}

export function plural(count: number, noun: string): string {
  return `${group(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** A value of a config in one line. */
export function value(given: unknown): string {
  if (given === null) return "null";
  if (given === undefined) return "";
  if (typeof given === "object") return JSON.stringify(given);
  return short(given, 6);
}

/** {a: {b: 1}} as {"a.b": 1}. */
export function leaves(tree: unknown, prefix = ""): Record<string, unknown> {
  const out: Record<string, unknown> = {};
  for (const [key, one] of Object.entries((tree ?? {}) as Record<string, unknown>)) {
    if (one !== null && typeof one === "object" && !Array.isArray(one)) Object.assign(out, leaves(one, `${prefix}${key}.`));
    else out[prefix + key] = one;
  }
  return out;
}
