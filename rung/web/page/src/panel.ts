// The buttons, sliders and keys around the picture: they change the choice and tell what was changed.

import type { Choice } from "./address";
import { isElsewhere } from "./hands";
import type { About } from "./line";
import { fillHelp, find } from "./shell";

export interface Actions {
  changed(): void; // of anything in the choice but the place
  begin(place: number, offset: number): void;
  setMode(mode: Choice["mode"]): void;
  pause(): void;
  step(): void;
  clip(): void;
  still(): void;
  hold(): void;
}

const HELP: [string, string][] = [
  ["W S  ↑ ↓", "forward, back"],
  ["A D  ← →", "turn"],
  ["Q E  Shift and ← →", "sideways, if the model has learned it"],
  ["R F  PgUp PgDn", "look up, down, if the model has learned it"],
  ["− +", "slower, faster"],
  ["Space", "pause, go on"],
  [".", "one step, then pause"],
  ["Backspace", "back to where the walk began"],
  ["[ ]", "previous, next place"],
  ["T", "follow the recording, beside it what is dreamed; any walking key takes over"],
  ["X", "show what differs"],
  ["B", "smooth or crisp"],
  ["M", "hold the mouse, to look around; Esc lets go"],
  ["C", "record a clip; again to save it"],
  ["P", "save a picture"],
  ["Gamepad", "left stick walks, right stick turns and looks"],
  ["Esc", "from a slider or list back to the picture"],
  ["H  ?", "this list"],
];
const THEMES: Choice["theme"][] = ["auto", "light", "dark"];

export class Panel {
  private readonly place = find<HTMLSelectElement>("place");
  private readonly offset = find<HTMLInputElement>("offset");
  private readonly speed = find<HTMLInputElement>("speed");
  private readonly help = find<HTMLDialogElement>("help");
  private places: About["places"] = [];
  private start = { place: 0, offset: 0 };

  constructor(
    private readonly choice: Choice,
    private readonly actions: Actions,
  ) {
    fillHelp(HELP, "Drag over the picture, or hold the mouse with M, to turn and look.");
    this.buttons();
    this.sliders();
    addEventListener("keydown", (event) => this.key(event));
    this.giveFocusBack();
    this.show();
  }

  setUp(about: About): void {
    this.places = about.places;
    const options = about.places.map((place, index) => new Option(`${place.label} (${place.length} steps)`, String(index)));
    this.place.replaceChildren(...options);
    this.start = about.start ?? { place: 0, offset: 0 };
    this.choice.place = Math.min(this.choice.place ?? this.start.place, about.places.length - 1);
    this.choice.offset ??= this.startOf(this.choice.place);
    this.choice.offset = Math.min(this.choice.offset, this.lastOffset());
    this.show();
  }

  /** Puts the choice into all buttons and sliders. */
  show(): void {
    const { choice } = this;
    this.place.value = String(choice.place ?? 0);
    this.offset.max = String(this.lastOffset());
    this.showOffset(choice.offset ?? 0);
    this.speed.value = String(choice.speed);
    find("speed-value").textContent = `${choice.speed.toFixed(2)}${choice.speed > 1 ? ", beyond most of the data" : ""}`;
    for (const name of ["fast", "smooth", "compress"] as const) find<HTMLInputElement>(name).checked = choice[name];
    press("mode-walk", choice.mode === "walk");
    press("mode-follow", choice.mode === "follow");
    press("difference", choice.difference);
    find("difference").toggleAttribute("disabled", choice.mode !== "follow");
    find("theme").textContent = `Theme: ${choice.theme}`;
    document.documentElement.dataset["theme"] = choice.theme;
  }

  showOffset(offset: number): void {
    if (document.activeElement !== this.offset || !this.offset.matches(":active")) this.offset.value = String(offset);
    find("offset-value").textContent = `${this.offset.value} / ${this.offset.max}`;
  }

  showPause(isPaused: boolean): void {
    press("pause", isPaused);
    find("pause").firstChild!.textContent = isPaused ? "Go on " : "Pause ";
  }

  showClip(isOn: boolean): void {
    press("clip", isOn);
    find("clip").firstChild!.textContent = isOn ? "Stop and save " : "Record a clip ";
  }

  private startOf(place: number): number {
    return place === this.start.place ? this.start.offset : 0;
  }

  private lastOffset(): number {
    return Math.max((this.places[this.choice.place ?? 0]?.length ?? 1) - 1, 0);
  }

  private buttons(): void {
    const { actions, choice } = this;
    const click = (id: string, action: () => void): void => find(id).addEventListener("click", action);
    click("pause", actions.pause);
    click("again", () => actions.begin(choice.place ?? 0, choice.offset ?? 0));
    click("mode-walk", () => actions.setMode("walk"));
    click("mode-follow", () => actions.setMode("follow"));
    click("difference", () => this.toggle("difference"));
    click("clip", actions.clip);
    click("still", actions.still);
    click("help-open", () => this.help.showModal());
    click("theme", () => {
      choice.theme = THEMES[(THEMES.indexOf(choice.theme) + 1) % THEMES.length]!;
      this.changed();
    });
    for (const name of ["fast", "smooth", "compress"] as const) {
      find<HTMLInputElement>(name).addEventListener("change", () => this.toggle(name));
    }
  }

  private sliders(): void {
    this.place.addEventListener("change", () => this.goTo(Number(this.place.value)));
    this.offset.addEventListener("input", () => this.showOffset(Number(this.offset.value)));
    this.offset.addEventListener("change", () => this.actions.begin(this.choice.place ?? 0, Number(this.offset.value)));
    this.speed.addEventListener("input", () => this.setSpeed(Number(this.speed.value)));
  }

  private toggle(name: "fast" | "smooth" | "compress" | "difference"): void {
    this.choice[name] = !this.choice[name];
    this.changed();
  }

  private setSpeed(speed: number): void {
    this.choice.speed = Math.max(0.25, Math.min(3, speed));
    this.changed();
  }

  private changed(): void {
    this.show();
    this.actions.changed();
  }

  private goTo(place: number): void {
    const num = this.places.length;
    if (num > 0) this.actions.begin((place + num) % num, this.startOf((place + num) % num));
  }

  private key(event: KeyboardEvent): void {
    const { actions, choice } = this;
    if (event.key === "Escape") find("stage").focus();
    if (isElsewhere(event) || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const commands: Record<string, () => void> = {
      " ": actions.pause,
      ".": actions.step,
      backspace: () => actions.begin(choice.place ?? 0, choice.offset ?? 0),
      "[": () => this.goTo((choice.place ?? 0) - 1),
      "]": () => this.goTo((choice.place ?? 0) + 1),
      "-": () => this.setSpeed(choice.speed - 0.25),
      "+": () => this.setSpeed(choice.speed + 0.25),
      "=": () => this.setSpeed(choice.speed + 0.25), // + without shift, on many keyboards
      t: () => actions.setMode(choice.mode === "walk" ? "follow" : "walk"),
      x: () => choice.mode === "follow" && this.toggle("difference"),
      b: () => this.toggle("smooth"),
      m: actions.hold,
      c: actions.clip,
      p: actions.still,
      h: () => this.help.showModal(),
      "?": () => this.help.showModal(),
    };
    const command = commands[event.key.toLowerCase()];
    if (command === undefined) return;
    event.preventDefault();
    if (!event.repeat || event.key === "." || event.key === "-" || event.key === "+") command();
  }

  /** After a change by mouse the keys walk again; who uses the keyboard stays where they are. */
  private giveFocusBack(): void {
    let isPointer = false;
    addEventListener("pointerdown", () => (isPointer = true), true);
    addEventListener("keydown", () => (isPointer = false), true);
    const back = (): void => {
      if (isPointer && !this.help.open) find("stage").focus({ preventScroll: true });
    };
    for (const part of document.querySelectorAll("select, input")) part.addEventListener("change", back);
    for (const part of document.querySelectorAll("#transport button")) part.addEventListener("click", back);
  }
}

function press(id: string, isPressed: boolean): void {
  find(id).setAttribute("aria-pressed", String(isPressed));
}
