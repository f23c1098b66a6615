// What the visitor chose, kept in the address of the page, so that a link or a reload shows the same.

export interface Choice {
  place: number | null; // null: where the world says one begins
  offset: number | null; // where the walk began: recorded steps after the beginning of the place; null: the same
  mode: "walk" | "follow";
  speed: number;
  fast: boolean;
  smooth: boolean;
  difference: boolean;
  compress: boolean;
  theme: "auto" | "light" | "dark";
}

export const FIRST: Readonly<Choice> = {
  place: null,
  offset: null,
  mode: "walk",
  speed: 1,
  fast: false,
  smooth: false,
  difference: false,
  compress: false,
  theme: "auto",
};

export function readChoice(search: string): Choice {
  const words = new URLSearchParams(search);
  const whole = (name: string): number => Math.max(0, Math.trunc(Number(words.get(name) ?? 0)) || 0);
  const speed = Number(words.get("speed") ?? FIRST.speed);
  const theme = words.get("theme");
  return {
    place: words.has("place") || words.has("offset") ? whole("place") : null,
    offset: words.has("place") || words.has("offset") ? whole("offset") : null,
    mode: words.get("mode") === "follow" ? "follow" : "walk",
    speed: speed >= 0.25 && speed <= 3 ? speed : FIRST.speed,
    fast: words.has("fast"),
    smooth: words.has("smooth"),
    difference: words.has("difference"),
    compress: words.has("compress"),
    theme: theme === "light" || theme === "dark" ? theme : "auto",
  };
}

/** Writes only what differs from the first choice, so that addresses stay short. */
export function writeChoice(choice: Choice): void {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(choice)) {
    if (value !== null && value !== FIRST[name as keyof Choice]) words.set(name, value === true ? "1" : String(value));
  }
  const text = words.toString();
  const search = text === "" ? "" : `?${text}`;
  // Browsers refuse too many changes of the address in a short time, as when a slider is dragged.
  if (search !== location.search) history.replaceState(null, "", location.pathname + search);
}
