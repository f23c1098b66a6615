// Colours of runs: eight that people with any colour vision tell apart, then the same dashed, then dotted. A run keeps
// its colour while others come and go, and when the page is opened again.

const LIGHT = ["#0b65b5", "#cf4a0a", "#0a815c", "#a63d96", "#8a6a00", "#5b48c2", "#1587a8", "#59636f"];
const DARK = ["#64aef5", "#ff9160", "#45cc9e", "#e48fd9", "#dfbd45", "#ab9bff", "#6fd3ee", "#aeb8c6"];
const DASHES: number[][] = [[], [7, 4], [2, 3]];
const KEPT = "rung-colours";

export interface Look {
  light: string;
  dark: string;
  dash: number[];
}

let slots: Record<string, number> = {};
try {
  slots = JSON.parse(localStorage.getItem(KEPT) ?? "{}") as Record<string, number>;
} catch {
  slots = {}; // a browser that keeps nothing, or something else under that name
}

/** Of the runs that are shown together; the first that came keeps its colour. */
export function looks(runs: readonly string[]): Map<string, Look> {
  const most = LIGHT.length * DASHES.length;
  const taken = new Set<number>(), found = new Map<string, Look>();
  const wanting: string[] = [];
  const give = (run: string, slot: number): void => {
    taken.add(slot);
    slots[run] = slot;
    const of = slot % LIGHT.length;
    found.set(run, { light: LIGHT[of]!, dark: DARK[of]!, dash: DASHES[Math.floor(slot / LIGHT.length) % DASHES.length]! });
  };
  for (const run of runs) {
    const slot = slots[run];
    if (slot !== undefined && !taken.has(slot)) give(run, slot);
    else wanting.push(run);
  }
  for (const run of wanting) {
    let slot = 0;
    while (taken.has(slot) && slot < most - 1) slot += 1;
    give(run, slot);
  }
  const names = Object.keys(slots);
  for (const old of names.slice(0, Math.max(0, names.length - 300))) if (!found.has(old)) delete slots[old];
  try {
    localStorage.setItem(KEPT, JSON.stringify(slots));
  } catch {
    // they last as long as the page, then
  }
  return found;
}
