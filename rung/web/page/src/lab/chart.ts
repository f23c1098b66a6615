// One plot of one metric over any runs: the smoothed line in front of all that was logged, with marks where something was
// not finite or jumped. What a thinned curve shows is min, max and mean of each piece, so no spike is ever left out.

import uPlot from "uplot";
import { type Series } from "./api";
import { type Look } from "./colours";
import { css, h, isDark, s, save } from "./dom";
import { duration, short } from "./format";

export interface Line extends Series {
  look: Look;
  label: string;
}
export interface Mark {
  x: number;
  label: string;
  level: string;
}
export interface Drawing {
  metric: string;
  x: string;
  lines: Line[];
  marks?: Mark[];
  logX?: boolean;
  logY?: boolean;
  fit?: boolean; // the scale takes in every spike
  range?: [number, number] | null;
}
interface Options {
  height: number;
  sync?: string;
  onZoom?: (range: [number, number] | null) => void;
  onPick?: (x: number) => void;
}
const AXIS: Record<string, string> = { step: "step", targets: "targets", epochs: "epochs", time: "time" };

export class Chart {
  readonly root: HTMLElement;
  private readonly stage: HTMLElement;
  private readonly readout: HTMLElement;
  private plot: uPlot | null = null;
  private drawing: Drawing | null = null;
  private key = "";
  private readonly watcher: ResizeObserver;

  constructor(private readonly options: Options) {
    this.stage = h("div", { class: "stage", tabindex: 0, role: "img", onkeydown: (event: Event) => this.press(event as KeyboardEvent) });
    this.readout = h("div", { class: "readout", hidden: true });
    this.root = h("div", { class: "chart" }, this.stage, this.readout);
    this.watcher = new ResizeObserver(() => {
      const width = this.stage.clientWidth;
      if (this.plot !== null && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.options.height });
      else if (this.plot === null && this.drawing !== null && width > 0) this.show(this.drawing);
    });
    this.watcher.observe(this.stage);
  }

  destroy(): void {
    this.watcher.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  get height(): number {
    return this.options.height;
  }

  set height(value: number) {
    this.options.height = value;
    this.plot?.setSize({ width: this.stage.clientWidth, height: value });
  }

  show(drawing: Drawing): void {
    this.drawing = drawing;
    const width = this.stage.clientWidth;
    if (width === 0) return; // not in the page yet; the observer comes back
    const { lines, logX, logY } = drawing;
    this.stage.setAttribute("aria-label", this.summary());
    const key = JSON.stringify([lines.map((one) => [one.run, one.look]), logX, logY, drawing.x, drawing.metric, isDark()]);
    const data = this.aligned();
    if (this.plot !== null && key === this.key) {
      this.plot.setData(data, true);
      return;
    }
    this.plot?.destroy();
    this.key = key;
    const dark = isDark(), quiet = css("--quiet"), grid = css("--grid");
    const axis: uPlot.Axis = {
      stroke: quiet, font: "11px system-ui, sans-serif", gap: 4,
      grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 },
    };
    const options: uPlot.Options = {
      width, height: this.options.height, padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: {
        drag: { x: true, y: false, setScale: false, dist: 4 },
        points: { size: 7 },
        y: false, // the same height says nothing on another plot
        ...(this.options.sync === undefined ? {} : { sync: { key: this.options.sync, setSeries: false } }),
      },
      select: { show: true, left: 0, top: 0, width: 0, height: 0 },
      scales: {
        x: { time: false, distr: logX ? 3 : 1, range: (u, low, high) => this.rangeX(u, low, high) },
        y: { distr: logY ? 3 : 1, range: () => this.rangeY() },
      },
      axes: [
        { ...axis, size: 30, space: 70, values: (_, splits) => splits.map((x) => (x === null ? "" : drawing.x === "time" ? duration(x) : compact(x))) },
        { ...axis, size: 58, space: 32, values: (_, splits) => splits.map((y) => (y === null ? "" : compact(y))) },
      ],
      series: [
        {},
        ...lines.map((line): uPlot.Series => ({
          stroke: dark ? line.look.dark : line.look.light, width: 1.75, dash: line.look.dash, spanGaps: true,
          points: { show: line.x.length < 2 || (line.x.length <= 40 && lines.length <= 6), size: 5 },
        })),
      ],
      hooks: {
        drawAxes: [(u) => this.drawBehind(u)],
        draw: [(u) => this.drawInFront(u)],
        setCursor: [(u) => this.tell(u)],
        setSelect: [(u) => this.zoom(u)],
        ready: [(u) => {
          u.over.addEventListener("dblclick", () => this.options.onZoom?.(null));
          u.over.addEventListener("click", () => {
            const left = u.cursor.left ?? -1;
            if (left >= 0 && u.select.width < 4) this.options.onPick?.(u.posToVal(left, "x"));
          });
        }],
      },
    };
    this.plot = new uPlot(options, data, this.stage);
  }

  /** The lines on one x axis; where one has no point there is none. */
  private aligned(): uPlot.AlignedData {
    const { lines, logX, logY } = this.drawing!;
    if (lines.length === 0) return [[]];
    const usable = (y: number | null | undefined): number | null =>
      typeof y === "number" && Number.isFinite(y) && !(logY === true && y <= 0) ? y : null;
    const tables = lines.map((line): uPlot.AlignedData => {
      const kept = logX === true ? line.x.map((x, i) => [x, i] as const).filter(([x]) => x > 0).map(([, i]) => i) : line.x.map((_, i) => i);
      return [kept.map((i) => line.x[i]!), kept.map((i) => usable(line.mean[i]))];
    });
    return uPlot.join(tables);
  }

  private rangeX(_: uPlot, low: number | null, high: number | null): [number, number] {
    const asked = this.drawing?.range;
    const [from, to] = asked ?? [low ?? 0, high ?? 1];
    if (this.drawing?.logX === true) return [Math.max(from, 1e-9), Math.max(to, from * 1.1, 1e-8)];
    return from === to ? [from - 1, to + 1] : [from, to];
  }

  /** Of all that is logged, but for single spikes, which are marked at the edge, unless they are to be taken in. */
  private rangeY(): [number, number] {
    const { lines, logY, fit } = this.drawing!;
    const lows: number[] = [], highs: number[] = [];
    const usable = (y: number | null | undefined): y is number => typeof y === "number" && Number.isFinite(y) && !(logY === true && y <= 0);
    const least: number[] = [], most: number[] = [];
    for (const line of lines) {
      for (let i = 0; i < line.x.length; i += 1) {
        const mean = line.mean[i], min = line.min[i], max = line.max[i];
        if (usable(min)) lows.push(min);
        if (usable(max)) highs.push(max);
        if (usable(mean)) (least.push(mean), most.push(mean));
      }
    }
    if (highs.length === 0) return logY === true ? [0.1, 10] : [0, 1];
    lows.sort((a, b) => a - b);
    highs.sort((a, b) => a - b);
    const share = fit === true || highs.length < 30 ? 0 : 0.005;
    let low = lows[Math.floor(share * (lows.length - 1))] ?? 0, high = highs[Math.ceil((1 - share) * (highs.length - 1))] ?? 1;
    if (fit !== true) {
      // A jump by more than the rest of the curve is high leaves nothing to see of the rest.
      const middle = least.sort((a, b) => a - b);
      most.sort((a, b) => a - b);
      const a = middle[Math.floor(0.02 * (middle.length - 1))] ?? low, b = most[Math.ceil(0.98 * (most.length - 1))] ?? high;
      const span = Math.max(b - a, Math.abs(b) * 1e-6);
      low = Math.max(low, a - 2.5 * span);
      high = Math.min(high, b + 2.5 * span);
    }
    for (const { value } of this.baselines()) {
      const span = high - low;
      if (usable(value) && value < high + 0.6 * span && value > low - 0.6 * span) (low = Math.min(low, value)), (high = Math.max(high, value));
    }
    if (logY === true) return [low / 1.08, high * 1.08];
    if (low === high) return [low - Math.max(Math.abs(low) * 0.1, 1e-9), high + Math.max(Math.abs(high) * 0.1, 1e-9)];
    const margin = 0.05 * (high - low);
    return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
  }

  private baselines(): { name: string; value: number }[] {
    const found = new Map<string, { name: string; value: number }>();
    for (const line of this.drawing?.lines ?? []) {
      for (const one of line.baselines ?? []) found.set(`${one.name} ${one.value.toPrecision(6)}`, one);
    }
    return [...found.values()];
  }

  /** What was logged, as a zigzag between the least and the most of each piece. */
  private drawBehind(u: uPlot): void {
    const { ctx, bbox } = u, dark = isDark(), ratio = uPlot.pxRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = ratio;
    ctx.lineJoin = "round";
    for (const line of this.drawing?.lines ?? []) {
      ctx.strokeStyle = dark ? line.look.dark : line.look.light;
      ctx.globalAlpha = dark ? 0.34 : 0.28;
      ctx.beginPath();
      for (const [x, y] of this.raw(line)) {
        const px = u.valToPos(x, "x", true), py = u.valToPos(y, "y", true);
        if (Number.isFinite(px) && Number.isFinite(py)) ctx.lineTo(px, py);
      }
      ctx.stroke();
    }
    ctx.globalAlpha = 1;
    ctx.strokeStyle = css("--quiet");
    ctx.fillStyle = css("--quiet");
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "alphabetic";
    const [bottom, top] = [u.scales["y"]!.min ?? 0, u.scales["y"]!.max ?? 1];
    for (const { name, value } of this.baselines()) {
      const isHigh = value > top, isLow = value < bottom;
      const y = isHigh ? bbox.top : isLow ? bbox.top + bbox.height : u.valToPos(value, "y", true);
      if (!isHigh && !isLow) {
        ctx.setLineDash([2 * ratio, 3 * ratio]);
        ctx.beginPath();
        ctx.moveTo(bbox.left, y);
        ctx.lineTo(bbox.left + bbox.width, y);
        ctx.stroke();
        ctx.setLineDash([]);
      }
      const text = `${name} ${short(value)}${isHigh ? " ↑" : isLow ? " ↓" : ""}`;
      ctx.fillText(text, bbox.left + bbox.width - 5 * ratio, isHigh ? y + 13 * ratio : y - 5 * ratio);
    }
    ctx.restore();
  }

  private *raw(line: Line): Generator<[number, number]> {
    const { logX, logY } = this.drawing!;
    for (let i = 0; i < line.x.length; i += 1) {
      const x = line.x[i]!, min = line.min[i], max = line.max[i];
      if (logX === true && x <= 0) continue;
      const isUp = i % 2 === 0; // from low to high, then back, as it shakes
      for (const y of isUp ? [min, max] : [max, min]) {
        if (typeof y === "number" && Number.isFinite(y) && !(logY === true && y <= 0)) yield [x, y];
        if (min === max) break;
      }
    }
  }

  private drawInFront(u: uPlot): void {
    const { ctx, bbox } = u, ratio = uPlot.pxRatio, dark = isDark();
    const isIn = (px: number): boolean => px >= bbox.left - 1 && px <= bbox.left + bbox.width + 1;
    ctx.save();
    ctx.lineWidth = 1.5 * ratio;
    for (const line of this.drawing?.lines ?? []) {
      ctx.fillStyle = dark ? line.look.dark : line.look.light;
      for (const [x, y] of spikes(line)) {
        const px = u.valToPos(x, "x", true);
        if (!isIn(px)) continue;
        const py = Math.max(bbox.top + 8 * ratio, u.valToPos(y, "y", true) - 4 * ratio);
        ctx.beginPath();
        ctx.moveTo(px, py - 7 * ratio);
        ctx.lineTo(px - 4 * ratio, py);
        ctx.lineTo(px + 4 * ratio, py);
        ctx.fill();
      }
      ctx.strokeStyle = css("--bad");
      for (const x of line.has_nonfinite.slice(0, 400)) {
        const px = u.valToPos(x, "x", true), py = bbox.top + bbox.height - 8 * ratio, size = 4 * ratio;
        if (!isIn(px)) continue;
        ctx.globalAlpha = 0.35;
        ctx.beginPath();
        ctx.moveTo(px, bbox.top);
        ctx.lineTo(px, bbox.top + bbox.height);
        ctx.stroke();
        ctx.globalAlpha = 1;
        ctx.beginPath();
        ctx.moveTo(px - size, py - size);
        ctx.lineTo(px + size, py + size);
        ctx.moveTo(px + size, py - size);
        ctx.lineTo(px - size, py + size);
        ctx.stroke();
      }
    }
    ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    (this.drawing?.marks ?? []).forEach((mark, i) => {
      const px = u.valToPos(mark.x, "x", true);
      if (!isIn(px)) return;
      ctx.strokeStyle = ctx.fillStyle = css(mark.level === "fatal" || mark.level === "sick" ? "--bad" : mark.level === "warn" ? "--warn" : "--quiet");
      ctx.beginPath();
      ctx.moveTo(px, bbox.top);
      ctx.lineTo(px, bbox.top + bbox.height);
      ctx.stroke();
      const width = ctx.measureText(mark.label).width + 8 * ratio, y = bbox.top + (i % 4) * 17 * ratio;
      const left = px + width > bbox.left + bbox.width ? px - width : px;
      ctx.fillRect(left, y, width, 15 * ratio);
      ctx.fillStyle = css("--panel");
      ctx.fillText(mark.label, left + 4 * ratio, y + 11 * ratio);
    });
    ctx.restore();
  }

  private tell(u: uPlot): void {
    const left = u.cursor.left ?? -1, drawing = this.drawing;
    if (left < 0 || drawing === null || drawing.lines.length === 0) {
      this.readout.hidden = true;
      return;
    }
    const x = u.posToVal(left, "x");
    const top = u.cursor.top ?? 0;
    const rows = drawing.lines.flatMap((line) => {
      const i = nearest(line.x, x);
      if (i < 0) return [];
      const mean = line.mean[i] ?? NaN, min = line.min[i] ?? NaN, max = line.max[i] ?? NaN;
      return [{ line, at: line.x[i]!, mean, min, max, far: Math.abs(u.valToPos(mean, "y") - top) }];
    });
    if (rows.length === 0) return;
    const closest = rows.reduce((a, b) => (b.far < a.far ? b : a));
    rows.sort((a, b) => b.mean - a.mean);
    const most = 12, first = Math.min(Math.max(0, rows.indexOf(closest) - 6), Math.max(0, rows.length - most));
    this.readout.replaceChildren(
      h("div", { class: "at" }, `${AXIS[drawing.x] ?? drawing.x} ${drawing.x === "time" ? duration(closest.at) : short(closest.at, 6)}`),
      ...rows.slice(first, first + most).map((row) =>
        h("div", { class: row === closest ? "entry near" : "entry" }, swatch(row.line.look), h("span", { class: "who" }, row.line.run),
          h("span", { class: "number" }, short(row.mean, 5)),
          h("span", { class: "number span" }, row.min < row.max ? `${short(row.min, 3)} – ${short(row.max, 3)}` : ""))),
    );
    this.readout.hidden = false;
    const width = this.readout.offsetWidth, room = this.stage.clientWidth, px = left + u.bbox.left / uPlot.pxRatio;
    this.readout.style.left = `${px + width + 18 > room ? Math.max(0, px - width - 12) : px + 12}px`;
  }

  private zoom(u: uPlot): void {
    const { left, width } = u.select;
    if (width < 4) return;
    const range: [number, number] = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.options.onZoom?.(range);
  }

  private press(event: KeyboardEvent): void {
    const u = this.plot;
    if (u === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = u.scales["x"]!, room = u.bbox.width / uPlot.pxRatio;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const by = (event.key === "ArrowLeft" ? -1 : 1) * (event.shiftKey ? 20 : 4);
      const at = u.cursor.left ?? -1;
      const left = Math.min(room, Math.max(0, (at < 0 ? room / 2 : at) + by));
      const line = this.drawing?.lines[0], i = line === undefined ? -1 : nearest(line.x, u.posToVal(left, "x"));
const top = i < 0 ? 10 : Math.max(0, u.valToPos(line!.mean[i] ?? NaN, "y")) || 10;
      const box = u.over.getBoundingClientRect(); // as the mouse would, so that the other plots follow
      u.over.dispatchEvent(new MouseEvent("mouseenter", { clientX: box.left + left, clientY: box.top + top }));
      u.over.dispatchEvent(new MouseEvent("mousemove", { clientX: box.left + left, clientY: box.top + top }));
    } else if ((event.key === "+" || event.key === "=") && min !== undefined && max !== undefined) {
      const at = (u.cursor.left ?? -1) >= 0 ? u.posToVal(u.cursor.left!, "x") : (min! + max!) / 2;
      this.options.onZoom?.([at - (at - min!) / 2, at + (max! - at) / 2]);
    } else if (event.key === "-" && min !== undefined && max !== undefined) {
      const all = this.drawing?.lines.flatMap((line) => [line.x[0] ?? 0, line.x.at(-1) ?? 1]) ?? [];
      const range: [number, number] = [min! - (max! - min!) / 2, max! + (max! - min!) / 2];
      this.options.onZoom?.(this.drawing?.range == null || range[0] <= Math.min(...all) - (max! - min!) * 4 ? null : [Math.max(0, range[0]), range[1]]);
    } else if (event.key === "0" || event.key === "Escape") this.options.onZoom?.(null);
    else if (event.key === "Enter" && (u.cursor.left ?? -1) >= 0) this.options.onPick?.(u.posToVal(u.cursor.left!, "x"));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** What a person hears who does not see the plot. */
  private summary(): string {
    const { metric, lines } = this.drawing!;
    const said = lines.slice(0, 12).map((line) => `${line.run} ${short(line.last ?? line.mean.at(-1))}${line.has_nonfinite.length > 0 ? ", not finite at times" : ""}`);
    return `${metric} of ${lines.length} run${lines.length === 1 ? "" : "s"}. Last: ${said.join("; ")}. Arrow keys read values, plus and minus zoom, 0 shows all.`;
  }

  csv(): string {
    const { metric, x, lines } = this.drawing!;
    const quote = (text: string): string => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const rows = lines.flatMap((line) => line.x.map((at, i) => [quote(line.run), at, line.mean[i], line.min[i], line.max[i]].join(",")));
    return [`run,${x},${quote(metric)},least,most`, ...rows, ""].join("\n");
  }

  png(done: () => void = () => undefined): void {
    const u = this.plot, drawing = this.drawing;
    if (u === null || drawing === null) return;
    const ratio = uPlot.pxRatio, source = u.ctx.canvas, lines = drawing.lines;
    const canvas = h("canvas", { width: source.width, height: source.height + (34 + 18 * lines.length) * ratio });
    const ctx = canvas.getContext("2d")!;
    ctx.fillStyle = css("--panel");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.fillStyle = css("--text");
    ctx.font = `600 ${13 * ratio}px system-ui, sans-serif`;
    ctx.fillText(drawing.metric, 12 * ratio, 20 * ratio);
    ctx.drawImage(source, 0, 28 * ratio);
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    lines.forEach((line, i) => {
      const y = source.height + (28 + 18 * i + 10) * ratio;
      ctx.strokeStyle = isDark() ? line.look.dark : line.look.light;
      ctx.lineWidth = 2.5 * ratio;
      ctx.setLineDash(line.look.dash.map((one) => one * ratio));
      ctx.beginPath();
      ctx.moveTo(14 * ratio, y - 4 * ratio);
      ctx.lineTo(38 * ratio, y - 4 * ratio);
      ctx.stroke();
      ctx.fillText(line.label, 46 * ratio, y);
    });
    canvas.toBlob((blob) => {
      if (blob !== null) save(blob, `${fileName(drawing)}.png`);
      done();
    });
  }

  /** The same plot as vectors, on white, for a paper. */
  svg(): string {
    const u = this.plot!, drawing = this.drawing!;
    const ratio = uPlot.pxRatio, width = u.width, plotTop = 30, height = u.height + plotTop + 18 * drawing.lines.length + 8;
    const box = { left: u.bbox.left / ratio, top: u.bbox.top / ratio + plotTop, width: u.bbox.width / ratio, height: u.bbox.height / ratio };
    const px = (x: number): number => box.left + u.valToPos(x, "x"), py = (y: number): number => box.top + u.valToPos(y, "y");
    const path = (points: Iterable<[number, number]>): string => {
      const out: string[] = [];
      for (const [x, y] of points) if (Number.isFinite(y) && Number.isFinite(x)) out.push(`${out.length === 0 ? "M" : "L"}${px(x).toFixed(2)} ${py(y).toFixed(2)}`);
      return out.join("");
    };
    const made = s("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height}`, width, height, "font-family": "system-ui, sans-serif", "font-size": 11 },
      s("rect", { width, height, fill: "#fff" }),
      s("text", { x: 12, y: 18, "font-size": 13, "font-weight": 600, fill: "#16191f" }, drawing.metric),
      s("clipPath", { id: "plot" }, s("rect", { x: box.left, y: box.top, width: box.width, height: box.height })));
    const inner = u.axes as unknown as { _splits?: number[]; _values?: string[] }[];
    (inner[0]?._splits ?? []).forEach((x, i) => made.append(
      s("line", { x1: px(x), x2: px(x), y1: box.top, y2: box.top + box.height, stroke: "#e4e7eb" }),
      s("text", { x: px(x), y: box.top + box.height + 16, "text-anchor": "middle", fill: "#59636f" }, inner[0]?._values?.[i] ?? "")));
    (inner[1]?._splits ?? []).forEach((y, i) => made.append(
      s("line", { x1: box.left, x2: box.left + box.width, y1: py(y), y2: py(y), stroke: "#e4e7eb" }),
      s("text", { x: box.left - 8, y: py(y) + 4, "text-anchor": "end", fill: "#59636f" }, inner[1]?._values?.[i] ?? "")));
    const shown = s("g", { "clip-path": "url(#plot)", fill: "none", "stroke-linejoin": "round" });
    for (const line of drawing.lines) shown.append(s("path", { d: path(this.raw(line)), stroke: line.look.light, "stroke-opacity": 0.28 }));
    for (const line of drawing.lines) {
      const points = line.x.map((x, i): [number, number] => [x, line.mean[i] ?? NaN]);
      shown.append(s("path", { d: path(points), stroke: line.look.light, "stroke-width": 1.75, "stroke-dasharray": line.look.dash.join(" ") || null }));
      for (const x of line.has_nonfinite) shown.append(s("line", { x1: px(x), x2: px(x), y1: box.top, y2: box.top + box.height, stroke: "#b3261e", "stroke-opacity": 0.4 }));
    }
    for (const { name, value } of this.baselines()) shown.append(
      s("line", { x1: box.left, x2: box.left + box.width, y1: py(value), y2: py(value), stroke: "#59636f", "stroke-dasharray": "2 3" }),
      s("text", { x: box.left + box.width - 4, y: py(value) - 4, "text-anchor": "end", fill: "#59636f", stroke: "none" }, `${name} ${short(value)}`));
    made.append(shown);
    drawing.lines.forEach((line, i) => {
      const y = u.height + plotTop + 18 * i + 8;
      made.append(
        s("line", { x1: 14, x2: 38, y1: y - 4, y2: y - 4, stroke: line.look.light, "stroke-width": 2.5, "stroke-dasharray": line.look.dash.join(" ") || null }),
        s("text", { x: 46, y, "font-size": 12, fill: "#16191f" }, line.label));
    });
    return new XMLSerializer().serializeToString(made);
  }

  saveAs(kind: "png" | "svg" | "csv"): void {
    if (this.drawing === null || this.plot === null) return;
    if (kind === "png") this.png();
    else if (kind === "svg") save(new Blob([this.svg()], { type: "image/svg+xml" }), `${fileName(this.drawing)}.svg`);
    else save(new Blob([this.csv()], { type: "text/csv" }), `${fileName(this.drawing)}.csv`);
  }
}

function fileName(drawing: Drawing): string {
  const runs = drawing.lines.slice(0, 3).map((line) => line.run.replace("/", "-")).join("_");
  return `${drawing.metric.replaceAll("/", "-")}_${runs}`;
}

/** A short piece of the line as it is drawn. */
export function swatch(look: Look): SVGSVGElement {
  const line = s("line", { x1: 0, x2: 18, y1: 5, y2: 5, "stroke-width": 2.5, "stroke-dasharray": look.dash.map((one) => one * 0.7).join(" ") || null });
  line.style.stroke = `light-dark(${look.light}, ${look.dark})`;
  return s("svg", { class: "swatch", viewBox: "0 0 18 10", width: 18, height: 10, "aria-hidden": "true" }, line);
}

function compact(x: number): string {
  const size = Math.abs(x);
  if (size >= 1e9) return `${+(x / 1e9).toPrecision(4)}G`;
  if (size >= 1e6) return `${+(x / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(x / 1e3).toPrecision(4)}k`;
  if (size > 0 && size < 1e-3) return x.toExponential(1).replace(".0e", "e");
  return String(+x.toPrecision(5));
}

export function nearest(values: readonly number[], x: number): number {
  let low = 0, high = values.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle]! < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && Math.abs(values[low - 1]! - x) <= Math.abs(values[low]! - x) ? low - 1 : low;
}

const found = new WeakMap<number[], [number, number][]>();

/** Highest of the pieces that stand out from their neighbours by eight times what these differ, a dozen at most. */
function spikes(line: Line): [number, number][] {
  const known = found.get(line.max);
  if (known !== undefined) return known;
  const reach = 12, out: [number, number, number][] = [];
  if (line.max.length >= 2 * reach) {
    for (let i = 0; i < line.max.length; i += 1) {
      const top = line.max[i];
      if (typeof top !== "number" || !Number.isFinite(top)) continue;
      const from = Math.max(0, Math.min(line.max.length - 2 * reach, i - reach));
      const around = line.max.slice(from, from + 2 * reach).filter((y) => typeof y === "number" && Number.isFinite(y)).sort((a, b) => a - b);
      const middle = around[around.length >> 1] ?? top;
      if (top <= middle) continue;
      const off = around.map((y) => Math.abs(y - middle)).sort((a, b) => a - b)[around.length >> 1] ?? 0;
      const excess = (top - middle) / Math.max(off, Math.abs(middle) * 1e-3, 1e-12);
      if (excess > 8 && top >= (around.at(-1) ?? top)) out.push([line.x[i]!, top, excess]);
    }
  }
  const kept = out.sort((a, b) => b[2] - a[2]).slice(0, 12).map(([x, y]): [number, number] => [x, y]);
  found.set(line.max, kept);
  return kept;
}
