// Any metrics of any runs over each other. One zoom and one cursor for all plots; what differs between the runs is their name.

import { ask, type Answer, curve, type Curve, Refusal, type Row } from "./api";
import { Chart, type Line, type Mark, swatch } from "./chart";
import { looks } from "./colours";
import { dialog, empty, h, put, quietly } from "./dom";
import { bytes, leaves, loss, num, plural, short, value } from "./format";
import { follow } from "./live";
import { bestOf, status } from "./runs";
import { choose, chosen, link, type Page, remember } from "./state";

const MOST = 24;
const AXES: [string, string][] = [["step", "Step"], ["targets", "Targets"], ["epochs", "Epochs"], ["time", "Time"]];

export async function curvesPage(query: URLSearchParams): Promise<Page> {
  let runs = [...new Set((query.get("runs") ?? "").split(",").filter(Boolean))];
  if (runs.length === 0) runs = chosen.slice(0, MOST);
  let rows: Row[] | null = null;
  if (runs.length === 0) {
    rows = (await ask<{ runs: Row[] }>("runs")).runs;
    const newest = [...rows].sort((a, b) => String(b.started).localeCompare(String(a.started)));
    runs = newest.slice(0, 3).map((row) => row.run);
    if (runs.length === 0) return { title: "Curves", root: empty("No curves yet", "Curves appear with the first step of the first run.", "rung train piano") };
  }
  return new Curves(runs.slice(0, MOST), query).page();
}

interface Panel {
  metric: string;
  chart: Chart;
  root: HTMLElement;
  note: HTMLElement;
  last: Curve | null;
  abort: AbortController | null;
  timer: number;
}

class Curves {
  private metrics: string[];
  private names: string[] = [];
  private panels = new Map<string, Panel>();
  private hidden = new Set<string>();
  private x: string;
  private smooth: number;
  private logX: boolean;
  private logY: boolean;
  private fit: boolean;
  private range: [number, number] | null = null;
  private large: string | null;
  private labels = new Map<string, string>();
  private rows = new Map<string, Answer>();
  private marks = new Map<string, Mark[]>();
  private hasFindings: boolean;
  private isUsual: boolean; // nobody chose the metrics
  private at: string | null; // a step that one came from
  private followed = "";
  private extent: [number, number] | null = null;
  private stop: () => void = () => undefined;
  private readonly grid = h("div", { class: "panels" });
  private readonly legend = h("ul", { class: "legend" });
  private readonly picker = h("div", { class: "picker" });
  private readonly output = h("output", { class: "number" });
  private readonly reset = h("button", { type: "button", hidden: true, onclick: () => this.zoom(null) }, "Show all ", h("kbd", {}, "0"));
  private readonly redraw = (): void => this.panels.forEach((panel) => this.draw(panel));

  constructor(private runs: string[], query: URLSearchParams) {
    this.metrics = query.get("metrics")?.split(",").filter(Boolean) ?? [];
    this.isUsual = this.metrics.length === 0;
    this.x = AXES.some(([name]) => name === query.get("x")) ? query.get("x")! : "step";
    this.smooth = Math.min(0.999, Math.max(0, Number(query.get("smooth") ?? 0.6) || 0));
    this.logX = query.get("logx") === "1";
    this.logY = query.get("logy") === "1";
    this.fit = query.get("fit") === "1";
    this.hasFindings = query.get("findings") === "1";
    this.large = query.get("large");
    const at = (this.at = query.get("at"));
    if (at !== null && Number.isFinite(Number(at))) this.marks.set("", [{ x: Number(at), label: `step ${at}`, level: "info" }]);
  }

  page(): Page {
    const toggle = (text: string, title: string, isOn: boolean, set: (on: boolean) => void): HTMLElement => {
      const button = h("button", { type: "button", title, "aria-pressed": isOn, onclick: () => {
        const now = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(now));
        set(now);
        this.remember();
      } }, text);
      return button;
    };
    const axis = h("select", { onchange: () => {
      this.x = axis.value;
      this.range = null;
      this.load();
    } }, ...AXES.map(([name, title]) => h("option", { value: name }, title)));
    axis.value = this.x;
    const later = quietly(() => this.load(), 120);
    const slider = h("input", { type: "range", min: 0, max: 100, step: 1, value: toSlider(this.smooth), "aria-label": "Smoothing", oninput: () => {
      this.smooth = fromSlider(Number(slider.value));
      this.output.textContent = this.smooth.toFixed(this.smooth > 0.99 ? 3 : 2);
      later();
    } });
    this.output.textContent = this.smooth.toFixed(2);
    const root = h("section", { class: "curves", "aria-label": "Curves" },
      h("div", { class: "toolbar" },
        h("label", {}, "x ", axis),
        h("label", { class: "smooth", title: "A debiased running mean, computed on every step before the curve is thinned; what was logged stays behind it" }, "Smooth ", slider, this.output),
        toggle("log x", "Logarithmic x axis", this.logX, (on) => ((this.logX = on), this.redraw())),
        toggle("log y", "Logarithmic y axis", this.logY, (on) => ((this.logY = on), this.redraw())),
        toggle("Fit spikes", "The scale takes in every spike; else single ones are marked at the edge", this.fit, (on) => ((this.fit = on), this.redraw())),
        toggle("Findings", "What the doctor found, at the step since when", this.hasFindings, (on) => ((this.hasFindings = on), on ? void this.diagnose() : this.redraw())),
        this.reset),
      h("div", { class: "with-rail" },
        h("aside", { class: "rail" },
          h("h2", {}, "Runs"), this.legend,
          h("p", { class: "row" }, h("button", { type: "button", class: "small", onclick: () => void this.addRuns() }, "Add runs")),
          h("h2", {}, "Metrics"), this.picker),
        this.grid));
    void this.start();
    addEventListener("rung-theme", this.redraw);
    return {
      title: "Curves", root,
      close: () => (this.stop(), this.panels.forEach((panel) => this.close(panel)), removeEventListener("rung-theme", this.redraw)),
      key: (event) => this.key(event),
      keys: [["0", "show all of the x axis"], ["drag", "zoom into a stretch, on all plots"], ["← →", "read values, on a plot that has the focus"], ["+ −", "zoom, on a plot that has the focus"], ["L", "logarithmic y axis"]],
    };
  }

  private async start(): Promise<void> {
    if (this.isUsual) this.metrics = ["loss"]; // at once; the others when it is known what these runs recorded
    this.showLegend();
    this.showPicker();
    this.load();
    const found = await Promise.all(this.runs.map(async (run): Promise<[string, Answer | null]> => {
      try {
        return [run, await ask<Answer>(`run/${run}`)];
      } catch (problem) {
        if (problem instanceof Refusal && problem.status === 404) return [run, null];
        return [run, {}];
      }
    }));
    const absent = found.filter(([, known]) => known === null).map(([run]) => run);
    if (absent.length > 0) {
      this.runs = this.runs.filter((run) => !absent.includes(run));
      choose(chosen.filter((run) => !absent.includes(run)));
      if (this.runs.length === 0) put(this.grid, empty("These runs are not here", `${absent.join(", ")} ${absent.length === 1 ? "was" : "were"} moved or renamed.`, "rung ls"));
      else this.load();
    }
    for (const [run, known] of found) if (known !== null) this.rows.set(run, known);
    const of = new Set<string>();
    for (const known of this.rows.values()) for (const name of namesOf(known)) of.add(name);
    if (of.size > 0) {
      this.names = [...of];
      const wanted = this.isUsual ? usual(this.names) : this.metrics;
      if (wanted.join() !== this.metrics.join()) {
        this.metrics = wanted;
        this.load();
      }
    }
    for (const [run, label] of differing(this.runs, this.rows)) this.labels.set(run, label);
    this.showLegend();
    this.showPicker();
    this.redraw();
    if (this.hasFindings) void this.diagnose();
  }

  private listen(): void {
    this.followed = this.metrics.join();
    const renew = quietly(() => this.load(true), 250);
    this.stop();
    this.stop = follow(this.runs, {
      rows: (run, rows, isRestarted) => {
        if (isRestarted || !this.extend(run, rows)) renew();
      },
      runs: (rows) => rows.forEach((row) => {
        const known = this.rows.get(String(row["run"]));
        if (known === undefined) return;
        Object.assign(known, { status: row["status"] ?? known["status"] });
        this.showLegend();
      }),
    }, this.metrics);
  }

  /** Puts new steps at the end of what is drawn, at once; true where nothing has to be asked for. */
  private extend(run: string, rows: Answer[]): boolean {
    if (this.x !== "step" || this.range !== null) return false;
    let isWhole = true;
    for (const panel of this.panels.values()) {
      const series = panel.last?.series.find((one) => one.run === run);
      const news = rows.filter((row) => row[panel.metric] !== undefined && typeof row["step"] === "number");
      if (series === undefined) {
        if (news.length > 0) isWhole = false;
        continue;
      }
      const smooth = smoothing(panel.metric, this.smooth);
      for (const row of news) {
        const x = row["step"] as number, y = num(row[panel.metric]);
        if (x <= (series.x.at(-1) ?? -Infinity)) continue;
        const before = series.mean.at(-1) ?? y;
        series.x.push(x);
        if (Number.isFinite(y)) {
          series.min.push(y), series.max.push(y);
          // Far from the start the debiased mean is the plain one; near it the next whole answer puts it right.
          series.mean.push(Number.isFinite(before) ? smooth * before + (1 - smooth) * y : y);
        } else series.min.push(NaN), series.max.push(NaN), series.mean.push(NaN), series.has_nonfinite.push(x);
        series.last = row[panel.metric];
        series.num_points += 1;
      }
      if (news.length > 0 && (series.x.length > 3000 || series.num_points < 200)) isWhole = false;
    }
    this.stretch();
    this.redraw();
    return isWhole;
  }

  private remember(): void {
    remember("curves", {
      runs: this.runs.join(","), metrics: this.isUsual ? "" : this.metrics.join(","), x: this.x === "step" ? "" : this.x, smooth: this.smooth === 0.6 ? "" : +this.smooth.toFixed(4),
      logx: this.logX ? 1 : "", logy: this.logY ? 1 : "", fit: this.fit ? 1 : "", findings: this.hasFindings ? 1 : "", large: this.large, at: this.at,
    });
    if (this.smooth === 0) remember("curves", Object.fromEntries([...new URLSearchParams(location.hash.split("?")[1]), ["smooth", "0"]]));
  }

  private load(isQuiet = false): void {
    if (!isQuiet) this.remember();
    if (this.followed !== this.metrics.join()) this.listen();
    for (const [metric, panel] of this.panels) {
      if (this.metrics.includes(metric)) continue;
      this.close(panel);
      panel.root.remove();
      this.panels.delete(metric);
    }
    if (this.metrics.length === 0) {
      put(this.grid, empty("No metric is chosen", "Choose some on the left; the loss is a good start."));
      return;
    }
    this.grid.querySelector(":scope > .empty")?.remove();
    this.metrics.forEach((metric, i) => {
      const panel = this.panels.get(metric) ?? this.open(metric);
      if (this.grid.children[i] !== panel.root) this.grid.insertBefore(panel.root, this.grid.children[i] ?? null);
      panel.root.classList.toggle("large", this.large === metric || this.metrics.length === 1);
      panel.chart.height = this.large === metric || this.metrics.length === 1 ? 440 : 250;
      void this.fetch(panel);
    });
  }

  private open(metric: string): Panel {
    const chart = new Chart({ height: 250, sync: "curves", onZoom: (range) => this.zoom(range), onPick: (x) => this.pick(x) });
    const note = h("p", { class: "note quiet", role: "status" });
    const save = (kind: "png" | "svg" | "csv"): HTMLElement => h("button", { type: "button", class: "plain small", "aria-label": `Save ${metric} as ${kind.toUpperCase()}`, onclick: () => chart.saveAs(kind) }, kind.toUpperCase());
    const enlarge = h("button", { type: "button", class: "plain small", title: "Larger, or as before", "aria-label": `Enlarge ${metric}`, onclick: () => {
      this.large = this.large === metric ? null : metric;
      this.load();
    } }, "⤢");
    const remove = h("button", { type: "button", class: "plain small", "aria-label": `Remove ${metric}`, onclick: () => this.setMetric(metric, false) }, "✕");
    const root = h("article", { class: "panel", "data-metric": metric, "aria-label": metric },
      h("header", { class: "row" }, h("h3", {}, metric), h("span", { class: "space" }), h("span", { class: "quietly" }, save("png"), save("svg"), save("csv"), enlarge, remove)), chart.root, note);
    const panel: Panel = { metric, chart, root, note, last: null, abort: null, timer: 0 };
    this.panels.set(metric, panel);
    return panel;
  }

  private close(panel: Panel): void {
    clearTimeout(panel.timer);
    panel.abort?.abort();
    panel.chart.destroy();
  }

  private async fetch(panel: Panel): Promise<void> {
    panel.abort?.abort();
    clearTimeout(panel.timer);
    const abort = (panel.abort = new AbortController());
    const [from, to] = this.range ?? [undefined, undefined];
    try {
      const answer = await curve({ runs: this.runs.join(","), metric: panel.metric, x: this.x, from, to, points: 1000, smooth: smoothing(panel.metric, this.smooth) }, abort.signal);
      panel.last = answer;
      if (this.stretch()) this.redraw();
      else this.draw(panel);
      const reading = answer.reading ?? [];
      if (reading.length > 0) {
        panel.note.replaceChildren(...reading.map((one) => h("span", {}, `Reading ${one.run} for the first time: `, h("progress", { max: Math.max(1, one.total_bytes), value: one.done_bytes, "aria-label": `Reading ${one.run}` }), ` ${bytes(one.done_bytes)} of ${bytes(one.total_bytes)}`)));
        panel.timer = window.setTimeout(() => void this.fetch(panel), 150);
        return;
      }
      const without = this.runs.filter((run) => !answer.series.some((one) => one.run === run));
      const other = (answer.errors ?? []).filter((one) => one.code !== "no-metric");
      panel.note.textContent = answer.series.length === 0 ? other[0]?.message ?? "None of these runs recorded it." : other.length > 0 ? other.map((one) => one.message).join(" ") : without.length > 0 && this.runs.length > 1 ? `Not recorded by ${without.length > 3 ? plural(without.length, "run") : without.join(", ")}.` : "";
    } catch (problem) {
      if (abort.signal.aborted) return;
      panel.note.textContent = problem instanceof Refusal ? problem.message : "The server does not answer.";
    }
  }

  private draw(panel: Panel): void {
    if (panel.last === null) return;
    const found = looks(this.runs);
    const lines: Line[] = panel.last.series.filter((one) => !this.hidden.has(one.run) && one.x.length > 0)
      .map((one) => ({ ...one, look: found.get(one.run)!, label: this.name(one.run) })).filter((one) => one.look !== undefined);
    const marks = this.x === "step" ? [...(this.marks.get("") ?? []), ...(this.hasFindings ? this.runs.filter((run) => !this.hidden.has(run)).flatMap((run) => this.marks.get(run) ?? []) : [])] : [];
    panel.chart.show({ metric: panel.metric, x: panel.last.x ?? this.x, lines, marks, logX: this.logX, logY: this.logY, fit: this.fit, range: this.range ?? (this.logX ? null : this.extent) });
    panel.root.dataset["points"] = String(lines.reduce((sum, one) => sum + one.num_points, 0));
    panel.root.dataset["last"] = String(lines[0]?.x.at(-1) ?? "");
    panel.root.dataset["smooth"] = String(this.smooth);
  }

  /** All plots have one x axis, as far as any curve goes; true where that has changed. */
  private stretch(): boolean {
    let low = Infinity, high = -Infinity;
    for (const panel of this.panels.values()) for (const one of panel.last?.series ?? []) {
      if (this.hidden.has(one.run) || one.x.length === 0) continue;
      low = Math.min(low, one.x[0]!);
      high = Math.max(high, one.x.at(-1)!);
    }
    const before = this.extent;
    this.extent = low < high ? [low, high] : null;
    return before?.[0] !== this.extent?.[0] || before?.[1] !== this.extent?.[1];
  }

  private name(run: string): string {
    const label = this.labels.get(run) ?? "";
    return label === "" ? run : `${run}  ${label}`;
  }

  private async diagnose(): Promise<void> {
    await Promise.all(this.runs.map(async (run) => {
      try {
        const { findings } = await ask<{ findings: { rule: string; severity: string; since: number | null }[] }>(`doctor/${run}`);
        this.marks.set(run, findings.filter((one) => one.since !== null && one.severity !== "info").map((one) => ({ x: one.since!, label: this.runs.length > 1 ? `${one.rule} ${run}` : one.rule, level: one.severity })));
      } catch {
        // a run that cannot be judged has no marks
      }
    }));
    this.redraw();
  }

  private zoom(range: [number, number] | null): void {
    this.range = range;
    this.reset.hidden = range === null;
    this.load();
  }

  /** From a place on a curve to what the runs made of it there. */
  private pick(x: number): void {
    if (this.x !== "step") return;
    const menu = dialog(`Step ${Math.round(x)}`, h("p", {}, "Go from here to what the runs made near this step, or to what the doctor says."),
      h("p", { class: "row" }, h("a", { class: "button main", href: link("samples", { runs: this.runs.slice(0, 6).join(","), step: Math.round(x) }), onclick: () => menu.close() }, "Samples near it"),
        ...this.runs.slice(0, 6).map((run) => h("a", { class: "button", href: `#/health/${run}`, onclick: () => menu.close() }, `Health of ${run}`))));
  }

  private showLegend(): void {
    const found = looks(this.runs);
    put(this.legend, this.runs.map((run) => {
      const known = this.rows.get(run), label = this.labels.get(run);
      const isOn = !this.hidden.has(run);
      return h("li", { "data-run": run }, h("label", { title: isOn ? "Hide" : "Show" }, h("input", { type: "checkbox", checked: isOn, "aria-label": `Show ${run}`, onchange: () => {
        if (isOn) this.hidden.add(run);
        else this.hidden.delete(run);
        this.stretch();
        this.showLegend();
        this.redraw();
      } }), swatch(found.get(run)!)),
      h("div", { class: "about" }, h("a", { href: `#/run/${run}` }, run), known !== undefined && known["status"] !== undefined && known["status"] !== "finished" && status(String(known["status"])),
        h("span", { class: "differs" }, label || (this.labels.size > 0 && this.runs.length > 1 ? "no key differs" : ""))),
      h("span", { class: "number" }, known === undefined ? "" : loss(bestOf(known as unknown as Row))),
      h("button", { type: "button", class: "plain small", "aria-label": `Remove ${run}`, onclick: () => this.setRuns(this.runs.filter((one) => one !== run)) }, "✕"));
    }));
  }

  private showPicker(): void {
    const list = h("ul", { class: "picks" });
    const search = h("input", { type: "search", placeholder: "Search metrics", "aria-label": "Search metrics", oninput: () => fill() });
    const fill = (): void => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const names = [...new Set([...this.metrics, ...this.names])].filter((name) => words.every((word) => name.toLowerCase().includes(word)));
      put(list, names.slice(0, 300).map((name) => h("li", {}, h("label", {}, h("input", { type: "checkbox", checked: this.metrics.includes(name), onchange: (event: Event) => this.setMetric(name, (event.target as HTMLInputElement).checked, false) }), h("span", {}, name)))),
        names.length === 0 && h("li", { class: "quiet" }, "No metric is called that."));
    };
    fill();
    put(this.picker, search, list);
  }

  private setMetric(name: string, isOn: boolean, isShown = true): void {
    this.isUsual = false;
    this.metrics = isOn ? [...this.metrics.filter((one) => one !== name), name] : this.metrics.filter((one) => one !== name);
    this.load();
    if (isShown) this.showPicker();
  }

  private setRuns(runs: string[]): void {
    choose(runs);
    location.hash = link("curves", { ...Object.fromEntries(new URLSearchParams(location.hash.split("?")[1] ?? "")), runs: runs.join(",") });
  }

  private async addRuns(): Promise<void> {
    const { runs } = await ask<{ runs: Row[] }>("runs");
    const list = h("ul", { class: "picks" }), wanted = new Set(this.runs);
    const fill = (): void => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = runs.filter((row) => words.every((word) => `${row.run} ${row.why ?? ""} ${row.tags.join(" ")} ${row.changed.flat().join(" ")}`.toLowerCase().includes(word)));
      put(list, fits.slice(0, 200).map((row) => h("li", {}, h("label", {}, h("input", { type: "checkbox", checked: wanted.has(row.run), onchange: (event: Event) => {
        if ((event.target as HTMLInputElement).checked) wanted.add(row.run);
        else wanted.delete(row.run);
      } }), h("span", {}, row.run), h("span", { class: "quiet" }, row.changed.slice(0, 2).map(([key, , b]) => `${key}=${value(b)}`).join("  ") || row.why || "")))));
    };
    const search = h("input", { type: "search", placeholder: "Search runs", "aria-label": "Search runs", oninput: fill });
    fill();
    const made = dialog("Runs to show", search, list, h("p", { class: "row" }, h("button", { type: "button", class: "main", onclick: () => (made.close(), this.setRuns([...wanted].slice(0, MOST))) }, "Show")));
    search.focus();
  }

  private key(event: KeyboardEvent): boolean {
    if (event.key === "0" || (event.key === "Escape" && this.range !== null)) this.zoom(null);
    else if (event.key.toLowerCase() === "l") {
      this.logY = !this.logY;
      this.remember();
      this.redraw();
      document.querySelector("[title='Logarithmic y axis']")?.setAttribute("aria-pressed", String(this.logY));
    } else return false;
    return true;
  }
}

export function namesOf(run: Answer): string[] {
  const metrics = run["metrics"];
  return Array.isArray(metrics) ? (metrics as string[]) : Object.keys((metrics ?? {}) as object);
}

/** Evals are few and rates are exact: both are drawn as they are. */
export function smoothing(metric: string, smooth: number): number {
  return /^eval\/|(^|\/)lr$/.test(metric) ? 0 : +smooth.toFixed(4);
}

/** What one looks at first: the loss, that of the evals, the norm and the rate. */
export function usual(names: readonly string[]): string[] {
  const evals = names.filter((name) => /^eval\/.*\/?loss$/.test(name)).slice(0, 2);
  const found = ["loss", "train/loss", ...evals, "norm", "lr"].filter((name) => names.includes(name));
  return found.length > 0 ? found.slice(0, 4) : names.slice(0, 4);
}

/** Each run by the config keys that are not the same in all of them, the most telling first. */
function differing(runs: string[], rows: Map<string, Answer>): Map<string, string> {
  const flat = new Map(runs.filter((run) => rows.has(run)).map((run) => [run, leaves(rows.get(run)!["config"])]));
  const keys = new Set([...flat.values()].flatMap((config) => Object.keys(config)));
  const out = new Map<string, string>();
  if (flat.size < 2) return out;
  const differ = [...keys].filter((key) => new Set([...flat.values()].map((config) => JSON.stringify(config[key] ?? null))).size > 1);
  differ.sort((a, b) => Number(a === "seed") - Number(b === "seed"));
  const tails = differ.map((key) => key.split(".").at(-1)!);
  for (const [run, config] of flat) {
    const words = differ.map((key, i) => (config[key] === undefined ? "" : `${tails.filter((one) => one === tails[i]).length > 1 ? key : tails[i]} ${short(config[key])}`)).filter(Boolean);
    out.set(run, words.slice(0, 3).join(", ") + (words.length > 3 ? ` +${words.length - 3}` : ""));
  }
  return out;
}

/** More room at the end, where it matters: 0.9, 0.99, 0.999. */
function toSlider(smooth: number): number {
  return smooth <= 0 ? 0 : Math.round((-Math.log10(1 - smooth) / 3) * 100);
}

function fromSlider(at: number): number {
  return at === 0 ? 0 : 1 - 10 ** ((-3 * at) / 100);
}

