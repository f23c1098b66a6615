// Notes as bars over time and pitch, with the moment that is heard.

import { css, isDark } from "./dom";
import { type Note } from "./sound";

const BLACK = new Set([1, 3, 6, 8, 10]);

export class Roll {
  private readonly low: number;
  private readonly high: number;
  private still: HTMLCanvasElement | null = null;
  private key = "";

  constructor(readonly canvas: HTMLCanvasElement, private readonly notes: Note[], private length: number) {
    const keys = notes.map(([, , key]) => key);
    this.low = Math.max(0, Math.min(60, ...keys) - 2);
    this.high = Math.min(127, Math.max(72, ...keys) + 2);
  }

  get seconds(): number {
    return this.length;
  }

  /** As long as the sound that it is seen with. */
  stretch(seconds: number): void {
    this.length = Math.max(this.length, seconds);
    this.still = null;
  }

  /** What stands still is drawn once; then only the moment moves. */
  draw(at: number, accent: string): void {
    const { canvas } = this, ratio = Math.min(2, devicePixelRatio || 1);
    const width = Math.max(1, Math.round(canvas.clientWidth * ratio)), height = Math.max(1, Math.round(canvas.clientHeight * ratio));
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    const key = `${width} ${height} ${accent} ${isDark()}`;
    if (this.still === null || key !== this.key) {
      this.key = key;
      this.still = document.createElement("canvas");
      [this.still.width, this.still.height] = [width, height];
      this.paint(this.still.getContext("2d")!, width, height, accent);
    }
    const ctx = canvas.getContext("2d")!;
    ctx.drawImage(this.still, 0, 0);
    const row = height / (this.high - this.low + 1), x = (at / this.seconds) * width;
    ctx.fillStyle = css("--text");
    for (const [start, end, pitch] of this.notes) {
      if (start > at) break;
      if (end > at) ctx.fillRect((start / this.seconds) * width, (this.high - pitch) * row, Math.max(2, ((end - start) / this.seconds) * width), Math.max(2, row - 1));
    }
    ctx.fillRect(x, 0, Math.max(1, ratio), height);
  }

  private paint(ctx: CanvasRenderingContext2D, width: number, height: number, accent: string): void {
    const row = height / (this.high - this.low + 1);
    ctx.fillStyle = css("--panel");
    ctx.fillRect(0, 0, width, height);
    ctx.fillStyle = css("--track");
    for (let key = this.low; key <= this.high; key += 1) if (BLACK.has(key % 12)) ctx.fillRect(0, (this.high - key) * row, width, row);
    ctx.fillStyle = css("--edge");
    for (let second = 0; second < this.seconds; second += this.seconds > 40 ? 10 : this.seconds > 12 ? 5 : 1) ctx.fillRect((second / this.seconds) * width, 0, 1, height);
    ctx.fillStyle = accent;
    for (const [start, end, key, velocity] of this.notes) {
      ctx.globalAlpha = 0.45 + 0.55 * (velocity / 127);
      ctx.fillRect((start / this.seconds) * width, (this.high - key) * row, Math.max(2, ((end - start) / this.seconds) * width - 1), Math.max(2, row - 1));
    }
    ctx.globalAlpha = 1;
  }
}
