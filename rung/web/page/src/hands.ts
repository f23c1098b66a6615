// From keys and pointer to intents: how far to go in each way with the next step, in units of a brisk move.

type Move = readonly [intent: string, sign: number, instead?: string]; // instead: where the model lacks the intent

// By the place of the key, not its letter, so that hands lie the same on every keyboard.
const MOVES: Readonly<Record<string, Move>> = {
  KeyW: ["forward", 1],
  ArrowUp: ["forward", 1],
  KeyS: ["forward", -1],
  ArrowDown: ["forward", -1],
  KeyA: ["turn", -1, "right"],
  ArrowLeft: ["turn", -1, "right"],
  KeyD: ["turn", 1, "right"],
  ArrowRight: ["turn", 1, "right"],
  KeyQ: ["right", -1],
  KeyE: ["right", 1],
  KeyR: ["look", 1],
  PageUp: ["look", 1],
  KeyF: ["look", -1],
  PageDown: ["look", -1],
};
const SIDEWAYS: Readonly<Record<string, Move>> = {
  KeyA: ["right", -1],
  ArrowLeft: ["right", -1],
  KeyD: ["right", 1],
  ArrowRight: ["right", 1],
};
const PIXELS = 12; // of pointer movement between two steps that make a brisk turn
const DEAD = 0.15; // of a stick that nobody touches
const OWN_KEYS = /^(Arrow|Page|Home|End)/; // what a slider does with keys itself

export class Hands {
  intents: readonly string[] = [];
  private readonly held = new Set<string>();
  private readonly tapped = new Set<string>(); // pressed since the last step; a short tap must not fall between two
  private isShifted = false;
  private isDragging = false;
  private dx = 0;
  private dy = 0;
  private sticks: Record<string, number> = {};

  constructor(
    private readonly stage: HTMLElement,
    private readonly moved: () => void,
  ) {
    addEventListener("keydown", (event) => this.down(event));
    addEventListener("keyup", (event) => {
      this.isShifted = event.shiftKey;
      this.held.delete(event.code);
    });
    addEventListener("blur", () => this.letGo());
    stage.addEventListener("pointerdown", (event) => {
      stage.focus({ preventScroll: true });
      if (event.button !== 0) return;
      this.isDragging = true;
      stage.setPointerCapture(event.pointerId);
    });
    stage.addEventListener("pointermove", (event) => this.drag(event));
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) {
      stage.addEventListener(name, () => (this.isDragging = false));
    }
  }

  /** What is wanted now; also forgets what was only tapped or dragged. */
  take(speed: number): Record<string, number> {
    const sums: Record<string, number> = {};
    for (const code of new Set([...this.held, ...this.tapped])) {
      const [intent, sign] = this.moveOf(code) ?? ["", 0];
      sums[intent] = (sums[intent] ?? 0) + sign;
    }
    sums["turn"] = (sums["turn"] ?? 0) + this.dx / PIXELS;
    sums["look"] = (sums["look"] ?? 0) - this.dy / PIXELS;
    for (const [intent, value] of Object.entries(this.sticks)) sums[intent] = (sums[intent] ?? 0) + value;
    this.tapped.clear();
    this.dx = this.dy = 0;
    const wanted: Record<string, number> = {};
    for (const [intent, sum] of Object.entries(sums)) {
      const value = speed * Math.max(-1, Math.min(1, sum));
      if (value !== 0 && this.intents.includes(intent)) wanted[intent] = Math.round(1e4 * value) / 1e4;
    }
    return wanted;
  }

  /** Buttons that hold the key they name while a finger is on them. */
  touch(buttons: HTMLElement): void {
    for (const button of buttons.querySelectorAll<HTMLElement>("[data-code]")) {
      const code = button.dataset["code"]!;
      button.addEventListener("pointerdown", (event) => {
        event.preventDefault();
        event.stopPropagation(); // to the picture it would be the beginning of a drag
        button.setPointerCapture(event.pointerId);
        this.held.add(code);
        this.tapped.add(code);
        this.moved();
      });
      for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) {
        button.addEventListener(name, () => this.held.delete(code));
      }
      button.addEventListener("contextmenu", (event) => event.preventDefault());
    }
  }

  /** Where the sticks of a gamepad are now; the left one walks, the right one turns and looks. */
  readGamepad(): void {
    const pad = navigator.getGamepads?.().find((one) => one !== null);
    const axis = (index: number): number => {
      const value = pad?.axes[index] ?? 0;
      return Math.abs(value) < DEAD ? 0 : value;
    };
    const button = (index: number): number => Number(pad?.buttons[index]?.pressed ?? false);
    const [side, ahead] = [axis(0) + button(15) - button(14), -axis(1) + button(12) - button(13)];
    this.sticks = { right: side, forward: ahead, turn: axis(2), look: -axis(3) };
    if (!this.intents.includes("right")) {
      this.sticks["turn"] = this.sticks["turn"]! + side;
      this.sticks["right"] = 0;
    }
    if (Object.values(this.sticks).some((value) => value !== 0)) this.moved();
  }

  letGo(): void {
    this.held.clear();
    this.tapped.clear();
    this.isDragging = false;
  }

  /** Holds the pointer, so that it can turn without end; again, or Escape, lets it go. */
  async hold(): Promise<void> {
    if (document.pointerLockElement === this.stage) document.exitPointerLock();
    else await this.stage.requestPointerLock();
  }

  private moveOf(code: string): Move | undefined {
    const move = (this.isShifted && this.intents.includes("right") && SIDEWAYS[code]) || MOVES[code];
    if (move === undefined || this.intents.includes(move[0])) return move;
    return move[2] === undefined ? undefined : [move[2], move[1]];
  }

  private down(event: KeyboardEvent): void {
    this.isShifted = event.shiftKey;
    if (isElsewhere(event) || event.ctrlKey || event.metaKey || event.altKey) return;
    // Before the server has said what the model understands, every move may turn out to be one.
    if ((this.intents.length === 0 ? MOVES[event.code] : this.moveOf(event.code)) === undefined) return;
    event.preventDefault();
    if (event.repeat) return;
    this.held.add(event.code);
    this.tapped.add(event.code);
    this.moved();
  }

  private drag(event: PointerEvent): void {
    if (!this.isDragging && document.pointerLockElement !== this.stage) return;
    this.dx += event.movementX;
    this.dy += event.movementY;
    if (event.movementX !== 0 || event.movementY !== 0) this.moved();
  }
}

/** Whether a key is meant for the control that has the focus, or for the help over the page. */
export function isElsewhere(event: KeyboardEvent): boolean {
  const { target } = event;
  if (!(target instanceof HTMLElement)) return false;
  if (target.closest("dialog") !== null || target instanceof HTMLSelectElement) return true;
  if (target instanceof HTMLInputElement && target.type === "range") return OWN_KEYS.test(event.code);
  return event.code === "Space" && (target instanceof HTMLButtonElement || target instanceof HTMLInputElement);
}
