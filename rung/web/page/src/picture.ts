// The canvas: the dream alone, or recorded and dreamed side by side with what differs.

import type { Pictures } from "./line";

const TALLEST = 640; // small frames are enlarged to about this, by a whole factor, also in clips
const WIDEST = 1280; // all panes together
const GAP = 4;
const GAIN = 3; // differences are mostly small

interface Pane {
  name: string;
  source: CanvasImageSource;
}

export class Picture {
  private readonly context: CanvasRenderingContext2D;
  private readonly scratch = new Map<string, CanvasRenderingContext2D>();
  private width = 1;
  private height = 1;
  private last: Pictures = new Map();
  isSmooth = false;
  hasDifference = false;
  distance: number | null = null; // mean absolute difference of dream and recording, where -1..1 are black and white

  constructor(readonly canvas: HTMLCanvasElement) {
    this.context = canvas.getContext("2d", { alpha: false })!;
  }

  size(width: number, height: number): void {
    this.width = width;
    this.height = height;
    this.scratch.clear();
    this.draw();
  }

  show(pictures: Pictures): void {
    for (const old of this.last.values()) if (old instanceof ImageBitmap) old.close();
    this.last = pictures;
    this.draw();
  }

  draw(): void {
    const panes = this.panes();
    const { context, canvas, width, height } = this;
    const num = panes.length;
    const factor = Math.max(1, Math.floor(Math.min(TALLEST / height, WIDEST / (num * width))));
    const fullWidth = Math.max(1, num * width * factor + (num - 1) * GAP);
    const strip = num > 1 ? Math.max(24, Math.round(fullWidth / 42)) : 0; // below the panes, for their names
    const fullHeight = height * factor + strip;
    if (canvas.width !== fullWidth || canvas.height !== fullHeight) {
      canvas.width = fullWidth;
      canvas.height = fullHeight;
    }
    canvas.dataset["panes"] = panes.map((pane) => pane.name).join(" ");
    context.fillStyle = "#0b0d11";
    context.fillRect(0, 0, fullWidth, fullHeight);
    context.imageSmoothingEnabled = this.isSmooth;
    context.imageSmoothingQuality = "high";
    context.font = `${Math.round(0.6 * strip)}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    panes.forEach((pane, index) => {
      const x = index * (width * factor + GAP);
      context.drawImage(pane.source, x, 0, width * factor, height * factor);
      if (strip === 0) return;
      context.fillStyle = "#c9d1dc";
      context.fillText(this.caption(pane.name), x + 6, height * factor + strip / 2 + 1, width * factor - 12);
    });
  }

  private caption(name: string): string {
    if (name === "real") return "recorded";
    const distance = this.distance === null ? "" : `, L1 ${this.distance.toFixed(3)}`;
    return name === "dream" ? `dreamed${distance}` : `difference ×${GAIN}`;
  }

  private panes(): Pane[] {
    const dream = this.last.get("dream");
    const real = this.last.get("real");
    this.distance = null;
    if (dream === undefined) return [];
    const dreamed = this.put("dream", dream);
    if (real === undefined) return [{ name: "dream", source: dreamed.canvas }];
    const recorded = this.put("real", real);
    const difference = this.subtract(recorded, dreamed);
    return [
      { name: "real", source: recorded.canvas },
      { name: "dream", source: dreamed.canvas },
      ...(this.hasDifference ? [{ name: "difference", source: difference.canvas }] : []),
    ];
  }

  /** A picture at its own size on a canvas of its own, from which it can be enlarged. */
  private put(name: string, image: ImageData | ImageBitmap): CanvasRenderingContext2D {
    let context = this.scratch.get(name);
    if (context === undefined) {
      const canvas = document.createElement("canvas");
      canvas.width = this.width;
      canvas.height = this.height;
      context = canvas.getContext("2d", { alpha: false, willReadFrequently: true })!;
      this.scratch.set(name, context);
    }
    if (image instanceof ImageData) context.putImageData(image, 0, 0);
    else context.drawImage(image, 0, 0);
    return context;
  }

  private subtract(left: CanvasRenderingContext2D, right: CanvasRenderingContext2D): CanvasRenderingContext2D {
    const { data: a } = left.getImageData(0, 0, this.width, this.height);
    const { data: b } = right.getImageData(0, 0, this.width, this.height);
    const image = new ImageData(this.width, this.height);
    let sum = 0;
    for (let at = 0; at < a.length; at += 4) {
      for (let colour = at; colour < at + 3; colour += 1) {
        const apart = Math.abs(a[colour]! - b[colour]!);
        sum += apart;
        image.data[colour] = GAIN * apart; // clamped by the array
      }
      image.data[at + 3] = 255;
    }
    this.distance = sum / (0.75 * a.length) / 127.5;
    return this.put("difference", image);
  }
}
