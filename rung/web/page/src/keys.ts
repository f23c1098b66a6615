// Piano keys on the screen and on the computer's keyboard, and the tone of a key that is held.

import { h, put } from "./lab/dom";
import { audio } from "./lab/sound";

// By the place of the key, not its letter, so that hands lie the same on every keyboard.
const LOWER = ["KeyZ", "KeyS", "KeyX", "KeyD", "KeyC", "KeyV", "KeyG", "KeyB", "KeyH", "KeyN", "KeyJ", "KeyM", "Comma", "KeyL", "Period", "Semicolon", "Slash"];
const UPPER = ["KeyQ", "Digit2", "KeyW", "Digit3", "KeyE", "KeyR", "Digit5", "KeyT", "Digit6", "KeyY", "Digit7", "KeyU", "KeyI", "Digit9", "KeyO", "Digit0", "KeyP"];
const NAMES = ["C", "C sharp", "D", "D sharp", "E", "F", "F sharp", "G", "G sharp", "A", "A sharp", "B"];
const VELOCITY = 80; // of keys that know no touch
const FALL_S = 0.12;

export class Keys {
  private low = 21;
  private high = 108;
  private octave = 60;
  private readonly elements = new Map<number, HTMLElement>();
  private readonly pressed = new Map<string, number>(); // on the computer's keyboard
  private readonly pointers = new Map<number, number>();
  private readonly voices = new Map<number, { voice: OscillatorNode; shape: GainNode }>();

  constructor(
    private readonly into: HTMLElement,
    private readonly down: (key: number, velocity: number, atMs: number) => void,
    private readonly up: (key: number, atMs: number) => void,
  ) {
    const keyAt = (event: PointerEvent): number | undefined => {
      const at = document.elementFromPoint(event.clientX, event.clientY)?.closest<HTMLElement>("[data-key]");
      return at === null || at === undefined ? undefined : Number(at.dataset["key"]);
    };
    into.addEventListener("pointerdown", (event) => {
      const key = keyAt(event);
      if (key === undefined || event.button !== 0) return;
      (event.target as Element).releasePointerCapture(event.pointerId); // a finger may slide from key to key
      this.pointers.set(event.pointerId, key);
      this.down(key, VELOCITY, event.timeStamp);
    });
    into.addEventListener("pointermove", (event) => {
      const was = this.pointers.get(event.pointerId), key = keyAt(event);
      if (was === undefined || key === undefined || key === was) return;
      this.up(was, event.timeStamp);
      this.pointers.set(event.pointerId, key);
      this.down(key, VELOCITY, event.timeStamp);
    });
    for (const name of ["pointerup", "pointercancel"] as const) {
      addEventListener(name, (event) => {
        const key = this.pointers.get(event.pointerId);
        if (key === undefined) return;
        this.pointers.delete(event.pointerId);
        this.up(key, event.timeStamp);
      });
    }
  }

  build(low: number, high: number): void {
    [this.low, this.high] = [low, high];
    const isBlack = (key: number): boolean => NAMES[key % 12]!.includes("sharp");
    const all = Array.from({ length: high - low + 1 }, (_, index) => low + index);
    const whites = all.filter((key) => !isBlack(key));
    put(this.into, h("div", { class: "strip" }, all.map((key) => {
      const made = h("button", {
        type: "button", class: `pianokey ${isBlack(key) ? "black" : "white"}`, "data-key": key, tabindex: -1,
        "aria-label": `${NAMES[key % 12]} ${Math.floor(key / 12) - 1}`,
      }, h("span", {}));
      const before = whites.filter((white) => white < key).length;
      made.style.setProperty("--at", String(isBlack(key) ? before - 0.32 : before));
      this.elements.set(key, made);
      return made;
    })));
    (this.into.firstElementChild as HTMLElement).style.setProperty("--whites", String(whites.length));
    this.label();
    this.into.scrollLeft = this.elements.get(this.octave)!.offsetLeft - 8; // where not all fit
  }

  /** A key of the computer's keyboard; false where it is none of the piano. */
  press(event: KeyboardEvent): boolean {
    const offset = offsetOf(event.code);
    if (offset === undefined) return false;
    if (event.repeat || this.pressed.has(event.code)) return true;
    const key = this.octave - 12 + offset;
    if (key < this.low || key > this.high) return true;
    this.pressed.set(event.code, key);
    this.down(key, VELOCITY, event.timeStamp);
    return true;
  }

  lift(event: KeyboardEvent): void {
    const key = this.pressed.get(event.code);
    if (key === undefined) return;
    this.pressed.delete(event.code);
    this.up(key, event.timeStamp);
  }

  /** Forgets which keys are pressed, without a word. */
  letGo(): void {
    this.pressed.clear();
    this.pointers.clear();
  }

  shift(octaves: number): void {
    this.octave = Math.max(36, Math.min(84, this.octave + 12 * octaves));
    this.label();
    this.into.scrollTo({ left: this.elements.get(this.octave)!.offsetLeft - 8, behavior: "smooth" });
  }

  clear(): void {
    this.showOnly(new Set());
  }

  show(key: number, isDown: boolean): void {
    this.elements.get(key)?.setAttribute("aria-pressed", String(isDown));
  }

  showOnly(keys: ReadonlySet<number>): void {
    for (const [key, element] of this.elements) {
      const is = String(keys.has(key));
      if (element.getAttribute("aria-pressed") !== is) element.setAttribute("aria-pressed", is);
    }
  }

  sound(key: number, velocity: number): void {
    this.release(key);
    const context = audio();
    void context.resume();
    const voice = context.createOscillator(), shape = context.createGain(), now = context.currentTime;
    voice.type = "triangle";
    voice.frequency.value = 440 * 2 ** ((key - 69) / 12);
    const loud = 0.25 * (0.12 + 0.6 * (velocity / 127) ** 1.5);
    shape.gain.setValueAtTime(0, now);
    shape.gain.linearRampToValueAtTime(loud, now + 0.006);
    shape.gain.exponentialRampToValueAtTime(loud * 0.12, now + 2.5);
    voice.connect(shape).connect(context.destination);
    voice.start(now);
    this.voices.set(key, { voice, shape });
  }

  release(key: number): void {
    const found = this.voices.get(key);
    if (found === undefined) return;
    this.voices.delete(key);
    const now = audio().currentTime;
    found.shape.gain.cancelScheduledValues(now);
    found.shape.gain.setTargetAtTime(0, now, FALL_S / 3);
    found.voice.stop(now + 3 * FALL_S);
  }

  /** Which letter plays which key. */
  private label(): void {
    for (const element of this.elements.values()) element.firstElementChild!.textContent = "";
    for (const codes of [LOWER.slice(0, 12), UPPER]) {
      for (const code of codes) {
        const element = this.elements.get(this.octave - 12 + offsetOf(code)!);
        if (element !== undefined) element.firstElementChild!.textContent = letter(code);
      }
    }
  }
}

function offsetOf(code: string): number | undefined {
  const lower = LOWER.indexOf(code), upper = UPPER.indexOf(code);
  return lower >= 0 ? lower : upper >= 0 ? 12 + upper : undefined;
}

function letter(code: string): string {
  return code.replace(/^(Key|Digit)/, "");
}
