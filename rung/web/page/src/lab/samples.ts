// What runs made: seen and heard side by side, over the steps, and switched between runs at one moment of the clip.

import { ask, type Answer, fileUrl, type Row, type SampleItem } from "./api";
import { swatch } from "./chart";
import { looks } from "./colours";
import { dialog, empty, h, isDark, put, quietly, s, toast } from "./dom";
import { duration, isNumber, num, short, value } from "./format";
import { follow } from "./live";
import { Roll } from "./roll";
import { clip, type Note, Player, spectrogram, type Track, wave } from "./sound";
import { choose, chosen, link, type Page, remember } from "./state";

interface Lane {
  run: string;
  items: SampleItem[];
  root: HTMLElement;
  track: Track | null;
  rolls: Roll[];
  heads: HTMLElement[]; // the moving line over a spectrogram
  accent: string;
}

export async function samplesPage(query: URLSearchParams): Promise<Page> {
  let runs = [...new Set((query.get("runs") ?? "").split(",").filter(Boolean))].slice(0, 8);
  const rows = (await ask<{ runs: Row[] }>("runs")).runs;
  if (rows.length === 0) return { title: "Samples", root: empty("No samples yet", "A run makes samples while it trains and at its end:", "rung train piano") };
  if (runs.length === 0) runs = chosen.slice(0, 4);
  runs = runs.filter((run) => rows.some((row) => row.run === run));
  if (runs.length === 0) {
    // The newest run that has any, and the one before it.
    const newest = [...rows].sort((a, b) => String(b.started).localeCompare(String(a.started)));
    for (const row of newest.slice(0, 12)) {
      const found = await ask<{ samples: SampleItem[] }>("samples", { runs: row.run });
      if (found.samples.length > 0) {
        runs = [row.run];
        break;
      }
    }
    if (runs.length === 0) runs = newest.slice(0, 1).map((row) => row.run);
  }
  const [{ samples }, tables] = await Promise.all([ask<{ samples: SampleItem[] }>("samples", { runs: runs.join(",") }), Promise.all(runs.map(async (run): Promise<[string, Answer[]]> => {
    try {
      const found = await ask<Answer[] | { tables: Answer[] }>(`tables/${run}`);
      return [run, Array.isArray(found) ? found : found.tables ?? []];
    } catch {
      return [run, []];
    }
  }))]);
  const shown = new Set(samples.map((one) => one.url)); // a loop's own pictures and sounds are samples already
  return new Samples(runs, rows, samples, tables.map(([run, found]) => [run, found.filter((one) => !shown.has(String(one["url"])))]), query).page();
}

class Samples {
  private readonly steps: number[];
  private step: number;
  private lanes: Lane[] = [];
  private active: Lane | null = null;
  private readonly player = new Player(() => this.moved());
  private readonly body = h("div", { class: "sample-blocks" });
  private readonly playButton = h("button", { type: "button", class: "main", onclick: () => this.player.toggle() }, "Play");
  private readonly time = h("output", { class: "number quiet" });
  private readonly heard = h("span", { class: "heard" });
  private readonly transport: HTMLElement;
  private readonly slider: HTMLInputElement;
  private readonly stepText = h("output", { class: "number" });
  private readonly watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) {
      this.watcher.unobserve(entry.target);
      this.loads.get(entry.target)?.();
    }
  }, { rootMargin: "200px" });
  private readonly loads = new Map<Element, () => void>();
  private urls: string[] = [];
  private stop: () => void = () => undefined;

  constructor(private runs: string[], private readonly rows: Row[], private readonly samples: SampleItem[], private readonly tables: [string, Answer[]][], query: URLSearchParams) {
    const all = [...samples.map((one) => one.step), ...tables.flatMap(([, found]) => found.map((one) => one["step"] as number | null))];
    this.steps = [...new Set(all.filter((step): step is number => typeof step === "number"))].sort((a, b) => a - b);
    const asked = Number(query.get("step") ?? NaN);
    this.step = Number.isFinite(asked) ? this.steps.reduce((best, one) => (Math.abs(one - asked) < Math.abs(best - asked) ? one : best), this.steps[0] ?? 0) : this.steps.at(-1) ?? 0;
    this.slider = h("input", { type: "range", min: 0, max: Math.max(0, this.steps.length - 1), step: 1, value: Math.max(0, this.steps.indexOf(this.step)), "aria-label": "Step", disabled: this.steps.length < 2, oninput: () => this.go(this.steps[Number(this.slider.value)] ?? 0) });
    this.transport = h("div", { class: "transport", role: "group", "aria-label": "Playing" }, this.playButton, this.time, this.heard);
  }

  page(): Page {
    const found = looks(this.runs);
    const root = h("section", { class: "samples", "aria-label": "Samples" },
      h("div", { class: "toolbar" },
        ...this.runs.map((run) => h("span", { class: "chip" }, swatch(found.get(run)!), h("a", { href: `#/run/${run}` }, run), this.runs.length > 1 && h("button", { type: "button", class: "plain small", "aria-label": `Remove ${run}`, onclick: () => this.setRuns(this.runs.filter((one) => one !== run)) }, "✕"))),
        h("button", { type: "button", class: "small", onclick: () => this.add() }, "Add runs"), h("span", { class: "space" }),
        this.steps.length > 0 && h("label", { class: "steps" }, "Step ", this.slider, this.stepText), this.steps.length > 0 && h("a", { class: "button", id: "to-curve" }, "On its curve")),
      this.body, this.transport);
    this.draw();
    const redraw = (): void => this.draw();
    addEventListener("rung-theme", redraw);
    addEventListener("resize", this.moved);
    const look = quietly(() => void this.lookAgain(), 2000);
    this.stop = follow(this.runs, { rows: look, runs: look }, ["loss"]);
    return {
      title: "Samples", root,
      close: () => (this.player.silence(), this.watcher.disconnect(), this.forget(), this.stop(), removeEventListener("rung-theme", redraw), removeEventListener("resize", this.moved)),
      key: (event) => this.key(event),
      keys: [["Space", "play or pause"], ["B", "the next run, at the same moment"], ["← →", "five seconds back or on"], [", .", "the step before or after"]],
    };
  }

  /** A run that goes on makes more samples; they are offered, so that nothing that plays is cut off. */
  private async lookAgain(): Promise<void> {
    const { samples } = await ask<{ samples: SampleItem[] }>("samples", { runs: this.runs.join(",") });
    if (samples.length > this.samples.length) toast(`${samples.length - this.samples.length} new samples`, false, ["Show", () => dispatchEvent(new HashChangeEvent("hashchange"))]);
  }

  private go(step: number): void {
    this.step = step;
    this.slider.value = String(Math.max(0, this.steps.indexOf(step)));
    remember("samples", { runs: this.runs.join(","), step });
    const name = this.active?.root.dataset["stem"], run = this.active?.run;
    this.draw();
    const same = this.lanes.find((lane) => lane.root.dataset["stem"] === name && lane.run === run);
    if (same !== undefined) this.hear(same);
  }

  private forget(): void {
    for (const url of this.urls) URL.revokeObjectURL(url);
    this.urls = [];
    this.loads.clear();
  }

  private draw(): void {
    this.player.silence();
    this.watcher.disconnect();
    this.forget();
    this.lanes = [];
    this.active = null;
    this.stepText.textContent = short(this.step, 8);
    this.stepText.title = `${this.steps.length} steps with samples`;
    const back = document.getElementById("to-curve");
    const to = link("curves", { runs: this.runs.join(","), at: this.step });
    if (back !== null) back.setAttribute("href", to);
    else queueMicrotask(() => document.getElementById("to-curve")?.setAttribute("href", to));
    const stems = new Map<string, Map<string, SampleItem[]>>();
    for (const item of this.samples) {
      const stem = item.name.split("/").at(-1)!.replace(/\.[a-z0-9]+$/i, "");
      const of = stems.get(stem) ?? new Map<string, SampleItem[]>();
      of.set(item.run, [...(of.get(item.run) ?? []), item]);
      stems.set(stem, of);
    }
    if (stems.size === 0 && this.tables.every(([, found]) => found.length === 0)) {
      put(this.body, empty("These runs made no samples", "This makes some from the best checkpoint of a run:", `rung sample ${this.runs[0]}`));
      this.transport.hidden = true;
      return;
    }
    const blocks: HTMLElement[] = [];
    const found = looks(this.runs);
    for (const [stem, byRun] of stems) {
      const block = h("section", { class: "block", "aria-label": stem }, h("h2", {}, stem));
      const lanes = h("div", { class: "lanes" });
      for (const run of this.runs) {
        const items = this.nearest(byRun.get(run) ?? []);
        if (items.length === 0) continue;
        const look = found.get(run)!;
        const lane: Lane = { run, items, root: h("article", { class: "lane", "data-run": run, "data-stem": stem }), track: null, rolls: [], heads: [], accent: isDark() ? look.dark : look.light };
        this.fill(lane, swatch(look));
        lanes.append(lane.root);
        this.lanes.push(lane);
      }
      const hasTime = [...byRun.values()].flat().some((one) => one.kind === "audio" || one.kind === "midi");
      lanes.classList.toggle("side-by-side", !hasTime);
      block.append(lanes);
      blocks.push(block);
    }
    for (const [run, tables] of this.tables) {
      const at = this.nearestTables(tables);
      if (at.length > 0) blocks.push(h("section", { class: "block", "aria-label": `Logged by ${run}` }, h("h2", {}, `Logged by ${run}`), h("div", { class: "lanes side-by-side" }, ...at.map((one) => this.object(one)))));
    }
    put(this.body, ...blocks);
    const playable = this.lanes.filter((lane) => lane.items.some((one) => one.kind === "audio" || one.kind === "midi"));
    this.transport.hidden = playable.length === 0;
    if (playable[0] !== undefined) this.hear(playable[0]);
  }

  /** Of each name the sample of this step, or the last before it; else the first. */
  private nearest(items: SampleItem[]): SampleItem[] {
    const names = [...new Set(items.map((one) => one.name.split("/").at(-1)!))];
    return names.map((name) => {
      const of = items.filter((one) => one.name.split("/").at(-1) === name).sort((a, b) => (a.step ?? 0) - (b.step ?? 0));
      return [...of].reverse().find((one) => (one.step ?? 0) <= this.step) ?? of[0]!;
    });
  }

  private nearestTables(tables: Answer[]): Answer[] {
    const names = [...new Set(tables.map((one) => String(one["name"])))];
    return names.map((name) => {
      const of = tables.filter((one) => String(one["name"]) === name).sort((a, b) => num(a["step"]) - num(b["step"]));
      return [...of].reverse().find((one) => num(one["step"]) <= this.step) ?? of[0]!;
    });
  }

  private fill(lane: Lane, mark: Node): void {
    const { run, items, root } = lane;
    const hasSound = items.some((one) => one.kind === "audio" || one.kind === "midi");
    const step = items[0]!.step;
    root.append(h("header", { class: "row" }, mark, h("b", {}, run), h("span", { class: "quiet number" }, step === null ? "" : `step ${short(step, 8)}`), h("span", { class: "space" }),
      hasSound && h("button", { type: "button", class: "small listen", "aria-pressed": false, "aria-label": `Listen to ${run}`, onclick: () => {
        const isSame = this.active === lane;
        this.hear(lane);
        if (!this.player.isPlaying || isSame) this.player.toggle();
      } }, "Listen")));
    const order = ["midi", "audio", "film", "image", "text"];
    for (const item of [...items].sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind))) root.append(this.item(item, lane));
    const caption = items.map((one) => one.caption).find((one) => one);
    if (caption) root.append(h("p", { class: "quiet caption" }, caption));
  }

  private item(item: SampleItem, lane: Lane): HTMLElement {
    const url = fileUrl(item.url), name = `${item.run}, step ${item.step ?? "?"}, ${item.name}`;
    if (item.kind === "midi") {
      const notes = (item.notes ?? []) as Note[];
      const seconds = Math.max(0.5, ...notes.map(([, end]) => end)) + 0.2;
      if (lane.track?.buffer === undefined) lane.track = { seconds, notes };
      const canvas = h("canvas", { class: "roll", role: "img", "aria-label": `Piano roll of ${name}: ${notes.length} notes in ${duration(seconds)}` });
      canvas.addEventListener("click", (event) => this.jump(lane, event, canvas));
      const roll = new Roll(canvas, notes, seconds);
      lane.rolls.push(roll);
      queueMicrotask(() => roll.draw(0, lane.accent));
      return h("figure", {}, canvas, h("figcaption", { class: "quiet" }, `${notes.length} notes`, " · ", h("a", { href: url, download: "" }, item.name)));
    }
    if (item.kind === "audio") {
      const picture = h("canvas", { class: "spectrogram", role: "img", "aria-label": `Spectrogram of ${name}` }), form = h("canvas", { class: "wave", "aria-hidden": "true" }), head = h("span", { class: "head", "aria-hidden": "true" });
      const note = h("span", { class: "quiet" }, "");
      const box = h("div", { class: "sound" }, picture, form, head);
      box.addEventListener("click", (event) => this.jump(lane, event, box));
      lane.heads.push(head);
      this.loads.set(box, () => void load());
      this.watcher.observe(box);
      const load = async (): Promise<void> => {
        try {
          const buffer = await clip(url);
          spectrogram(buffer, picture);
          wave(buffer, form);
          picture.dataset["ready"] = "true";
          note.textContent = duration(buffer.duration);
          for (const roll of lane.rolls) (roll.stretch(buffer.duration), roll.draw(0, lane.accent));
          const track: Track = { seconds: buffer.duration, buffer };
          lane.track = track;
          if (this.active === lane && !this.player.isPlaying) this.player.take(track);
        } catch (problem) {
          note.textContent = `This sound cannot be read (${problem instanceof Error ? problem.message : String(problem)}).`;
        }
      };
      return h("figure", {}, box, h("figcaption", { class: "quiet" }, note, " · ", h("a", { href: url, download: "" }, item.name)));
    }
    if (item.kind === "image" || (item.kind === "film" && /\.(webp|gif|png)$/i.test(item.url))) {
      const shown = h("img", { src: url, alt: item.text || name, loading: "lazy", onclick: () => dialog(name, h("img", { class: "whole", src: url, alt: item.text || name })) });
      const figure = h("figure", {}, shown, h("figcaption", { class: "quiet" }, h("a", { href: url, target: "_blank", rel: "noopener" }, item.name)));
      // Beside a sound it is a picture of the same; the lanes stay close to each other for the ear.
      return lane.items.some((one) => one.kind === "midi" || one.kind === "audio") ? h("details", {}, h("summary", { class: "quiet" }, item.name), figure) : figure;
    }
    if (item.kind === "film") {
      const film = h("video", { controls: true, loop: true, muted: true, playsinline: true, "aria-label": name });
      this.loads.set(film, () => void (async () => {
        const response = await fetch(url);
        const made = URL.createObjectURL(await response.blob()); // as a blob: nothing else may be played by the page
        this.urls.push(made);
        film.src = made;
      })());
      this.watcher.observe(film);
      return h("figure", {}, film, h("figcaption", { class: "quiet" }, h("a", { href: url, download: "" }, item.name)));
    }
    const text = h("pre", { class: "text", tabindex: 0, "aria-label": name }, item.text ?? "");
    if (item.text === undefined || item.text === null) {
      this.loads.set(text, () => void (async () => (text.textContent = (await (await fetch(url)).text()).slice(0, 100_000)))());
      this.watcher.observe(text);
    }
    return h("figure", {}, text);
  }

  /** What a loop of one's own logged: a table, a histogram, a picture, a sound. */
  private object(one: Answer): HTMLElement {
    const kind = String(one["kind"]).toLowerCase(), title = h("header", { class: "row" }, h("b", {}, String(one["name"])), h("span", { class: "quiet number" }, one["step"] === null || one["step"] === undefined ? "" : `step ${short(one["step"], 8)}`));
    const held = (one["rows"] ?? one["value"] ?? one) as Answer | unknown[];
    if (kind === "histogram") return h("article", { class: "lane", "data-kind": kind }, title, histogram(((one["edges"] ?? (held as Answer)["edges"] ?? []) as unknown[]).map(num), ((one["counts"] ?? (held as Answer)["counts"] ?? []) as unknown[]).map(num)));
    if (kind === "table") {
      const columns = (one["columns"] ?? (held as Answer)["columns"] ?? []) as unknown[], rows = (Array.isArray(held) ? held : (held["rows"] ?? [])) as unknown[][];
      return h("article", { class: "lane", "data-kind": kind }, title, h("div", { class: "scroll", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, ...columns.map((name) => h("th", {}, String(name))))), h("tbody", {}, ...rows.slice(0, 500).map((row) => h("tr", {}, ...row.map((cell) => h("td", { class: isNumber(cell) ? "number" : null }, value(cell)))))))));
    }
    const item: SampleItem = { run: String(one["run"] ?? ""), step: one["step"] as number | null, name: String(one["name"]), kind, url: String(one["url"] ?? "") };
    const lane: Lane = { run: item.run, items: [item], root: h("article", { class: "lane", "data-kind": kind }, title), track: null, rolls: [], heads: [], accent: "#888" };
    lane.root.append(this.item(item, lane));
    if (kind === "audio") {
      title.append(h("button", { type: "button", class: "small listen", "aria-pressed": false, onclick: () => (this.hear(lane), this.player.toggle()) }, "Listen"));
      this.lanes.push(lane);
    }
    return lane.root;
  }

  /** Another lane takes over where the first one is. */
  private hear(lane: Lane): void {
    this.active = lane;
    for (const one of this.lanes) {
      one.root.dataset["heard"] = String(one === lane);
      one.root.querySelector(".listen")?.setAttribute("aria-pressed", String(one === lane));
    }
    this.heard.replaceChildren(`${lane.run} · ${lane.root.dataset["stem"] ?? ""}`);
    this.transport.hidden = false;
    if (lane.track !== null) this.player.take(lane.track);
    else for (const box of lane.root.querySelectorAll(".sound")) this.loads.get(box)?.();
  }

  private jump(lane: Lane, event: MouseEvent, on: HTMLElement): void {
    const box = on.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    const seconds = on.classList.contains("roll") ? lane.rolls[0]?.seconds ?? 0 : lane.track?.seconds ?? 0;
    this.hear(lane);
    this.player.seek(share * seconds);
  }

  private readonly moved = (): void => {
    const at = this.player.position, total = this.player.track?.seconds ?? 0;
    this.playButton.textContent = this.player.isPlaying ? "Pause" : "Play";
    this.time.textContent = `${at.toFixed(1)} of ${total.toFixed(1)} s`;
    this.transport.dataset["playing"] = String(this.player.isPlaying);
    this.transport.dataset["at"] = at.toFixed(3);
    for (const lane of this.lanes) {
      if (lane.root.dataset["stem"] !== this.active?.root.dataset["stem"]) continue; // the same moment of the same clip
      for (const roll of lane.rolls) roll.draw(Math.min(at, roll.seconds), lane.accent);
      const seconds = lane.track?.seconds ?? total;
      for (const head of lane.heads) head.style.left = `${Math.min(100, (100 * at) / (seconds || 1))}%`;
    }
  };

  private key(event: KeyboardEvent): boolean {
    const playable = this.lanes.filter((lane) => lane.root.querySelector(".listen") !== null && lane.root.dataset["stem"] === this.active?.root.dataset["stem"]);
    if (event.key === " " && !(event.target as HTMLElement).matches("button, a, summary, input")) this.player.toggle();
    else if (event.key.toLowerCase() === "b" && playable.length > 1) this.hear(playable[(playable.indexOf(this.active!) + 1) % playable.length]!);
    else if (event.key === "ArrowLeft" && !(event.target as HTMLElement).matches("input")) this.player.seek(this.player.position - 5);
    else if (event.key === "ArrowRight" && !(event.target as HTMLElement).matches("input")) this.player.seek(this.player.position + 5);
    else if (event.key === "," || event.key === ".") this.go(this.steps[Math.max(0, Math.min(this.steps.length - 1, this.steps.indexOf(this.step) + (event.key === "," ? -1 : 1)))] ?? this.step);
    else return false;
    return true;
  }

  private setRuns(runs: string[]): void {
    choose(runs);
    location.hash = link("samples", { runs: runs.join(","), step: this.step });
  }

  private add(): void {
    const wanted = new Set(this.runs), list = h("ul", { class: "picks" });
    const fill = (): void => put(list, ...this.rows.filter((row) => `${row.run} ${row.why ?? ""}`.toLowerCase().includes(search.value.toLowerCase())).slice(0, 200).map((row) => h("li", {}, h("label", {}, h("input", { type: "checkbox", checked: wanted.has(row.run), onchange: (event: Event) => ((event.target as HTMLInputElement).checked ? wanted.add(row.run) : wanted.delete(row.run)) }), h("span", {}, row.run), h("span", { class: "quiet" }, row.why ?? "")))));
    const search = h("input", { type: "search", placeholder: "Search runs", "aria-label": "Search runs", oninput: fill });
    fill();
    const made = dialog("Runs to look at and listen to", search, list, h("p", { class: "row" }, h("button", { type: "button", class: "main", onclick: () => (made.close(), this.setRuns([...wanted].slice(0, 8))) }, "Show")));
    search.focus();
  }
}

function histogram(edges: number[], counts: number[]): HTMLElement {
  const width = 320, height = 120, most = Math.max(1, ...counts), low = edges[0] ?? 0, span = (edges.at(-1) ?? 1) - low || 1;
  const x = (edge: number): number => ((edge - low) / span) * width;
  return h("figure", {}, s("svg", { viewBox: `0 0 ${width} ${height + 18}`, class: "histogram", role: "img", "aria-label": `Histogram of ${counts.reduce((a, b) => a + b, 0)} values from ${short(low)} to ${short(edges.at(-1))}` },
    ...counts.map((count, i) => s("rect", { x: x(edges[i]!) + 0.5, width: Math.max(1, x(edges[i + 1] ?? edges[i]!) - x(edges[i]!) - 1), y: height - (count / most) * (height - 4), height: (count / most) * (height - 4) }, s("title", {}, `${short(edges[i])} to ${short(edges[i + 1])}: ${count}`))),
    s("text", { x: 0, y: height + 14 }, short(low)), s("text", { x: width, y: height + 14, "text-anchor": "end" }, short(edges.at(-1)))));
}
