// When to ask for the next view: at the rate of the data, as fast as it goes, or not at all.

export class Pace {
  isFast = false;
  isPaused = false;
  rateHz = 10;
  private dueMs = 0;
  private numOwed = 0;

  constructor(private readonly ask: () => boolean) {}

  start(): void {
    // Animation frames stop in a hidden tab: a page that nobody looks at keeps no GPU busy.
    const tick = (nowMs: number): void => {
      this.tick(nowMs);
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  /** Asks for a number of views even while paused, as after a change of place. */
  owe(num: number): void {
    this.numOwed = Math.max(this.numOwed, num);
  }

  /** To be called when a view has arrived. */
  answered(): void {
    if (this.isFast && !this.isPaused) this.ask();
  }

  private tick(nowMs: number): void {
    const isDue = this.isPaused ? this.numOwed > 0 : this.isFast || nowMs >= this.dueMs;
    if (!isDue || !this.ask()) return;
    this.numOwed = Math.max(0, this.numOwed - 1);
    const periodMs = 1000 / this.rateHz;
    // On average the rate of the data, whatever the screen's; but a delay is not made up for by a rush.
    this.dueMs = Math.max(this.dueMs + periodMs, nowMs - periodMs);
  }
}

/** How many of something there were in the last second. */
export class Rate {
  private times: number[] = [];

  count(nowMs: number): void {
    this.times.push(nowMs);
    if (this.times.length > 1000) this.times.shift();
  }

  perSecond(nowMs: number): number {
    this.times = this.times.filter((time) => nowMs - time < 1000);
    return this.times.length;
  }
}
